#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <numeric>

#include "bench/gpu.hpp"
#include "bench/report.hpp"
#include "doctor/machine.hpp"

namespace ferry::cli {
namespace {

GpuResult::Times times_of(const GpuBenchSettings& s, const GpuBoard& board, std::size_t line,
                          bool alone) {
  std::vector<double> slowest;
  for (int i = 0; i < s.shape.iterations; ++i) {
    double most = 0;
    for (int r = 0; r < s.shape.ranks; ++r) most = std::max(most, board.sample(line, alone, r, i));
    slowest.push_back(most);
  }
  std::sort(slowest.begin(), slowest.end());
  const double sum = std::accumulate(slowest.begin(), slowest.end(), 0.0);
  return {slowest.front(), sum / static_cast<double>(slowest.size()), percentile(slowest, 0.50),
          percentile(slowest, 0.95)};
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

nlohmann::json to_json(const GpuResult& r) {
  const auto& line = r.line;
  return {
      {"name", name_of(line.which)},
      {"dtype", ferry::name_of(is_combine(line.which) && line.dtype == Dtype::e4m3 ? Dtype::bf16
                                                                                   : line.dtype)},
      {"tokens", line.tokens},
      {"sms", line.sms},
      {"rows", r.rows},
      {"row_bytes", r.row_bytes},
      {"logical_bytes", r.logical_bytes},
      {"wire_bytes", r.wire_bytes},
      {"min_us", r.chained.min},
      {"mean_us", r.chained.mean},
      {"p50_us", r.chained.p50},
      {"p95_us", r.chained.p95},
      {"single_p50_us", r.alone.p50},
      {"single_p95_us", r.alone.p95},
      {"logical_gbps", r.logical_gbps()},
      {"wire_gbps", r.wire_gbps()}};
}

}  // namespace

std::vector<GpuLine> lines_of(const GpuBenchSettings& s) {
  std::vector<GpuLine> lines;
  for (std::size_t t = 0; t < s.tokens.size(); ++t) {
    bool combined = false;
    for (const Dtype dtype : s.dtypes) {
      for (const int sms : s.sms) {
        for (int c = 0; c < kGpuCases; ++c) {
          const auto which = static_cast<GpuCase>(c);
          if (is_combine(which) && combined) continue;
          if (which == GpuCase::dispatch_quantized && dtype != Dtype::e4m3) continue;
          if (which == GpuCase::plan && (dtype != s.dtypes.front() || sms != s.sms.front())) {
            continue;  // the same for all
          }
          if (which == GpuCase::nccl_all_to_all &&
              (s.nccl.library.empty() || sms != s.sms.back())) {
            continue;  // the same for all numbers of SMs
          }
          const bool nccl = which == GpuCase::nccl_all_to_all;
          lines.push_back({t, s.tokens[t], dtype, nccl ? 0 : sms, which});
        }
      }
      combined = combined || dtype == Dtype::bf16 || dtype == Dtype::e4m3;
    }
  }
  return lines;
}

std::vector<GpuResult> results_of(const GpuBenchSettings& s, const GpuBoard& board) {
  std::vector<GpuResult> results;
  for (std::size_t i = 0; i < board.lines.size(); ++i) {
    GpuResult result;
    result.line = board.lines[i];
    result.ranks = s.shape.ranks;
    result.chained = times_of(s, board, i, false);
    result.alone = times_of(s, board, i, true);
    if (result.line.which != GpuCase::plan) {
      const BenchSettings one = s.with(result.line.tokens, result.line.dtype);
      result.row_bytes =
          is_combine(result.line.which) ? one.combine_row_bytes() : one.dispatch_row_bytes();
      std::int64_t to_self = 0;
      for (int r = 0; r < s.shape.ranks; ++r) {
        const BenchRows& rows = board.rows(result.line.tokens_index, r);
        result.rows += rows.rows;
        to_self += rows.rows_to_self;
      }
      result.logical_bytes = static_cast<std::uint64_t>(result.rows) * result.row_bytes;
      result.wire_bytes = static_cast<std::uint64_t>(result.rows - to_self) * result.row_bytes;
    }
    results.push_back(result);
  }
  return results;
}

std::string table(const GpuBenchSettings& s, const std::vector<GpuResult>& results) {
  std::string text = fmt::format(
      "{} ranks as {} on GPUs, hidden {}, top-{} of {} experts, {} routes, seed {}\n",
      s.shape.ranks, s.shape.processes ? "processes" : "threads", s.shape.hidden, s.shape.topk,
      s.shape.experts, s.shape.routes == RouteShape::zipf ? "zipf" : "uniform", s.shape.seed);
  const GpuLine* before = nullptr;
  for (const GpuResult& r : results) {
    const GpuLine& line = r.line;
    if (before == nullptr || before->tokens != line.tokens || before->dtype != line.dtype) {
      text += fmt::format("\n{} tokens a rank, {}\n{:<28}{:>5}{:>10}{:>10}{:>10}{:>14}{:>12}\n",
                          line.tokens, ferry::name_of(line.dtype), "", "SMs", "p50 us", "p95 us",
                          "alone us", "logical GB/s", "wire GB/s");
    }
    before = &line;
    text += fmt::format("{:<28}{:>5}{:>10.1f}{:>10.1f}{:>10.1f}", name_of(line.which),
                        has_sms(line.which) ? std::to_string(line.sms) : std::string("-"),
                        r.chained.p50, r.chained.p95, r.alone.p50);
    text += r.row_bytes == 0 ? fmt::format("{:>14}{:>12}\n", "-", "-")
                             : fmt::format("{:>14.1f}{:>12.1f}\n", r.logical_gbps(), r.wire_gbps());
  }
  text += fmt::format(
      "\nTime: {} samples after {} to warm up, of every sample the slowest rank. A sample is {} "
      "calls\n"
      "between two CUDA events, divided, after the ranks were aligned on their GPUs; alone: one "
      "call.\n"
      "Full: plan and dispatch. GB/s: 10^9 bytes a second and GPU at the median. Logical bytes =\n"
      "rows x row bytes, one row for each (token, destination rank), own rank included, also for\n"
      "expert-major; wire bytes without own rank. Row bytes: hidden x element, e4m3 + 4 a scale "
      "of\n"
      "128 channels; combine bf16 after e4m3. Registered: rows in Ferry's memory; ordinary: "
      "anywhere,\n"
      "copied once. Expert-major: blocks aligned to {}, combine applies the weights. bf16 to e4m3: "
      "cached,\n"
      "bytes as they arrive. All data was checked.\n",
      s.shape.iterations, s.shape.warmup, s.chain, s.alignment);
  text += s.nccl.library.empty()
              ? fmt::format("NCCL is not in the table: {} (--nccl PATH names a library)\n",
                            s.nccl.reason)
              : fmt::format(
                    "NCCL {}: grouped sends and receives of the same rows, gathered before; no "
                    "counts.\n",
                    s.nccl.version);
  return text;
}

nlohmann::json to_json(const GpuBenchSettings& s, const std::vector<GpuResult>& results,
                       const std::vector<std::string>& command) {
  nlohmann::json list = nlohmann::json::array();
  for (const GpuResult& result : results) list.push_back(to_json(result));
  return {{"version", FERRY_VERSION},
          {"program", "ferry"},
          {"command", command},
          {"time", utc_now()},
          {"machine", to_json(look_at_machine())},
          {"settings",
           {{"backend", "cuda"},
            {"ranks", s.shape.ranks},
            {"processes", s.shape.processes},
            {"hidden", s.shape.hidden},
            {"topk", s.shape.topk},
            {"experts", s.shape.experts},
            {"routes", s.shape.routes == RouteShape::zipf ? "zipf" : "uniform"},
            {"iterations", s.shape.iterations},
            {"warmup", s.shape.warmup},
            {"chain", s.chain},
            {"alignment", s.alignment},
            {"seed", s.shape.seed},
            {"data_seed", s.data_seed},
            {"nccl", s.nccl.version}}},
          {"bytes",
           "logical = rows x row_bytes, a row for each (token, destination rank), all ranks; wire "
           "without own rank; GB/s = bytes / ranks / p50"},
          {"data_checked", true},
          {"results", list}};
}

}  // namespace ferry::cli

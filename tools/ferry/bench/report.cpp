#include "bench/report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <numeric>

#include "doctor/machine.hpp"
#include "ferry/version.hpp"

namespace ferry::cli {
namespace {

const char* name_of(RouteShape shape) {
  return shape == RouteShape::zipf ? "zipf" : "uniform";
}

const char* name_of_kind(FabricKind kind, bool processes) {
  switch (kind) {
    case FabricKind::automatic: return processes ? "shm" : "local";
    case FabricKind::local: return "local";
    case FabricKind::shm: return "shm";
    case FabricKind::sim: return "sim";
    case FabricKind::ofi: return "ofi";
  }
  return "";
}

bool has_domains(const BenchSettings& s) {
  return s.domain_size > 0 && s.domain_size < s.ranks;
}

// As Group::fabric_name has it.
std::string wires(const BenchSettings& s) {
  const std::string inside = name_of_kind(s.fabric, s.processes);
  if (!has_domains(s)) return inside;
  return inside + "+" +
         (s.network == FabricKind::automatic ? "copies" : name_of_kind(s.network, s.processes));
}

// A dispatch moves a row for each (token, rank), a latency combine by slots one for each slot.
void count_bytes(const BenchSettings& s, const BenchBoard& board, BenchResult& result) {
  const BenchLine& line = result.line;
  if (traits(line.which).kind == BenchKind::other) return;
  const BenchSettings one = s.with(line.tokens, line.dtype);
  result.row_bytes = is_combine(line.which) ? one.combine_row_bytes() : one.dispatch_row_bytes();
  std::int64_t to_self = 0;
  for (int r = 0; r < s.ranks; ++r) {
    const BenchRows& rows = board.rows(line.tokens_index, r);
    const bool slots = line.which == BenchCase::latency_combine_slots;
    result.rows += slots ? rows.slots : rows.rows;
    to_self += slots ? rows.slots_to_self : rows.rows_to_self;
  }
  result.logical_bytes = static_cast<std::uint64_t>(result.rows) * result.row_bytes;
  result.wire_bytes = static_cast<std::uint64_t>(result.rows - to_self) * result.row_bytes;
}

/// Of the slowest rank of each sample, sorted.
std::vector<double> slowest_of(const BenchSettings& s, const BenchBoard& board, std::size_t line,
                               bool alone = false) {
  std::vector<double> slowest;
  for (int i = 0; i < s.iterations; ++i) {
    double most = 0;
    for (int r = 0; r < s.ranks; ++r) most = std::max(most, board.sample(line, r, i, alone));
    slowest.push_back(most);
  }
  std::sort(slowest.begin(), slowest.end());
  return slowest;
}

/// On GPUs latency combines are not timed apart from their dispatch: what a pair takes beside it.
std::vector<double> samples_of(const BenchSettings& s, const BenchBoard& board, std::size_t line) {
  const BenchCase which = board.lines[line].which;
  const bool slots = which == BenchCase::latency_combine_slots;
  if (!s.on_gpus() || (!slots && which != BenchCase::latency_combine_ranks)) {
    return slowest_of(s, board, line);
  }
  const auto pair = slots ? BenchCase::latency_pair_slots : BenchCase::latency_pair_ranks;
  auto times = slowest_of(s, board, board.line_of(pair));
  const std::size_t dispatch = board.line_of(BenchCase::latency_dispatch);
  const double less = percentile(slowest_of(s, board, dispatch), 0.50);
  for (double& time : times) time = std::max(0.0, time - less);
  return times;
}

BenchResult::Times times_of(const std::vector<double>& sorted) {
  const double sum = std::accumulate(sorted.begin(), sorted.end(), 0.0);
  return {sorted.front(), sum / static_cast<double>(sorted.size()), percentile(sorted, 0.50),
          percentile(sorted, 0.95)};
}

/// Of the rows that cross.
std::string_view dtype_of(const BenchLine& line) {
  const bool combines = is_combine(line.which) && line.dtype == Dtype::e4m3;
  return ferry::name_of(combines ? Dtype::bf16 : line.dtype);
}

std::string title_of(const BenchSettings& s) {
  const std::string domains =
      has_domains(s)
          ? fmt::format(" in domains of {}, crossing {}", s.domain_size, ferry::name_of(s.crossing))
          : "";
  return fmt::format(
      "{} ranks as {} over {}, hidden {}, top-{} of {} experts, {} routes, seed {}\n", s.ranks,
      s.processes ? "processes" : "threads", s.on_gpus() ? "GPUs" : wires(s) + domains, s.hidden,
      s.topk, s.experts, name_of(s.routes), s.seed);
}

// Numbers of SMs, and times of a GPU alone, are columns where `sweeps` has them.
std::string head_of(const BenchLine& line, bool sweeps) {
  return fmt::format("\n{:<27}{}{:>10}{:>10}{}{:>14}{:>12}\n",
                     fmt::format("{} tokens a rank, {}", line.tokens, ferry::name_of(line.dtype)),
                     sweeps ? "  SMs" : "", "p50 us", "p95 us", sweeps ? "  alone us" : "",
                     "logical GB/s", "wire GB/s");
}

std::string row_of(const BenchResult& r, bool sweeps) {
  const BenchLine& line = r.line;
  std::string text = fmt::format("{:<27}", traits(line.which).name);
  if (sweeps) {
    text += fmt::format("{:>5}", !has_sms(line.which) ? "-"
                                 : line.num_sms > 0   ? std::to_string(line.num_sms)
                                                      : "tuned");
  }
  text += fmt::format("{:>10.1f}{:>10.1f}", r.times.p50, r.times.p95);
  if (sweeps) {
    text += r.alone.p50 > 0 ? fmt::format("{:>10.1f}", r.alone.p50) : fmt::format("{:>10}", "-");
  }
  return text + (r.row_bytes == 0
                     ? fmt::format("{:>14}{:>12}\n", "-", "-")
                     : fmt::format("{:>14.2f}{:>12.2f}\n", r.logical_gbps(), r.wire_gbps()));
}

std::string latency_notes(const BenchSettings& s) {
  const std::string text = fmt::format(
      "Latency mode: weights come with the dispatch; combine, per slot, has a row for each slot. "
      "Pair: a\n"
      "dispatch and its combine, out of {} one behind another. Send and receive: halves of calls "
      "with\n"
      "hooks, per rank, when all has come.\n",
      s.chain);
  if (!s.on_gpus()) return text;
  return text +
         "On GPUs: replays of graphs. Dispatch: out of a chain; combine: the pair less the median "
         "dispatch;\n"
         "halves: between two events, which take what `events alone` says.\n";
}

std::string gpu_notes(const BenchSettings& s) {
  const std::string text = fmt::format(
      "A sample is {} calls between two CUDA events, divided, after the ranks were aligned on "
      "their "
      "GPUs;\n"
      "alone: one call. Expert-major: blocks aligned to {}, combine applies the weights. bf16 to "
      "e4m3:\n"
      "cached, bytes as they arrive.\n",
      s.chain, s.alignment);
  if (s.nccl.library.empty()) {
    return text + fmt::format("NCCL is not in the table: {} (--nccl PATH names a library)\n",
                              s.nccl.reason);
  }
  return text + fmt::format(
                    "NCCL {}: grouped sends and receives of the same rows, gathered before; no "
                    "counts.\n",
                    s.nccl.version);
}

nlohmann::json result_json(const BenchResult& r) {
  nlohmann::json line = {{"name", traits(r.line.which).name},
                         {"dtype", dtype_of(r.line)},
                         {"tokens", r.line.tokens},
                         {"sms", r.line.num_sms},
                         {"rows", r.rows},
                         {"row_bytes", r.row_bytes},
                         {"logical_bytes", r.logical_bytes},
                         {"wire_bytes", r.wire_bytes},
                         {"min_us", r.times.min},
                         {"mean_us", r.times.mean},
                         {"p50_us", r.times.p50},
                         {"p95_us", r.times.p95},
                         {"logical_gbps", r.logical_gbps()},
                         {"wire_gbps", r.wire_gbps()}};
  if (r.alone.p50 > 0) {
    line["single_p50_us"] = r.alone.p50;
    line["single_p95_us"] = r.alone.p95;
  }
  return line;
}

nlohmann::json settings_json(const BenchSettings& s) {
  nlohmann::json json = {{"backend", s.on_gpus() ? "cuda" : "host"},
                         {"ranks", s.ranks},
                         {"processes", s.processes},
                         {"hidden", s.hidden},
                         {"topk", s.topk},
                         {"experts", s.experts},
                         {"routes", name_of(s.routes)},
                         {"iterations", s.iterations},
                         {"warmup", s.warmup},
                         {"chain", s.chain},
                         {"seed", s.seed}};
  if (s.sweeps()) {
    json.update({{"alignment", s.alignment}, {"data_seed", s.data_seed}, {"nccl", s.nccl.version}});
    return json;
  }
  json.update({{"fabric", wires(s)},
               {"domain_size", s.domain_size},
               {"crossing", ferry::name_of(s.crossing)},
               {"tokens", s.tokens},
               {"latency_tokens", s.latency_tokens},
               {"dtype", ferry::name_of(s.dtype)},
               {"combine_dtype", ferry::name_of(s.combine_dtype())}});
  return json;
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  const std::tm parts = *std::gmtime(&now);  // nobody else asks meanwhile
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

}  // namespace

double percentile(const std::vector<double>& sorted, double p) {
  const double at = p * static_cast<double>(sorted.size() - 1);
  const auto low = static_cast<std::size_t>(at);
  const std::size_t high = std::min(low + 1, sorted.size() - 1);
  return std::lerp(sorted[low], sorted[high], at - static_cast<double>(low));
}

std::vector<BenchLine> lines_of(const BenchSettings& s) {
  const bool latency = s.mode == BenchMode::latency;
  std::vector<std::int64_t> sweep = {latency ? s.latency_tokens : s.tokens};
  if (s.sweeps() && !s.token_sweep.empty()) sweep = s.token_sweep;
  const std::vector<Dtype> dtypes =
      s.sweeps() && !s.dtypes.empty() ? s.dtypes : std::vector{s.dtype};
  std::vector<int> all_sms = s.sweeps() ? s.num_sms : std::vector{0};
  if (s.sweeps() && !s.tune.empty()) all_sms.push_back(0);  // as the tuner has it
  std::vector<BenchLine> lines;
  for (std::size_t t = 0; t < sweep.size(); ++t) {
    bool combined = false;
    for (const Dtype dtype : dtypes) {
      for (const int num_sms : all_sms) {
        // A plan is the same for all dtypes and numbers of SMs, NCCL for all numbers of SMs.
        const bool first = dtype == dtypes.front() && num_sms == all_sms.front();
        const bool nccl = !s.nccl.library.empty() && num_sms == all_sms.back();
        for (const BenchTraits& of : kBenchCases) {
          if (of.latency != latency || !(s.on_gpus() ? of.cuda : of.host)) continue;
          if (of.kind == BenchKind::combine && combined) continue;
          if (of.which == BenchCase::dispatch_quantized && dtype != Dtype::e4m3) continue;
          if (of.which == BenchCase::plan && !first) continue;
          if (of.which == BenchCase::nccl_all_to_all && !nccl) continue;
          lines.push_back(
              {t, sweep[t], dtype, of.which == BenchCase::nccl_all_to_all ? 0 : num_sms, of.which});
        }
      }
      combined = combined || dtype == Dtype::bf16 || dtype == Dtype::e4m3;
    }
  }
  return lines;
}

std::vector<BenchResult> results_of(const BenchSettings& settings, const BenchBoard& board) {
  std::vector<BenchResult> results;
  for (std::size_t i = 0; i < board.lines.size(); ++i) {
    BenchResult result;
    result.line = board.lines[i];
    result.times = times_of(samples_of(settings, board, i));
    if (settings.sweeps()) {
      result.alone = times_of(slowest_of(settings, board, i, true));
      result.among = settings.ranks;
    }
    count_bytes(settings, board, result);
    results.push_back(result);
  }
  return results;
}

std::string table(const BenchSettings& s, const std::vector<BenchResult>& results) {
  std::string text = title_of(s);
  const BenchLine* before = nullptr;
  for (const BenchResult& r : results) {
    const BenchLine& line = r.line;
    if (before == nullptr || before->tokens != line.tokens || before->dtype != line.dtype) {
      text += head_of(line, s.sweeps());
    }
    before = &line;
    text += row_of(r, s.sweeps());
  }
  text += fmt::format(
      "\nTime: {} samples after {} to warm up, of every sample the slowest rank. Full: plan and "
      "dispatch.\n"
      "GB/s: 10^9 bytes a second at the median, {}. Logical bytes = rows x\n"
      "row bytes, one row for each (token, destination rank), own rank included; wire bytes "
      "without "
      "it.\n"
      "Row bytes: hidden x element, e4m3 + 4 a scale of 128 channels; combine bf16 after e4m3.\n"
      "Registered: rows in Ferry's memory; ordinary: anywhere, copied once. All data was "
      "checked.\n",
      s.iterations, s.warmup, s.sweeps() ? "of one GPU" : "all ranks together");
  if (s.mode != BenchMode::throughput) text += latency_notes(s);
  return s.sweeps() ? text + gpu_notes(s) : text;
}

nlohmann::json to_json(const BenchSettings& s, const std::vector<BenchResult>& results,
                       const std::vector<std::string>& command) {
  nlohmann::json list = nlohmann::json::array();
  for (const BenchResult& result : results) list.push_back(result_json(result));
  return {{"version", version()},
          {"program", "ferry"},
          {"command", command},
          {"time", utc_now()},
          {"machine", to_json(look_at_machine())},
          {"settings", settings_json(s)},
          {"bytes",
           fmt::format("logical = rows x row_bytes, of all ranks; wire without own rank; GB/s = "
                       "bytes{} / p50",
                       s.sweeps() ? " / ranks" : "")},
          {"data_checked", true},
          {"results", list}};
}

}  // namespace ferry::cli

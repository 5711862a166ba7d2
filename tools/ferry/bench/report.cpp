#include "bench/report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <numeric>

#include "doctor/machine.hpp"

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
  if (!moves_rows(result.which)) return;
  const bool combines = result.which == BenchCase::combine_registered ||
                        result.which == BenchCase::combine_ordinary ||
                        is_latency_combine(result.which);
  result.row_bytes = combines ? s.combine_row_bytes() : s.dispatch_row_bytes();
  std::int64_t to_self = 0;
  for (int r = 0; r < s.ranks; ++r) {
    const BenchRows& rows = board.rows(is_latency(result.which), r);
    const bool slots = result.which == BenchCase::latency_combine_slots;
    result.rows += slots ? rows.slots : rows.rows;
    to_self += slots ? rows.slots_to_self : rows.rows_to_self;
  }
  result.logical_bytes = static_cast<std::uint64_t>(result.rows) * result.row_bytes;
  result.wire_bytes = static_cast<std::uint64_t>(result.rows - to_self) * result.row_bytes;
}

/// Microseconds of the slowest rank of each sample, sorted.
std::vector<double> slowest_of(const BenchSettings& s, const BenchBoard& board, BenchCase which) {
  std::vector<double> slowest;
  for (int i = 0; i < s.iterations; ++i) {
    double most = 0;
    for (int r = 0; r < s.ranks; ++r) most = std::max(most, board.sample(which, r, i));
    slowest.push_back(most / 1e3);
  }
  std::sort(slowest.begin(), slowest.end());
  return slowest;
}

/// On GPUs combines are not timed apart from their dispatch: what a pair takes beside it.
std::vector<double> times_of(const BenchSettings& s, const BenchBoard& board, BenchCase which) {
  const bool slots = which == BenchCase::latency_combine_slots;
  if (s.backend != Backend::cuda || (!slots && which != BenchCase::latency_combine_ranks)) {
    return slowest_of(s, board, which);
  }
  auto times =
      slowest_of(s, board, slots ? BenchCase::latency_pair_slots : BenchCase::latency_pair_ranks);
  const double dispatch = percentile(slowest_of(s, board, BenchCase::latency_dispatch), 0.50);
  for (double& time : times) time = std::max(0.0, time - dispatch);
  return times;
}

BenchResult result_of(const BenchSettings& s, const BenchBoard& board, BenchCase which) {
  BenchResult result;
  result.which = which;
  result.tokens = is_latency(which) ? s.latency_tokens : s.tokens;
  count_bytes(s, board, result);
  const std::vector<double> slowest = times_of(s, board, which);
  result.min_us = slowest.front();
  result.mean_us =
      std::accumulate(slowest.begin(), slowest.end(), 0.0) / static_cast<double>(slowest.size());
  result.p50_us = percentile(slowest, 0.50);
  result.p95_us = percentile(slowest, 0.95);
  return result;
}

/// Of the rows that cross.
Dtype dtype_of(const BenchSettings& s, BenchCase which) {
  const bool combines = is_latency_combine(which) || which == BenchCase::combine_registered ||
                        which == BenchCase::combine_ordinary;
  return combines ? s.combine_dtype() : s.dtype;
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
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

std::vector<BenchResult> results_of(const BenchSettings& settings, const BenchBoard& board) {
  std::vector<BenchResult> results;
  for (int c = 0; c < kBenchCases; ++c) {
    const auto which = static_cast<BenchCase>(c);
    if (is_measured(which, settings.mode, settings.backend))
      results.push_back(result_of(settings, board, which));
  }
  return results;
}

std::string table(const BenchSettings& s, const std::vector<BenchResult>& results) {
  const std::string domains =
      has_domains(s)
          ? fmt::format(" in domains of {}, crossing {}", s.domain_size, ferry::name_of(s.crossing))
          : "";
  const std::string where = s.backend == Backend::cuda ? "GPUs" : wires(s) + domains;
  std::string text = fmt::format(
      "{} ranks as {} over {}, hidden {}, top-{} of {} experts, {}, {} routes, seed {}\n\n",
      s.ranks, s.processes ? "processes" : "threads", where, s.hidden, s.topk, s.experts,
      ferry::name_of(s.dtype), name_of(s.routes), s.seed);
  text += fmt::format("{:<28}{:>8}{:>12}{:>12}{:>16}{:>12}\n", "", "tokens", "p50 us", "p95 us",
                      "logical GB/s", "wire GB/s");
  for (const BenchResult& result : results) {
    text += fmt::format("{:<28}{:>8}{:>12.1f}{:>12.1f}", ferry::cli::name_of(result.which),
                        result.tokens, result.p50_us, result.p95_us);
    text += result.row_bytes == 0
                ? fmt::format("{:>16}{:>12}\n", "-", "-")
                : fmt::format("{:>16.2f}{:>12.2f}\n", result.logical_gbps(), result.wire_gbps());
  }
  text += fmt::format(
      "\nTime: {} samples after {} to warm up, of every sample the slowest rank. Full: plan and "
      "dispatch.\n"
      "GB/s: 10^9 bytes a second at the median, all ranks together. Logical bytes = rows x row\n"
      "bytes, own rank included; wire bytes without it. Row bytes: dispatch {}, combine {}. Rows:\n"
      "one for each (token, destination rank); latency combine, per slot: one for each slot.\n"
      "Registered: rows in Ferry's memory; ordinary: anywhere, copied once. All data was "
      "checked.\n",
      s.iterations, s.warmup, s.dispatch_row_bytes(), s.combine_row_bytes());
  if (s.mode == BenchMode::throughput) return text;
  text += fmt::format(
      "Latency mode: weights come with the dispatch. Pair: a dispatch and its combine, out of {} "
      "one "
      "behind\n"
      "another. Send and receive: halves of calls with hooks, per rank, when all has come.\n",
      s.chain);
  if (s.backend == Backend::cuda) {
    text +=
        "On GPUs: replays of graphs. Dispatch: out of a chain; combine: the pair less the median "
        "dispatch;\n"
        "halves: between two events, which take what `events alone` says.\n";
  }
  return text;
}

nlohmann::json to_json(const BenchSettings& s, const std::vector<BenchResult>& results,
                       const std::vector<std::string>& command) {
  nlohmann::json list = nlohmann::json::array();
  for (const BenchResult& result : results) {
    list.push_back({{"name", ferry::cli::name_of(result.which)},
                    {"dtype", ferry::name_of(dtype_of(s, result.which))},
                    {"tokens", result.tokens},
                    {"sms", 0},  // not the caller's to choose
                    {"rows", result.rows},
                    {"row_bytes", result.row_bytes},
                    {"logical_bytes", result.logical_bytes},
                    {"wire_bytes", result.wire_bytes},
                    {"min_us", result.min_us},
                    {"mean_us", result.mean_us},
                    {"p50_us", result.p50_us},
                    {"p95_us", result.p95_us},
                    {"logical_gbps", result.logical_gbps()},
                    {"wire_gbps", result.wire_gbps()}});
  }
  return {{"version", FERRY_VERSION},
          {"command", command},
          {"time", utc_now()},
          {"machine", to_json(look_at_machine())},
          {"settings",
           {{"backend", s.backend == Backend::cuda ? "cuda" : "host"},
            {"ranks", s.ranks},
            {"processes", s.processes},
            {"fabric", wires(s)},
            {"domain_size", s.domain_size},
            {"crossing", ferry::name_of(s.crossing)},
            {"tokens", s.tokens},
            {"latency_tokens", s.latency_tokens},
            {"hidden", s.hidden},
            {"topk", s.topk},
            {"experts", s.experts},
            {"dtype", ferry::name_of(s.dtype)},
            {"combine_dtype", ferry::name_of(s.combine_dtype())},
            {"routes", name_of(s.routes)},
            {"iterations", s.iterations},
            {"warmup", s.warmup},
            {"chain", s.chain},
            {"seed", s.seed}}},
          {"data_checked", true},
          {"results", list}};
}

}  // namespace ferry::cli

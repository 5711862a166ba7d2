#include "bench/memory.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "bench/rank.hpp"
#include "doctor/machine.hpp"

namespace ferry::cli {
namespace {

constexpr std::size_t kSlack = std::size_t{16} << 20;
/// Private memory of more than 8 MiB has huge pages (platform/pages.hpp).
constexpr double kHuge = 2 << 20, kSmall = 4096, kLeastWithHuge = 8 << 20;

/// To how many ranks a token goes: its experts are distinct. Skewed routes go to fewer.
double destinations_of(const BenchSettings& s) {
  const double each = std::max(1.0, static_cast<double>(s.experts) / s.ranks);
  if (s.routes != RouteShape::uniform) return std::max(1.0, s.topk / each);
  double none = 1;  // of its experts are on a rank
  for (int k = 0; k < s.topk; ++k) {
    none *= std::max(0.0, 1 - each / static_cast<double>(s.experts - k));
  }
  return static_cast<double>(std::min<std::int64_t>(s.ranks, s.experts)) * (1 - none);
}

bool shares(const BenchSettings& s) {
  return s.processes && s.fabric != FabricKind::ofi;
}

/// Registered memory of one rank's latency exchange, both buffers. The rows of a source have a
/// place in it, of which a little may touch a huge page.
double latency_touched(const BenchSettings& s, double all) {
  const auto row = static_cast<double>(s.dispatch_row_bytes());
  const auto sum = static_cast<double>(s.combine_row_bytes());
  const auto tokens = static_cast<double>(s.latency_tokens);
  const double page = all > kLeastWithHuge ? kHuge : kSmall;
  const double came = 2 * tokens * destinations_of(s) * row;
  const double places = 2 * s.ranks * tokens * sum;
  const double rows = std::min(places, std::max(came, 2 * s.ranks * page));
  return std::min(all, rows + 2 * tokens * s.topk * (row + sum));
}

double latency_bytes(const BenchSettings& s) {
  const int domains = s.domain_size > 0 ? (s.ranks + s.domain_size - 1) / s.domain_size : 1;
  const auto all = static_cast<double>(LatencyExchange::memory_hint(
      latency_config(s), s.experts, s.ranks, DeviceKind::cpu, domains));
  const double own = 2.0 * static_cast<double>(s.latency_tokens * s.combine_row_bytes());
  if (shares(s)) return all + static_cast<double>(latency_memory(s)) + own;
  const double made = s.dtype == Dtype::e4m3 ? s.topk / 2.0 : 0;  // what the experts made
  return latency_touched(s, all) + own * (1 + made);
}

double throughput_bytes(const BenchSettings& s) {
  const auto tokens = static_cast<double>(s.tokens);
  const auto row = static_cast<double>(s.dispatch_row_bytes());
  const auto sum = static_cast<double>(s.combine_row_bytes());
  const double rows = tokens * destinations_of(s);
  const double shared = shares(s) ? static_cast<double>(throughput_memory(s)) : rows * (row + sum);
  return tokens * (row + sum) + rows * sum + shared;
}

/// The largest run: options that are halved until it suffices, each alone.
std::string smaller(const BenchSettings& run, double there) {
  const bool latency = run.mode == BenchMode::latency;
  std::string text;
  const auto suggest = [&](const char* option, auto BenchSettings::* field, int least, int step) {
    BenchSettings one = run;
    while (bench_memory(one) > there && one.*field / 2 >= least) {
      one.*field = one.*field / 2 / step * step;
    }
    const double takes = bench_memory(one);
    if (takes > there) return;
    text += fmt::format("{}{} {} ({})", text.empty() ? "" : ", ", option, one.*field,
                        format_bytes(static_cast<std::uint64_t>(takes)));
  };
  latency ? suggest("--latency-tokens", &BenchSettings::latency_tokens, 1, 1)
          : suggest("--tokens", &BenchSettings::tokens, 1, 1);
  suggest("--hidden", &BenchSettings::hidden, 64, 16);
  suggest("--ranks", &BenchSettings::ranks, 2, 1);
  return text.empty() ? "fewer --ranks with fewer tokens and less --hidden" : text;
}

}  // namespace

std::size_t throughput_memory(const BenchSettings& s) {
  const auto most_rows = static_cast<std::size_t>(s.ranks) * static_cast<std::size_t>(s.tokens);
  return most_rows * (2 * s.dispatch_row_bytes() + 2 * s.combine_row_bytes()) + kSlack;
}

std::size_t latency_memory(const BenchSettings& s) {
  if (s.dtype != Dtype::e4m3) return kSlack;
  const auto most_rows =
      static_cast<std::size_t>((s.experts / s.ranks + 1) * s.ranks * s.latency_tokens);
  return kSlack + most_rows * s.combine_row_bytes();
}

double bench_memory(const BenchSettings& run) {
  GroupConfig config = group_config(run);
  const auto control = static_cast<double>(Group::memory_hint(config, run.ranks).control_bytes);
  const bool latency = run.mode == BenchMode::latency;
  return run.ranks * (control + (latency ? latency_bytes(run) : throughput_bytes(run)));
}

std::string too_large(const std::vector<BenchSettings>& runs, const SystemFacts::Memory& here) {
  double there = static_cast<double>(here.available_bytes);
  if (here.limit_bytes > 0) there = std::min(there, static_cast<double>(here.limit_bytes));
  if (there == 0) return {};  // not known
  const auto most = std::max_element(runs.begin(), runs.end(), [](const auto& a, const auto& b) {
    return bench_memory(a) < bench_memory(b);
  });
  if (most == runs.end() || bench_memory(*most) <= there) return {};
  return fmt::format("{} mode on {} ranks takes about {} of memory; here are {}{}. Less: {}",
                     most->mode == BenchMode::latency ? "latency" : "throughput", most->ranks,
                     format_bytes(static_cast<std::uint64_t>(bench_memory(*most))),
                     format_bytes(here.available_bytes),
                     here.limit_bytes > 0 ? fmt::format(", of which the control group may have {}",
                                                        format_bytes(here.limit_bytes))
                                          : "",
                     smaller(*most, there));
}

}  // namespace ferry::cli

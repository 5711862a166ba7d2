// Latency mode on GPUs: the cases of its matrix.
#include <algorithm>
#include <cstdio>
#include <map>
#include <utility>
#include <vector>

#include "cuda_parts.hpp"
#include "random.hpp"
#include "session.hpp"

namespace ferry::conformance {
namespace {

constexpr int kLatencySample = 300;

using Batches = std::map<std::pair<int, bool>, std::vector<Case>>;

Batches latency_batches(const CudaOptions& options) {
  const auto choices = options.cases == Cases::sample
                           ? random_choices(Mode::latency, kLatencySample, mix(options.seed, 212))
                           : pairwise_cover(Mode::latency, options.seed);
  Batches batches;
  std::uint64_t number = 0;
  for (const auto& choice : choices) {
    Case c = make_case(Mode::latency, choice);
    size_case(c, mix(options.seed, 213, ++number));
    if (c.ranks == 5) c.ranks = 4;  // of the host's axis
    if (std::find(options.ranks.begin(), options.ranks.end(), c.ranks) == options.ranks.end()) {
      continue;
    }
    const bool threads = c.fabric == FabricKind::local && may_be_threads(options, c.ranks);
    c.fabric = threads ? FabricKind::local : FabricKind::shm;
    batches[{c.ranks, threads}].push_back(c);
  }
  return batches;
}

}  // namespace

bool run_latency_cases(const CudaOptions& options) {
  const std::int64_t start = now_ns();
  std::int64_t done = 0;
  bool ok = true;
  for (auto& [key, cases] : latency_batches(options)) {
    std::vector<Case> batch = cases;
    std::stable_sort(batch.begin(), batch.end(), shares_before);
    const Layout layout{key.first, key.second};
    SharedNumber ran;
    const std::int64_t from = now_ns();
    ok &= passes(options, layout, "latency", [&](Rank& rank) {
      Session session(rank);
      for (const Case& c : batch) {
        if (rank.failures() > 0) return;
        run_case(session, c);
        if (rank.rank() == 0) ++*ran;
      }
    });
    std::printf("  latency, %s: %lld of %zu cases, %.1f s\n", to_string(layout).c_str(),
                static_cast<long long>(*ran), batch.size(),
                static_cast<double>(now_ns() - from) * 1e-9);
    std::fflush(stdout);
    done += *ran;
  }
  return conclude("latency", ok && done > 0, std::to_string(done) + " cases", start);
}

}  // namespace ferry::conformance

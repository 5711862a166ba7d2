#include "plan/balance.hpp"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "ferry/experts.hpp"

namespace ferry::cli {
namespace {

/// [ranks, experts]
std::vector<std::int32_t> counts_of(const RecordedRoutes& routes, int call, int ranks,
                                    const BalanceTerms& terms) {
  const std::size_t experts = static_cast<std::size_t>(routes.experts * terms.copies);
  std::vector<std::int32_t> counts(static_cast<std::size_t>(ranks) * experts);
  for (int rank = 0; rank < ranks; ++rank) {
    for (const std::int32_t expert : routes.of(rank, call, terms.copies)) {
      if (expert < 0) continue;
      ++counts[static_cast<std::size_t>(rank) * experts + static_cast<std::size_t>(expert)];
    }
  }
  return counts;
}

std::vector<std::int64_t> load_of(const std::vector<std::int32_t>& counts, int ranks) {
  std::vector<std::int64_t> load(static_cast<std::size_t>(ranks));
  const std::size_t experts = counts.size() / load.size(), each = experts / load.size();
  for (std::size_t i = 0; i < counts.size(); ++i) load[i % experts / each] += counts[i];
  return load;
}

/// The heaviest rank's over the mean.
double over_mean(const std::vector<std::int64_t>& load) {
  std::int64_t all = 0;
  for (const std::int64_t each : load) all += each;
  const auto heaviest = static_cast<double>(*std::max_element(load.begin(), load.end()));
  return all == 0 ? 1 : heaviest * static_cast<double>(load.size()) / static_cast<double>(all);
}

double named(const std::vector<std::int32_t>& table) {
  return static_cast<double>(
      std::count_if(table.begin(), table.end(), [](auto expert) { return expert >= 0; }));
}

}  // namespace

BalanceGain gain_of_balance(const RecordedRoutes& routes, int ranks, const BalanceTerms& terms) {
  const std::int64_t experts = routes.experts * terms.copies;
  BatchBalancer balancer(experts, ranks, terms.slots, terms.domain_size, terms.copy_rows);
  BalanceGain gain;
  gain.ranks = ranks;
  for (int call = 0; call < routes.count(); ++call) {
    const std::vector<std::int32_t> counts = counts_of(routes, call, ranks, terms);
    balancer.plan({counts.data(), Dtype::i32, {ranks, experts}});
    const double before = over_mean(load_of(counts, ranks)), after = over_mean(balancer.load());
    gain.before += before / routes.count();
    gain.after += after / routes.count();
    gain.worst_before = std::max(gain.worst_before, before);
    gain.worst_after = std::max(gain.worst_after, after);
    gain.copies += named(balancer.table()) / routes.count();
    gain.fetched += named(balancer.fetches()) / routes.count();
    balancer.fetched();
  }
  return gain;
}

}  // namespace ferry::cli

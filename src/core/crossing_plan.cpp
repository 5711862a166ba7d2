#include "core/crossing_plan.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "ferry/exchange_model.hpp"

namespace ferry {
namespace {

/// Which rank of a domain is on a rail, looked up: there are many to be found.
class Rails {
 public:
  explicit Rails(const Domains& domains) : domains_(domains) {
    std::size_t most = 0;
    for (int d = 0; d < domains.count(); ++d) most = std::max(most, domains.members(d).size());
    for (std::size_t rail = 0; rail < most; ++rail) {
      for (int d = 0; d < domains.count(); ++d) {
        const std::vector<int>& members = domains.members(d);
        ranks_.push_back(members[rail % members.size()]);
      }
    }
  }
  /// [D]: the rank in each domain that is on the rail of `rank`.
  std::span<const int> of(int rank) const {
    return std::span(ranks_).subspan(index(domains_.index(rank)) * index(domains_.count()),
                                     index(domains_.count()));
  }

 private:
  const Domains& domains_;
  std::vector<int> ranks_{};  // [rails, D]
};

/// Ranks in a row that are in one domain.
struct Run {
  int domain = 0;
  std::size_t first = 0;
  std::size_t end = 0;
};

std::vector<Run> runs_of(const Domains& domains) {
  std::vector<Run> runs;
  for (int rank = 0; rank < domains.ranks(); ++rank) {
    if (runs.empty() || runs.back().domain != domains.of(rank)) {
      runs.push_back({domains.of(rank), index(rank), index(rank)});
    }
    ++runs.back().end;
  }
  return runs;
}

/// Where rows that cross lie in the staging buffers.
void place_staging_rows(CrossingPlan& crossing, const Rails& rails) {
  const Domains& domains = crossing.domains;
  crossing.staging_rows.assign(index(domains.ranks()), 0);
  for (int source = 0; source < domains.ranks(); ++source) {
    const auto on_rail = rails.of(source);
    if (source == crossing.rank) {
      for (const int target : on_rail) {
        crossing.rail_row.push_back(crossing.staging_rows[index(target)]);
      }
    }
    for (int domain = 0; domain < domains.count(); ++domain) {  // 0 for its own
      crossing.staging_rows[index(on_rail[index(domain)])] += crossing.crossing(source, domain);
    }
  }
}

}  // namespace

std::vector<std::int32_t> count_crossings(const RouteCounts& own, const Placement& placement,
                                          const Domains& domains, int rank) {
  std::vector<std::int32_t> counts(index(domains.count()), 0);
  std::vector<std::int64_t> last(index(domains.count()), -1);  // token that was counted there
  for (std::int64_t token = 0; token < own.tokens; ++token) {
    for (int k = 0; k < own.topk; ++k) {
      const std::int32_t id = own.topk_idx[index(token * own.topk + k)];
      if (id < 0) continue;
      const int domain = domains.of(placement.rank_of(id));
      if (domain == domains.of(rank) || last[index(domain)] == token) continue;
      last[index(domain)] = token;
      ++counts[index(domain)];
    }
  }
  return counts;
}

std::int64_t CrossingPlan::first_sum(int source, int domain) const {
  std::int64_t row = 0;
  for (int d = 0; d < domain; ++d) row += crossing(source, d);
  return row;
}

int CrossingPlan::feeder(int source) const {
  const auto found = std::lower_bound(feeders.begin(), feeders.end(), source);
  return found == feeders.end() || *found != source ? -1
                                                    : static_cast<int>(found - feeders.begin());
}

CrossingPlan begin_crossing_plan(const ExchangePlan& plan, const Domains& domains,
                                 std::span<const std::int32_t> crossings) {
  CrossingPlan crossing;
  crossing.domains = domains;
  crossing.rank = plan.rank;
  crossing.feeders = domains.feeders(plan.rank);
  crossing.offset.push_back(0);
  for (const std::int32_t rows : crossings) {
    crossing.offset.push_back(crossing.offset.back() + rows);
  }
  crossing.tokens.resize(index(crossing.offset.back()));
  std::vector<std::int64_t> next(crossing.offset.begin(), crossing.offset.end() - 1);
  for (std::int64_t token = 0; token < plan.own.tokens; ++token) {
    for (std::int64_t l = plan.destination_offset[index(token)];
         l < plan.destination_offset[index(token + 1)]; ++l) {
      const int domain = domains.of(plan.destinations[index(l)].rank);
      std::int64_t& row = next[index(domain)];
      const bool there = row > crossing.offset[index(domain)] &&
                         crossing.tokens[index(row - 1)] == static_cast<std::int32_t>(token);
      if (domain == domains.of(plan.rank) || there) continue;
      crossing.tokens[index(row++)] = static_cast<std::int32_t>(token);
    }
  }
  return crossing;
}

CrossingPlan make_crossing_plan(const ExchangePlan& plan, const Domains& domains,
                                std::vector<std::int32_t> domain_tokens, Crossing wanted) {
  const auto count = index(domains.count());
  CrossingPlan crossing = begin_crossing_plan(
      plan, domains, std::span(domain_tokens).subspan(index(plan.rank) * count, count));
  crossing.domain_tokens = std::move(domain_tokens);
  crossing.feeder_row.push_back(0);
  const int here = domains.of(plan.rank);
  FirstRows first(plan, domains.members(here));
  for (const int source : crossing.feeders) {
    const std::vector<std::int64_t>& rows = first.of(source);
    crossing.feeder_first.insert(crossing.feeder_first.end(), rows.begin(), rows.end());
    for (const int member : domains.members(here)) {
      crossing.feeder_tokens.push_back(plan.tokens_of(source)[index(member)]);
    }
    crossing.feeder_row.push_back(crossing.feeder_row.back() + crossing.crossing(source, here));
    crossing.feeder_sum_row.push_back(crossing.first_sum(source, here));
    crossing.feeder_sums.push_back(crossing.first_sum(source, domains.count()));
  }
  place_staging_rows(crossing, Rails(domains));
  if (domains.count() == 1) return crossing;
  const bool choose = wanted == Crossing::automatic;
  crossing.chosen =
      chosen_crossing(domains, choose ? crossing_cost(plan, crossing) : CrossingCost{}, wanted);
  return crossing;
}

Crossing chosen_crossing(const Domains& domains, const CrossingCost& cost, Crossing wanted) {
  if (domains.count() == 1) return Crossing::direct;
  if (wanted != Crossing::automatic) return wanted;
  return cost.hierarchical < cost.direct ? Crossing::hierarchical : Crossing::direct;
}

int impossible_crossing(const ExchangePlan& plan, const Domains& domains,
                        std::span<const std::int32_t> domain_tokens) {
  const std::vector<Run> runs = runs_of(domains);
  const auto count = index(domains.count());
  std::vector<std::int64_t> sum(count);   // of the tokens for the ranks of each domain
  std::vector<std::int32_t> most(count);  // for one of them
  for (int source = 0; source < plan.ranks(); ++source) {
    std::fill(sum.begin(), sum.end(), 0);
    std::fill(most.begin(), most.end(), 0);
    const auto row = plan.tokens_of(source);
    for (const Run& run : runs) {
      std::int64_t all = 0;
      std::int32_t largest = most[index(run.domain)];
      for (std::size_t target = run.first; target < run.end; ++target) {
        all += row[target];
        largest = std::max(largest, row[target]);
      }
      sum[index(run.domain)] += all;
      most[index(run.domain)] = largest;
    }
    const auto crossed = domain_tokens.subspan(index(source) * count, count);
    for (std::size_t d = 0; d < count; ++d) {
      const bool own = index(domains.of(source)) == d;
      if (own ? crossed[d] != 0 : crossed[d] < most[d] || crossed[d] > sum[d]) return source;
    }
  }
  return -1;
}

bool append_rows(Forward& forward, const ExchangePlan& plan, const CrossingPlan& crossing,
                 std::size_t feeder, std::span<const std::int32_t> ids) {
  const Domains& domains = crossing.domains;
  const int here = domains.of(plan.rank);
  const auto topk = index(plan.own.topk);
  const auto tokens = crossing.tokens_inside(feeder);
  std::vector<std::int32_t>& filled = forward.filled;
  filled.resize(tokens.size());
  for (std::size_t first = 0; first < ids.size(); first += topk) {
    const std::size_t destinations = forward.destinations.size();
    for (const std::int32_t id : ids.subspan(first, topk)) {
      if (id < -1 || id >= plan.placement.experts) return false;
      const int target = id < 0 ? plan.rank : plan.placement.rank_of(id);
      if (id < 0 || domains.of(target) != here) continue;
      const auto same = [target](const Destination& destination) {
        return destination.rank == target;
      };
      const auto row = forward.destinations.begin() + static_cast<std::ptrdiff_t>(destinations);
      if (std::any_of(row, forward.destinations.end(), same)) continue;
      const std::size_t member = index(domains.index(target));
      if (filled[member] >= tokens[member]) return false;
      forward.destinations.push_back({target, filled[member]++});
    }
    if (forward.destinations.size() == destinations) return false;
    std::sort(forward.destinations.begin() + static_cast<std::ptrdiff_t>(destinations),
              forward.destinations.end(),
              [](const Destination& a, const Destination& b) { return a.rank < b.rank; });
    forward.destination_offset.push_back(static_cast<std::int64_t>(forward.destinations.size()));
  }
  forward.topk_idx.insert(forward.topk_idx.end(), ids.begin(), ids.end());
  return true;
}

bool complete(const Forward& forward, const CrossingPlan& crossing, std::size_t feeder) {
  const auto tokens = crossing.tokens_inside(feeder);
  if (forward.filled.empty()) {
    return std::all_of(tokens.begin(), tokens.end(), [](std::int32_t rows) { return rows == 0; });
  }
  return std::equal(tokens.begin(), tokens.end(), forward.filled.begin());
}

CrossingCost cost_of_rank(const RankCrossings& rows) {
  ExchangeRates rates;
  rates.nic_out = rates.nic_in = 1;
  rates.nvlink_out = rates.nvlink_in = kInsideSpeed;
  ExchangeBytes direct, hierarchical;
  direct.nic = static_cast<double>(std::max(rows.out, rows.in));
  hierarchical.nic = static_cast<double>(std::max(rows.crossings_out, rows.crossings_in));
  hierarchical.nvlink = static_cast<double>(rows.spread);
  return {exchange_time(direct, rates).seconds(), exchange_time(hierarchical, rates).seconds()};
}

CrossingCost crossing_cost(const ExchangePlan& plan, const CrossingPlan& crossing) {
  const Domains& domains = crossing.domains;
  const auto ranks = index(plan.ranks());
  const Rails rails(domains);
  const std::vector<Run> runs = runs_of(domains);
  // Of each rank, across domains: rows of a direct dispatch, and what a hierarchical one spreads.
  std::vector<std::int64_t> out(ranks), inside(ranks), spread(ranks);
  for (int source = 0; source < plan.ranks(); ++source) {
    const int own = domains.of(source);
    const auto on_rail = rails.of(source);
    const auto row = plan.tokens_of(source);
    for (const Run& run : runs) {
      if (run.domain == own) {
        for (std::size_t target = run.first; target < run.end; ++target) {
          inside[target] += row[target];
        }
        continue;
      }
      const std::int64_t rows =
          std::accumulate(row.data() + run.first, row.data() + run.end, std::int64_t{0});
      out[index(source)] += rows;
      spread[index(on_rail[index(run.domain)])] += rows;
    }
  }
  CrossingCost cost;
  for (int rank = 0; rank < plan.ranks(); ++rank) {
    const std::size_t r = index(rank);
    const CrossingCost own = cost_of_rank({out[r], plan.peer_recv_rows[r] - inside[r],
                                           crossing.first_sum(rank, domains.count()),
                                           crossing.staging_rows[r], spread[r]});
    cost.direct = std::max(cost.direct, own.direct);
    cost.hierarchical = std::max(cost.hierarchical, own.hierarchical);
  }
  return cost;
}

}  // namespace ferry

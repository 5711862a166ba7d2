#include "core/crossing_plan.hpp"

#include <algorithm>
#include <utility>

namespace ferry {
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

std::int64_t CrossingPlan::first_staging_row(int target, int source) const {
  const int domain = domains.of(target);
  std::int64_t row = 0;
  for (int s = 0; s < source; ++s) {
    if (!domains.together(s, target) && domains.rail(s, domain) == target) {
      row += crossing(s, domain);
    }
  }
  return row;
}

std::int64_t CrossingPlan::first_sum(int source, int domain) const {
  std::int64_t row = 0;
  for (int d = 0; d < domain; ++d) row += crossing(source, d);
  return row;
}

CrossingPlan make_crossing_plan(const ExchangePlan& plan, const Domains& domains,
                                std::vector<std::int32_t> domain_tokens, Crossing wanted) {
  CrossingPlan crossing;
  crossing.domains = domains;
  crossing.rank = plan.rank;
  crossing.domain_tokens = std::move(domain_tokens);
  crossing.offset.push_back(0);
  for (int domain = 0; domain < domains.count(); ++domain) {
    crossing.offset.push_back(crossing.first_sum(plan.rank, domain + 1));
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
  crossing.feeders = domains.feeders(plan.rank);
  crossing.feeder_row.push_back(0);
  for (const int source : crossing.feeders) {
    crossing.feeder_row.push_back(crossing.feeder_row.back() +
                                  crossing.crossing(source, domains.of(plan.rank)));
  }
  if (domains.count() == 1) return crossing;
  crossing.chosen = wanted;
  if (wanted == Crossing::automatic) {
    const CrossingCost cost = crossing_cost(plan, crossing);
    crossing.chosen = cost.hierarchical < cost.direct ? Crossing::hierarchical : Crossing::direct;
  }
  return crossing;
}

int impossible_crossing(const ExchangePlan& plan, const Domains& domains,
                        std::span<const std::int32_t> domain_tokens) {
  for (int source = 0; source < plan.ranks(); ++source) {
    for (int domain = 0; domain < domains.count(); ++domain) {
      const std::int64_t count =
          domain_tokens[index(std::int64_t{source} * domains.count() + domain)];
      std::int64_t most = 0, sum = 0;  // of the tokens for one rank there, and for all
      for (const int member : domains.members(domain)) {
        most = std::max(most, plan.tokens_of(source, member));
        sum += plan.tokens_of(source, member);
      }
      const bool own = domains.of(source) == domain;
      if (own ? count != 0 : count < most || count > sum) return source;
    }
  }
  return -1;
}

bool append_rows(Forward& forward, const ExchangePlan& plan, const Domains& domains, int source,
                 std::span<const std::int32_t> ids) {
  const int here = domains.of(plan.rank);
  const auto topk = index(plan.own.topk);
  std::vector<std::int32_t>& filled = forward.filled;
  filled.resize(index(plan.ranks()));
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
      if (filled[index(target)] >= plan.tokens_of(source, target)) return false;
      forward.destinations.push_back({target, filled[index(target)]++});
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

bool complete(const Forward& forward, const ExchangePlan& plan, const Domains& domains,
              int source) {
  const std::vector<int>& members = domains.members(domains.of(plan.rank));
  return std::all_of(members.begin(), members.end(), [&](int member) {
    const std::int64_t rows = forward.filled.empty() ? 0 : forward.filled[index(member)];
    return rows == plan.tokens_of(source, member);
  });
}

CrossingCost crossing_cost(const ExchangePlan& plan, const CrossingPlan& crossing) {
  const Domains& domains = crossing.domains;
  CrossingCost cost;
  for (int rank = 0; rank < plan.ranks(); ++rank) {
    std::int64_t out = 0, in = 0, spread = 0;
    for (int peer = 0; peer < plan.ranks(); ++peer) {
      if (domains.together(rank, peer)) continue;
      out += plan.tokens_of(rank, peer);
      in += plan.tokens_of(peer, rank);
      if (domains.rail(peer, domains.of(rank)) != rank) continue;
      for (const int member : domains.members(domains.of(rank))) {
        spread += plan.tokens_of(peer, member);
      }
    }
    const std::int64_t crossings =
        std::max(crossing.first_sum(rank, domains.count()), crossing.staging_rows(rank));
    cost.direct = std::max(cost.direct, static_cast<double>(std::max(out, in)));
    cost.hierarchical = std::max(cost.hierarchical, static_cast<double>(crossings) +
                                                        static_cast<double>(spread) / kInsideSpeed);
  }
  return cost;
}

}  // namespace ferry

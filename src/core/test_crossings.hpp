// Routes of all ranks and what each makes of them: shared by the tests of crossings.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "core/crossing_plan.hpp"

namespace ferry::test {

/// The routes of all ranks, and what each of them makes of the counts.
struct World {
  Placement placement{};
  Domains domains = Domains::blocks(1, 0);  ///< of the ranks that are left
  Domains seats = domains;                  ///< of all
  std::vector<int> left{};                  ///< ascending; empty: all
  int topk = 1;
  std::vector<std::vector<std::int32_t>> routes{};
  std::vector<std::int32_t> domain_tokens{};
  std::vector<ExchangePlan> plans{};
  std::vector<CrossingPlan> crossings{};

  bool has(int rank) const {
    return left.empty() || std::binary_search(left.begin(), left.end(), rank);
  }
  std::int64_t tokens(int rank) const {
    return static_cast<std::int64_t>(routes[index(rank)].size()) / topk;
  }
  std::int32_t id(int rank, std::int64_t token, int slot) const {
    return routes[index(rank)][index(token * topk + slot)];
  }
  /// The ranks that a token goes to.
  std::set<int> targets(int rank, std::int64_t token) const {
    std::set<int> ranks;
    for (int k = 0; k < topk; ++k) {
      if (id(rank, token, k) >= 0) ranks.insert(placement.rank_of(id(rank, token, k)));
    }
    return ranks;
  }
  /// Tokens of a rank that go to a domain, ascending.
  std::vector<std::int32_t> crossing(int rank, int domain) const {
    std::vector<std::int32_t> all;
    for (std::int64_t t = 0; t < tokens(rank); ++t) {
      const std::set<int> ranks = targets(rank, t);
      const bool there =
          std::any_of(ranks.begin(), ranks.end(), [&](int r) { return domains.of(r) == domain; });
      if (there && domain != domains.of(rank)) all.push_back(static_cast<std::int32_t>(t));
    }
    return all;
  }
  /// Tokens of `source` that `target` receives, ascending.
  std::vector<std::int32_t> arriving(int source, int target) const {
    std::vector<std::int32_t> all;
    for (std::int64_t t = 0; t < tokens(source); ++t) {
      if (targets(source, t).contains(target)) all.push_back(static_cast<std::int32_t>(t));
    }
    return all;
  }
  /// (source, token) of every row that a rank receives, in order.
  std::vector<std::pair<int, std::int64_t>> arrivals(int target) const {
    std::vector<std::pair<int, std::int64_t>> rows;
    for (int s = 0; s < placement.ranks; ++s) {
      for (const std::int32_t token : arriving(s, target)) rows.emplace_back(s, token);
    }
    return rows;
  }

  void make_plans() {
    std::vector<std::int32_t> counts;
    std::vector<RouteCounts> own;
    for (int r = 0; r < placement.ranks; ++r) {
      own.push_back(count_routes(routes[index(r)], tokens(r), topk, placement));
      const RouteCounts& mine = own.back();
      counts.insert(counts.end(), mine.tokens_per_rank.begin(), mine.tokens_per_rank.end());
      counts.insert(counts.end(), mine.slots_per_expert.begin(), mine.slots_per_expert.end());
      const auto crossed = count_crossings(mine, placement, domains, r);
      domain_tokens.insert(domain_tokens.end(), crossed.begin(), crossed.end());
    }
    for (int r = 0; r < placement.ranks; ++r) {
      plans.push_back(make_plan(own[index(r)], counts, placement, r));
      crossings.push_back(has(r) ? make_crossing_plan(plans.back(), domains, domain_tokens)
                                 : CrossingPlan{});
    }
  }
};

/// Two domains of two ranks, one expert each: rank 0 sends token 0 to ranks 2 and 3, token 1 to 3.
inline World small_world() {
  World world;
  world.placement = {4, 4};
  world.domains = world.seats = Domains::blocks(4, 2);
  world.topk = 2;
  world.routes = {{2, 3, 3, -1}, {}, {}, {}};
  world.make_plans();
  return world;
}

/// Random ranks, domains and routes, some ranks without tokens. `losses`: some ranks are lost, of
/// some domains all.
inline World any_world(std::mt19937& random, bool losses = false) {
  const auto below = [&random](unsigned count) { return static_cast<int>(random() % count); };
  World world;
  world.placement.ranks = 1 + below(9);
  world.placement.experts = 1 + below(20);
  world.topk = below(20) == 0 ? 64 : 1 + below(10);
  std::vector<int> labels;
  for (int r = 0; r < world.placement.ranks; ++r) labels.push_back(below(4));
  world.domains = world.seats = Domains(labels);
  if (losses) {
    for (int r = 0; r < world.placement.ranks; ++r) {
      if (below(3) > 0 && (labels[index(r)] > 0 || below(2) > 0)) world.left.push_back(r);
    }
    if (world.left.empty()) world.left.push_back(below(unsigned(world.placement.ranks)));
    world.domains = world.seats.among(world.left);
  }
  for (int r = 0; r < world.placement.ranks; ++r) {
    std::vector<std::int32_t> routes;
    for (int i = below(3) == 0 || !world.has(r) ? 0 : below(20) * world.topk; i > 0; --i) {
      const auto experts = static_cast<unsigned>(world.placement.experts);
      const auto id = static_cast<std::int32_t>(below(experts));
      const bool unused = below(5) == 0 || !world.has(world.placement.rank_of(id));
      routes.push_back(unused ? -1 : id);
    }
    world.routes.push_back(routes);
  }
  world.make_plans();
  return world;
}

}  // namespace ferry::test

// Flows against the plans that ranks make, and against the closed form.
#include "ferry/exchange_flows.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "core/crossing_plan.hpp"
#include "core/domains.hpp"
#include "core/exchange_plan.hpp"
#include "ferry/error.hpp"

namespace ferry {
namespace {

constexpr std::uint64_t kFlowSeed = 20261126;

TEST(ExchangeFlows, AreThoseOfThePlansOfAllRanks) {
  for (const bool hierarchical : {false, true}) {
    const FlowShape shape{
        .experts = 21, .ranks = 11, .host_ranks = 4, .topk = 3, .hierarchical = hierarchical};
    const Domains hosts = Domains::blocks(shape.ranks, shape.host_ranks);
    const Placement placement{shape.experts, shape.ranks};
    ExchangeFlows flows(shape);
    std::vector<std::int32_t> counts, crossings;
    std::vector<RouteCounts> own;
    for (int rank = 0; rank < shape.ranks; ++rank) {
      RankRoutes routes = draw_routes(shape, {.tokens = 5 + rank, .seed = kFlowSeed}, rank);
      flows.add(rank, routes);
      own.push_back(count_routes(std::move(routes), 5 + rank, shape.topk, placement));
      counts.insert(counts.end(), own.back().tokens_per_rank.begin(),
                    own.back().tokens_per_rank.end());
      counts.insert(counts.end(), own.back().slots_per_expert.begin(),
                    own.back().slots_per_expert.end());
      const auto crossed = count_crossings(own.back(), placement, hosts, rank);
      crossings.insert(crossings.end(), crossed.begin(), crossed.end());
    }
    std::map<std::tuple<int, int, bool>, std::int64_t> expected;
    for (int rank = 0; rank < shape.ranks; ++rank) {
      const ExchangePlan plan = make_plan(RouteCounts(own[index(rank)]), counts, placement, rank);
      const CrossingPlan crossing = make_crossing_plan(plan, hosts, crossings);
      for (int to = 0; to < shape.ranks; ++to) {
        const bool near = hosts.together(rank, to);
        if (to != rank && (near || !hierarchical)) {
          expected[{rank, to, !near}] += plan.send_rows(to);
        }
      }
      if (!hierarchical) continue;
      for (int host = 0; host < hosts.count(); ++host) {
        if (host == hosts.of(rank)) continue;
        expected[{rank, hosts.rail(rank, host), true}] += crossing.crossing(rank, host);
      }
      for (std::size_t feeder = 0; feeder < crossing.feeders.size(); ++feeder) {
        const auto inside = crossing.tokens_inside(feeder);
        for (std::size_t i = 0; i < inside.size(); ++i) {
          const int to = hosts.members(hosts.of(rank))[i];
          if (to != rank) expected[{rank, to, false}] += inside[i];
        }
      }
    }
    std::erase_if(expected, [](const auto& one) { return one.second == 0; });
    std::map<std::tuple<int, int, bool>, std::int64_t> got;
    for (const Flow& flow : flows.flows()) {
      got[{flow.from, flow.to, flow.network}] += flow.rows;
    }
    EXPECT_EQ(got, expected);
  }
}

TEST(ExchangeFlows, OfUniformRoutesAreTheClosedForm) {
  for (const bool hierarchical : {false, true}) {
    const FlowShape shape{
        .experts = 4096, .ranks = 64, .host_ranks = 8, .topk = 8, .hierarchical = hierarchical};
    ExchangeFlows flows(shape);
    for (int rank = 0; rank < shape.ranks; ++rank) {
      flows.add(rank, draw_routes(shape, {.tokens = 2048, .seed = kFlowSeed}, rank));
    }
    const ExchangeRates rates{.leaf_hosts = 2};
    const ExchangeBytes busiest = flows.busiest(2, rates);
    const ExchangeBytes uniform = uniform_bytes(
        {.ranks = 64, .tokens = 2048, .row_bytes = 2, .hierarchical = hierarchical}, rates);
    // The busiest of 64 has a little more than the mean.
    for (const auto part : {&ExchangeBytes::nic, &ExchangeBytes::nvlink, &ExchangeBytes::spine}) {
      EXPECT_GE(busiest.*part, uniform.*part * 0.999);
      EXPECT_LE(busiest.*part, uniform.*part * 1.06);
    }
    EXPECT_EQ(busiest.peers, uniform.peers);
  }
}

TEST(ExchangeFlows, DrawnRoutesKeepTheirRules) {
  const FlowShape shape{.experts = 64, .ranks = 32, .host_ranks = 4, .topk = 6};
  const auto routes =
      draw_routes(shape, {.tokens = 500, .most_hosts = 2, .hot = 8, .heat = 5, .seed = 3}, 7);
  ASSERT_EQ(routes.size(), 3000u);
  for (std::size_t first = 0; first < routes.size(); first += 6) {
    std::set<std::int32_t> ids, hosts;
    for (std::size_t k = first; k < first + 6; ++k) {
      ids.insert(routes[k]);
      hosts.insert(routes[k] / 8);
    }
    ASSERT_EQ(ids.size(), 6u);
    ASSERT_LE(hosts.size(), 2u);
  }
  const auto hot = draw_routes(shape, {.tokens = 500, .hot = 8, .heat = 5, .seed = 3}, 7);
  const auto named = std::count_if(hot.begin(), hot.end(), [](std::int32_t id) { return id < 8; });
  EXPECT_GT(named, 800);  // 40 of 96 draws, less as ids are distinct; 375 without heat
  EXPECT_EQ(hot, draw_routes(shape, {.tokens = 500, .hot = 8, .heat = 5, .seed = 3}, 7));
  EXPECT_NE(hot, draw_routes(shape, {.tokens = 500, .hot = 8, .heat = 5, .seed = 3}, 8));
}

TEST(ExchangeFlows, RefusesAnExpertThatIsNone) {
  ExchangeFlows flows({.experts = 4, .ranks = 2, .host_ranks = 1, .topk = 2});
  EXPECT_THROW(flows.add(0, {0, 4}), Error);
  EXPECT_THROW(flows.add(0, {0, -2}), Error);
  EXPECT_NO_THROW(flows.add(0, {0, -1}));
}

}  // namespace
}  // namespace ferry

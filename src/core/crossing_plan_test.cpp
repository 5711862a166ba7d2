// What crosses between domains, against its definition: found again from all routes of all ranks.
#include "core/crossing_plan.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

namespace ferry {
namespace {

constexpr unsigned kSeed = 20261121;

std::size_t index(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

/// The routes of all ranks, and what each of them makes of the counts.
struct World {
  Placement placement{};
  Domains domains = Domains::blocks(1, 0);
  int topk = 1;
  std::vector<std::vector<std::int32_t>> routes{};
  std::vector<std::int32_t> domain_tokens{};
  std::vector<ExchangePlan> plans{};
  std::vector<CrossingPlan> crossings{};

  std::int64_t tokens(int rank) const {
    return static_cast<std::int64_t>(routes[index(rank)].size()) / topk;
  }
  /// The ranks that a token goes to.
  std::set<int> targets(int rank, std::int64_t token) const {
    std::set<int> ranks;
    for (int k = 0; k < topk; ++k) {
      const std::int32_t id = routes[index(rank)][index(token * topk + k)];
      if (id >= 0) ranks.insert(placement.rank_of(id));
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
      crossings.push_back(make_crossing_plan(plans.back(), domains, domain_tokens));
    }
  }
};

World any_world(std::mt19937& random) {
  const auto below = [&random](unsigned count) { return static_cast<int>(random() % count); };
  World world;
  world.placement.ranks = 1 + below(9);
  world.placement.experts = 1 + below(20);
  world.topk = 1 + below(8);
  std::vector<int> labels;
  for (int r = 0; r < world.placement.ranks; ++r) labels.push_back(below(4));
  world.domains = Domains(labels);
  for (int r = 0; r < world.placement.ranks; ++r) {
    std::vector<std::int32_t> routes;
    for (int i = below(3) == 0 ? 0 : below(20) * world.topk; i > 0; --i) {
      const auto experts = static_cast<unsigned>(world.placement.experts);
      routes.push_back(below(5) == 0 ? -1 : static_cast<std::int32_t>(below(experts)));
    }
    world.routes.push_back(routes);
  }
  world.make_plans();
  return world;
}

TEST(CrossingPlan, CountsATokenOnceForEachOtherDomain) {
  std::mt19937 random(kSeed);
  for (int round = 0; round < 200; ++round) {
    const World world = any_world(random);
    const Domains& domains = world.domains;
    for (int r = 0; r < world.placement.ranks; ++r) {
      const CrossingPlan& crossing = world.crossings[index(r)];
      for (int d = 0; d < domains.count(); ++d) {
        const auto expected = world.crossing(r, d);
        ASSERT_EQ(crossing.crossing(r, d), static_cast<std::int64_t>(expected.size()));
        ASSERT_EQ(crossing.first_sum(r, d), crossing.offset[index(d)]);
        const std::vector<std::int32_t> got(
            crossing.tokens.begin() + crossing.offset[index(d)],
            crossing.tokens.begin() + crossing.offset[index(d) + 1]);
        ASSERT_EQ(got, expected) << "kSeed, round " << round;
      }
      EXPECT_EQ(impossible_crossing(world.plans[index(r)], domains, world.domain_tokens), -1);
    }
  }
}

TEST(CrossingPlan, RowsOfTheStageFollowEachOther) {
  std::mt19937 random(kSeed + 1);
  for (int round = 0; round < 200; ++round) {
    const World world = any_world(random);
    for (int r = 0; r < world.placement.ranks; ++r) {
      const CrossingPlan& mine = world.crossings[index(r)];
      std::int64_t row = 0;
      for (std::size_t i = 0; i < mine.feeders.size(); ++i) {
        const int source = mine.feeders[i];
        ASSERT_EQ(mine.feeder_row[i], row);
        // The source finds the same place.
        ASSERT_EQ(world.crossings[index(source)].first_stage_row(r, source), row);
        row += static_cast<std::int64_t>(world.crossing(source, world.domains.of(r)).size());
      }
      ASSERT_EQ(mine.feeder_row.back(), row);
      for (const CrossingPlan& other : world.crossings) ASSERT_EQ(other.stage_rows(r), row);
    }
  }
}

TEST(CrossingPlan, ForwardedRowsComeToTheirFinalPlaces) {
  std::mt19937 random(kSeed + 2);
  for (int round = 0; round < 200; ++round) {
    const World world = any_world(random);
    for (int r = 0; r < world.placement.ranks; ++r) {
      for (const int source : world.crossings[index(r)].feeders) {
        const auto tokens = world.crossing(source, world.domains.of(r));
        Forward forward;
        for (std::size_t i = 0; i < tokens.size();) {  // in pieces of any size
          const std::size_t n = std::min<std::size_t>(1 + random() % 5, tokens.size() - i);
          std::vector<std::int32_t> ids;
          for (std::size_t j = i; j < i + n; ++j) {
            const auto first = world.routes[index(source)].begin() + tokens[j] * world.topk;
            ids.insert(ids.end(), first, first + world.topk);
          }
          EXPECT_FALSE(complete(forward, world.plans[index(r)], world.domains, source));
          ASSERT_TRUE(append_rows(forward, world.plans[index(r)], world.domains, source, ids));
          i += n;
        }
        ASSERT_TRUE(complete(forward, world.plans[index(r)], world.domains, source));
        ASSERT_EQ(forward.rows(), static_cast<std::int64_t>(tokens.size()));
        std::set<std::pair<int, int>> seen;
        for (std::size_t i = 0; i < tokens.size(); ++i) {
          int last = -1;
          for (auto l = forward.lane_offset[i]; l < forward.lane_offset[i + 1]; ++l) {
            const Lane lane = forward.lanes[index(l)];
            ASSERT_GT(lane.rank, last);  // ascending
            last = lane.rank;
            ASSERT_EQ(world.domains.of(lane.rank), world.domains.of(r));
            ASSERT_EQ(world.arriving(source, lane.rank)[index(lane.row)], tokens[i]);
            seen.emplace(lane.rank, lane.row);
          }
        }
        std::size_t expected = 0;
        for (const int member : world.domains.members(world.domains.of(r))) {
          expected += world.arriving(source, member).size();
        }
        ASSERT_EQ(seen.size(), expected);
      }
    }
  }
}

/// Two domains of two ranks, one expert each: rank 0 sends token 0 to ranks 2 and 3, token 1 to 3.
World small_world() {
  World world;
  world.placement = {4, 4};
  world.domains = Domains::blocks(4, 2);
  world.topk = 2;
  world.routes = {{2, 3, 3, -1}, {}, {}, {}};
  world.make_plans();
  return world;
}

TEST(CrossingPlan, RefusesRoutesThatWereNotCounted) {
  const World world = small_world();
  const auto fits = [&](const std::vector<std::int32_t>& ids) {
    Forward forward;
    return append_rows(forward, world.plans[2], world.domains, 0, ids);
  };
  EXPECT_TRUE(fits({2, 3, 3, -1}));
  EXPECT_FALSE(fits({2, 3, 2, -1}));  // rank 2 gets one row
  EXPECT_FALSE(fits({2, 4, 3, -1}));  // no such expert
  EXPECT_FALSE(fits({2, -2, 3, -1}));
  EXPECT_FALSE(fits({2, 3, 0, 1}));          // not in this domain
  EXPECT_FALSE(fits({2, 3, 3, -1, 3, -1}));  // one row too many
  Forward forward;
  ASSERT_TRUE(append_rows(forward, world.plans[2], world.domains, 0, std::vector{3, -1, 3, -1}));
  EXPECT_FALSE(complete(forward, world.plans[2], world.domains, 0));  // nothing for rank 2
}

TEST(CrossingPlan, SeesCountsThatCannotBe) {
  const World world = small_world();
  const auto culprit = [&](std::vector<std::int32_t> counts) {
    return impossible_crossing(world.plans[1], world.domains, counts);
  };
  EXPECT_EQ(culprit({0, 2, 0, 0, 0, 0, 0, 0}), -1);
  EXPECT_EQ(culprit({0, 3, 0, 0, 0, 0, 0, 0}), -1);  // 1 + 2 tokens might be three
  EXPECT_EQ(culprit({0, 4, 0, 0, 0, 0, 0, 0}), 0);
  EXPECT_EQ(culprit({0, 1, 0, 0, 0, 0, 0, 0}), 0);
  EXPECT_EQ(culprit({1, 2, 0, 0, 0, 0, 0, 0}), 0);  // to its own domain
  EXPECT_EQ(culprit({0, 2, 0, 0, -1, 0, 0, 0}), 2);
}

TEST(CrossingPlan, TheCostModel) {
  const World world = small_world();
  // Direct: rank 0 sends three rows. Hierarchical: two cross, three are spread.
  const CrossingCost cost = crossing_cost(world.plans[0], world.crossings[0]);
  EXPECT_EQ(cost.direct, 3.0);
  EXPECT_EQ(cost.hierarchical, 2.0 + 3.0 / kInsideSpeed);
  EXPECT_EQ(world.crossings[0].automatic, Crossing::hierarchical);
  World single;
  single.placement = {4, 4};
  single.domains = Domains::blocks(4, 2);
  single.routes = {{2, 3}, {}, {}, {}};  // each token to one rank: nothing to save
  single.make_plans();
  EXPECT_EQ(single.crossings[0].automatic, Crossing::direct);
  for (const CrossingPlan& crossing : world.crossings) {
    EXPECT_EQ(crossing.automatic, Crossing::hierarchical);  // all ranks alike
  }
}

}  // namespace
}  // namespace ferry

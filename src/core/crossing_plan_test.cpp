// What crosses between domains, against its definition: found again from all routes of all ranks.
#include "core/crossing_plan.hpp"

#include <gtest/gtest.h>

#include <algorithm>

#include "core/test_crossings.hpp"

namespace ferry::test {
namespace {

constexpr unsigned kPlanSeed = 20261121;

TEST(CrossingPlan, CountsATokenOnceForEachOtherDomain) {
  std::mt19937 random(kPlanSeed);
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
        ASSERT_EQ(got, expected) << "kPlanSeed, round " << round;
      }
      EXPECT_EQ(impossible_crossing(world.plans[index(r)], domains, world.domain_tokens), -1);
    }
  }
}

TEST(CrossingPlan, RowsOfTheStagingBufferFollowEachOther) {
  std::mt19937 random(kPlanSeed + 1);
  for (int round = 0; round < 200; ++round) {
    const World world = any_world(random);
    for (int r = 0; r < world.placement.ranks; ++r) {
      const CrossingPlan& mine = world.crossings[index(r)];
      std::int64_t row = 0;
      for (std::size_t i = 0; i < mine.feeders.size(); ++i) {
        const int source = mine.feeders[i];
        ASSERT_EQ(mine.feeder_row[i], row);
        // The source finds the same place.
        ASSERT_EQ(world.crossings[index(source)].rail_row[index(world.domains.of(r))], row);
        const auto& members = world.domains.members(world.domains.of(r));
        for (std::size_t m = 0; m < members.size(); ++m) {
          ASSERT_EQ(mine.first_rows(i)[m], world.plans[index(source)].peer_row[index(members[m])]);
        }
        row += static_cast<std::int64_t>(world.crossing(source, world.domains.of(r)).size());
      }
      ASSERT_EQ(mine.feeder_row.back(), row);
      for (const CrossingPlan& other : world.crossings)
        ASSERT_EQ(other.staging_rows[index(r)], row);
    }
  }
}

TEST(CrossingPlan, ForwardedRowsComeToTheirFinalPlaces) {
  std::mt19937 random(kPlanSeed + 2);
  for (int round = 0; round < 200; ++round) {
    const World world = any_world(random);
    for (int r = 0; r < world.placement.ranks; ++r) {
      const CrossingPlan& mine = world.crossings[index(r)];
      for (std::size_t feeder = 0; feeder < mine.feeders.size(); ++feeder) {
        const int source = mine.feeders[feeder];
        ASSERT_EQ(mine.feeder(source), static_cast<int>(feeder));
        const auto tokens = world.crossing(source, world.domains.of(r));
        Forward forward;
        for (std::size_t i = 0; i < tokens.size();) {  // in pieces of any size
          const std::size_t n = std::min<std::size_t>(1 + random() % 5, tokens.size() - i);
          std::vector<std::int32_t> ids;
          for (std::size_t j = i; j < i + n; ++j) {
            const auto first = world.routes[index(source)].begin() + tokens[j] * world.topk;
            ids.insert(ids.end(), first, first + world.topk);
          }
          EXPECT_FALSE(complete(forward, mine, feeder));
          ASSERT_TRUE(append_rows(forward, world.plans[index(r)], mine, feeder, ids));
          i += n;
        }
        ASSERT_TRUE(complete(forward, mine, feeder));
        ASSERT_EQ(forward.rows(), static_cast<std::int64_t>(tokens.size()));
        std::set<std::pair<int, int>> seen;
        for (std::size_t i = 0; i < tokens.size(); ++i) {
          int last = -1;
          for (auto l = forward.destination_offset[i]; l < forward.destination_offset[i + 1]; ++l) {
            const Destination destination = forward.destinations[index(l)];
            ASSERT_GT(destination.rank, last);  // ascending
            last = destination.rank;
            ASSERT_EQ(world.domains.of(destination.rank), world.domains.of(r));
            ASSERT_EQ(world.arriving(source, destination.rank)[index(destination.row)], tokens[i]);
            seen.emplace(destination.rank, destination.row);
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

TEST(CrossingPlan, RefusesRoutesThatWereNotCounted) {
  const World world = small_world();
  const auto fits = [&](const std::vector<std::int32_t>& ids) {
    Forward forward;
    return append_rows(forward, world.plans[2], world.crossings[2], 0, ids);
  };
  EXPECT_TRUE(fits({2, 3, 3, -1}));
  EXPECT_FALSE(fits({2, 3, 2, -1}));  // rank 2 gets one row
  EXPECT_FALSE(fits({2, 4, 3, -1}));  // no such expert
  EXPECT_FALSE(fits({2, -2, 3, -1}));
  EXPECT_FALSE(fits({2, 3, 0, 1}));          // not in this domain
  EXPECT_FALSE(fits({2, 3, 3, -1, 3, -1}));  // one row too many
  Forward forward;
  ASSERT_TRUE(
      append_rows(forward, world.plans[2], world.crossings[2], 0, std::vector{3, -1, 3, -1}));
  EXPECT_FALSE(complete(forward, world.crossings[2], 0));  // nothing for rank 2
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
  // Direct: rank 0 sends three rows, in two messages. Hierarchical: two cross in one; that three
  // are spread takes less long.
  const CrossingCost cost = crossing_cost(world.plans[0], world.crossings[0]);
  EXPECT_EQ(cost.direct, 3.0);
  EXPECT_EQ(cost.hierarchical, 2.0);
  EXPECT_EQ(world.crossings[0].chosen, Crossing::hierarchical);
  World single;
  single.placement = {4, 4};
  single.domains = Domains::blocks(4, 2);
  single.routes = {{2, 3}, {}, {}, {}};  // each token to one rank: nothing to save
  single.make_plans();
  EXPECT_EQ(single.crossings[0].chosen, Crossing::direct);
  // Two ranks of one rail send six rows each, half of them to each rank of the third domain.
  World rail;
  rail.placement = {6, 6};
  rail.domains = Domains::blocks(6, 2);
  rail.routes.resize(6);
  rail.routes[0] = rail.routes[2] = {4, -1, 4, -1, 4, -1, 5, -1, 5, -1, 5, -1};
  rail.make_plans();
  EXPECT_EQ(rail.crossings[0].chosen, Crossing::direct);  // else all twelve come in at one
  for (const CrossingPlan& crossing : world.crossings) {
    EXPECT_EQ(crossing.chosen, Crossing::hierarchical);  // all ranks alike
  }
}

TEST(CrossingPlan, TheChoiceOfTheGroupComesFirst) {
  const World world = small_world();
  for (const Crossing wanted : {Crossing::direct, Crossing::hierarchical}) {
    EXPECT_EQ(make_crossing_plan(world.plans[0], world.domains, world.domain_tokens, wanted).chosen,
              wanted);
  }
  World inside = world;
  inside.domains = Domains::blocks(world.placement.ranks, world.placement.ranks);
  inside.domain_tokens.assign(static_cast<std::size_t>(world.placement.ranks), 0);
  EXPECT_EQ(make_crossing_plan(inside.plans[0], inside.domains, inside.domain_tokens,
                               Crossing::hierarchical)
                .chosen,
            Crossing::direct);  // nothing to cross
}

}  // namespace
}  // namespace ferry::test

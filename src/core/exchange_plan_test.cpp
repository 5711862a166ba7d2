// Plans against their definition: everything is found again by looking at all routes of all ranks.
#include "core/exchange_plan.hpp"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "core/test_crossings.hpp"

namespace ferry::test {
namespace {

unsigned base_seed() {
  const char* text = std::getenv("FERRY_TEST_SEED");
  return text != nullptr ? static_cast<unsigned>(std::strtoull(text, nullptr, 0)) : 20261121;
}

/// Each test looks at many worlds; the seed says which.
class ExchangePlanTest : public ::testing::Test {
 protected:
  template <class Check>
  void for_many(Check&& check) {
    std::printf("FERRY_TEST_SEED=%u\n", base_seed());
    for (unsigned i = 0; i < 200 && !HasFailure(); ++i) {
      SCOPED_TRACE("world " + std::to_string(i));
      std::mt19937 random(base_seed() + i * 1000003);
      const World world = any_world(random);
      for (int r = 0; r < world.placement.ranks && !HasFailure(); ++r) {
        SCOPED_TRACE("rank " + std::to_string(r));
        check(world, world.plans[index(r)], r);
      }
    }
  }
};

TEST(PlacementTest, ContiguousBlocksOfNearlyOneSize) {
  for (std::int64_t experts = 1; experts < 40; ++experts) {
    for (int ranks = 1; ranks < 20; ++ranks) {
      const Placement placement{experts, ranks};
      ASSERT_EQ(placement.first_expert(0), 0);
      ASSERT_EQ(placement.first_expert(ranks), experts);
      for (int r = 0; r < ranks; ++r) {
        ASSERT_EQ(placement.local_experts(r), experts / ranks + (r < experts % ranks ? 1 : 0));
        for (std::int64_t e = placement.first_expert(r); e < placement.first_expert(r + 1); ++e) {
          ASSERT_EQ(placement.rank_of(e), r) << experts << " experts, " << ranks << " ranks";
        }
      }
    }
  }
}

TEST_F(ExchangePlanTest, CountsAreThoseOfTheRoutes) {
  for_many([](const World& world, const ExchangePlan& plan, int r) {
    ASSERT_EQ(plan.own.tokens, world.tokens(r));
    std::vector<std::int64_t> slots(index(plan.local_experts()), 0);
    for (int s = 0; s < plan.ranks(); ++s) {
      std::int64_t rows = 0, sent = 0;
      for (std::int64_t t = 0; t < world.tokens(s); ++t) {
        rows += world.targets(s, t).contains(r) ? 1 : 0;
        for (int k = 0; k < world.topk; ++k) {
          const std::int32_t e = world.id(s, t, k);
          if (e >= 0 && world.placement.rank_of(e) == r) {
            ++slots[index(e - plan.placement.first_expert(r))];
          }
        }
      }
      for (std::int64_t t = 0; t < world.tokens(r); ++t) {
        sent += world.targets(r, t).contains(s) ? 1 : 0;
      }
      EXPECT_EQ(plan.recv_offset[index(s) + 1] - plan.recv_offset[index(s)], rows);
      EXPECT_EQ(plan.send_rows(s), sent);
    }
    EXPECT_EQ(plan.slots_per_expert(), slots);
    EXPECT_EQ(plan.recv_rows(), static_cast<std::int64_t>(world.arrivals(r).size()));
  });
}

TEST_F(ExchangePlanTest, EveryRowHasOnePlace) {
  for_many([](const World& world, const ExchangePlan& plan, int r) {
    for (int d = 0; d < plan.ranks(); ++d) {
      const auto arrivals = world.arrivals(d);
      EXPECT_EQ(plan.peer_recv_rows[index(d)], static_cast<std::int64_t>(arrivals.size()));
      for (std::int64_t i = 0; i < plan.send_rows(d); ++i) {
        const std::int64_t token = plan.send_tokens[index(plan.send_offset[index(d)] + i)];
        const auto row = index(plan.peer_row[index(d)] + i);
        ASSERT_LT(row, arrivals.size());
        EXPECT_EQ(arrivals[row], std::pair(r, token));
      }
    }
    for (int s = 0; s < plan.ranks(); ++s) {
      std::int64_t all = 0, before = 0;
      for (std::int64_t t = 0; t < world.tokens(s); ++t) {
        for (const int target : world.targets(s, t)) {
          ++all;
          before += target < r ? 1 : 0;
        }
      }
      EXPECT_EQ(plan.peer_sent_rows[index(s)], all);
      EXPECT_EQ(plan.peer_sent_before[index(s)], before);
    }
  });
}

TEST_F(ExchangePlanTest, FirstRowsOfAnySourceAfterAnother) {
  for_many([](const World& world, const ExchangePlan& plan, int r) {
    const std::vector<int> ranks{r, plan.ranks() - 1};
    FirstRows first(plan, ranks);
    for (const int source : {r, 0, plan.ranks() - 1, r / 2}) {
      for (std::size_t i = 0; i < ranks.size(); ++i) {
        const auto& at = world.plans[index(source)].peer_row;
        EXPECT_EQ(first.of(source)[i], at[index(ranks[i])]);
      }
    }
  });
}

TEST_F(ExchangePlanTest, DestinationsAreTheRanksOfATokenAscending) {
  for_many([](const World& world, const ExchangePlan& plan, int r) {
    ASSERT_EQ(static_cast<std::int64_t>(plan.destination_offset.size()), world.tokens(r) + 1);
    for (std::int64_t t = 0; t < world.tokens(r); ++t) {
      std::vector<int> expected, got;
      for (int d = 0; d < plan.ranks(); ++d) {
        if (world.targets(r, t).contains(d)) expected.push_back(d);
      }
      for (std::int64_t l = plan.destination_offset[index(t)];
           l < plan.destination_offset[index(t) + 1]; ++l) {
        const Destination destination = plan.destinations[index(l)];
        got.push_back(destination.rank);
        EXPECT_EQ(
            plan.send_tokens[index(plan.send_offset[index(destination.rank)] + destination.row)],
            t);
      }
      EXPECT_EQ(got, expected);
    }
  });
}

TEST_F(ExchangePlanTest, LocalRoutesNameLocalExpertsAlone) {
  for_many([](const World& world, const ExchangePlan& plan, int r) {
    for (int d = 0; d < plan.ranks(); ++d) {
      std::vector<std::int32_t> got(index(plan.send_rows(d) * world.topk), -7), expected;
      local_routes(plan, d, got.data());
      for (std::int64_t t = 0; t < world.tokens(r); ++t) {
        if (!world.targets(r, t).contains(d)) continue;
        for (int k = 0; k < world.topk; ++k) {
          const std::int32_t e = world.id(r, t, k);
          const bool local = e >= 0 && world.placement.rank_of(e) == d;
          expected.push_back(local ? e - static_cast<std::int32_t>(plan.placement.first_expert(d))
                                   : -1);
        }
      }
      EXPECT_EQ(got, expected);
    }
  });
}

TEST_F(ExchangePlanTest, ExpertMajorRowsAreDisjointOrderedAndAligned) {
  for_many([](const World& world, const ExchangePlan& plan, int r) {
    std::vector<std::int32_t> routes;  // of the rows that this rank receives
    for (const auto& [source, token] : world.arrivals(r)) {
      for (int k = 0; k < world.topk; ++k) {
        const std::int32_t e = world.id(source, token, k);
        const bool local = e >= 0 && world.placement.rank_of(e) == r;
        routes.push_back(local ? e - static_cast<std::int32_t>(plan.placement.first_expert(r))
                               : -1);
      }
    }
    for (std::int64_t alignment : {1, 3, 8, 128}) {
      const auto offsets = plan.expert_offsets(alignment);
      ASSERT_EQ(static_cast<std::int64_t>(offsets.size()), plan.local_experts() + 1);
      const auto slots = plan.slots_per_expert();
      for (std::size_t e = 0; e < slots.size(); ++e) {
        EXPECT_EQ(offsets[e] % alignment, 0);
        EXPECT_GE(offsets[e + 1] - offsets[e], slots[e]);
        EXPECT_LT(offsets[e + 1] - offsets[e], slots[e] + alignment);
      }
      const auto rows = place_slots(routes, offsets);
      std::vector<std::int64_t> next(offsets.begin(), offsets.end());
      for (std::size_t i = 0; i < rows.size(); ++i) {
        // Inside a block in rank-major order, then slot: without gaps.
        EXPECT_EQ(rows[i], routes[i] < 0 ? -1 : next[index(routes[i])]++);
      }
      for (std::size_t e = 0; e < slots.size(); ++e) EXPECT_EQ(next[e], offsets[e] + slots[e]);
    }
  });
}

TEST_F(ExchangePlanTest, RegionsOfSendersCoverARankWithoutOverlap) {
  for_many([](const World& world, const ExchangePlan&, int d) {
    std::set<std::int64_t> rows;
    std::int64_t total = 0;
    for (const ExchangePlan& sender : world.plans) {
      for (std::int64_t i = 0; i < sender.send_rows(d); ++i, ++total) {
        rows.insert(sender.peer_row[index(d)] + i);
      }
    }
    EXPECT_EQ(static_cast<std::int64_t>(rows.size()), total);
    EXPECT_EQ(total, world.plans[index(d)].recv_rows());
    EXPECT_TRUE(rows.empty() || (*rows.begin() == 0 && *rows.rbegin() == total - 1));
  });
}

TEST(ExchangePlanExampleTest, TwoRanksByHand) {
  // 3 experts on 2 ranks: rank 0 holds 0 and 1, rank 1 holds 2.
  World world;
  world.placement = {3, 2};
  world.domains = Domains::blocks(2, 2);
  world.topk = 2;
  world.routes = {{0, 2, 2, 2, -1, -1}, {1, 0, -1, 2}};
  world.make_plans();
  const ExchangePlan& zero = world.plans[0];
  EXPECT_EQ(zero.own.tokens_per_rank, (std::vector<std::int32_t>{1, 2}));
  EXPECT_EQ(zero.own.slots_per_expert, (std::vector<std::int32_t>{1, 0, 3}));
  EXPECT_EQ(zero.send_tokens, (std::vector<std::int32_t>{0, 0, 1}));
  EXPECT_EQ(zero.recv_offset, (std::vector<std::int64_t>{0, 1, 2}));
  EXPECT_EQ(zero.slots_per_expert(), (std::vector<std::int64_t>{2, 1}));
  EXPECT_EQ(zero.expert_offsets(4), (std::vector<std::int64_t>{0, 4, 8}));
  EXPECT_EQ(zero.destination_offset, (std::vector<std::int64_t>{0, 2, 3, 3}));
  const ExchangePlan& one = world.plans[1];
  EXPECT_EQ(one.recv_rows(), 3);
  EXPECT_EQ(one.slots_per_expert(), (std::vector<std::int64_t>{4}));
  EXPECT_EQ(one.peer_row, (std::vector<std::int64_t>{1, 2}));
}

TEST(ExchangePlanExampleTest, RanksWithoutExperts) {
  World world;
  world.placement = {1, 3};
  world.domains = Domains::blocks(3, 3);
  world.topk = 1;
  world.routes = {{0}, {0, -1}, {}};
  world.make_plans();
  EXPECT_EQ(world.plans[0].recv_rows(), 2);
  EXPECT_EQ(world.plans[1].recv_rows(), 0);
  EXPECT_EQ(world.plans[2].local_experts(), 0);
  EXPECT_TRUE(world.plans[2].slots_per_expert().empty());
  EXPECT_EQ(world.plans[2].expert_offsets(8), std::vector<std::int64_t>{0});
}

}  // namespace
}  // namespace ferry::test

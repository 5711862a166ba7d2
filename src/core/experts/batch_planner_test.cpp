// Plans of batches of any skew, against what every plan must be. How good they are beside an exact
// solver is in python/tests/test_batch_balancer.py.
#include "core/experts/batch_planner.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "core/experts/plan_batch.hpp"
#include "core/experts/test_batches.hpp"
#include "core/experts/test_warps.hpp"

namespace ferry {
namespace {

constexpr unsigned kBatchSeed = 23;

struct Batch {
  Placement homes;
  int slots = 1;
  std::vector<std::int32_t> counts;  // [ranks, experts]
  std::int64_t of(int source, std::int64_t expert) const {
    return counts[index(source * homes.experts + expert)];
  }
  std::int64_t total(std::int64_t expert) const {
    std::int64_t all = 0;
    for (int source = 0; source < homes.ranks; ++source) all += of(source, expert);
    return all;
  }
  std::vector<std::int64_t> load() const {
    std::vector<std::int64_t> load(index(homes.ranks));
    for (std::int64_t e = 0; e < homes.experts; ++e) load[index(homes.rank_of(e))] += total(e);
    return load;
  }
};

/// Expert at place i of a random order has a weight of (i + 1)^−skew; no expert gets more slots of
/// a source than it has tokens, as routes of different experts.
Batch skewed(std::mt19937& random, int ranks, int experts, int slots, double skew) {
  Batch batch{{experts, ranks}, slots, std::vector<std::int32_t>(index(ranks * experts))};
  std::vector<double> weights(index(experts));
  for (std::size_t i = 0; i < weights.size(); ++i) {
    weights[i] = std::pow(static_cast<double>(i + 1), -skew);
  }
  std::ranges::shuffle(weights, random);
  std::discrete_distribution<int> draw(weights.begin(), weights.end());
  constexpr int kTokens = 64, kTopk = 8;
  for (int source = 0; source < ranks; ++source) {
    std::int32_t* row = &batch.counts[index(source * experts)];
    for (int i = 0; i < kTokens * kTopk; ++i) {
      int expert = draw(random);
      while (row[expert] == kTokens) expert = (expert + 1) % experts;
      ++row[expert];
    }
  }
  return batch;
}

/// Everything that a plan promises but how good it is. Returns how many copies are not held.
int expect_valid(const BatchPlanner& planner, const Batch& batch,
                 std::span<const std::int32_t> held) {
  std::vector<std::int64_t> load = batch.load();
  std::vector<std::int32_t> away(batch.counts.size());
  int fetches = 0;
  for (int place = 0; place < batch.homes.ranks * batch.slots; ++place) {
    const int rank = place / batch.slots;
    const std::int32_t expert = planner.table()[index(place)];
    std::int64_t tokens = 0;
    for (int source = 0; source < batch.homes.ranks; ++source) {
      const std::int32_t quota = planner.quota(place, source);
      EXPECT_GE(quota, 0);
      tokens += quota;
      if (expert >= 0) away[index(source * batch.homes.experts + expert)] += quota;
    }
    EXPECT_EQ(tokens > 0, expert >= 0) << "place " << place;
    if (expert < 0) continue;
    EXPECT_NE(batch.homes.rank_of(expert), rank);
    for (int other = rank * batch.slots; other < place; ++other) {
      EXPECT_NE(planner.table()[index(other)], expert) << "twice on rank " << rank;
    }
    load[index(batch.homes.rank_of(expert))] -= tokens;
    load[index(rank)] += tokens;
    fetches += held[index(place)] != expert ? 1 : 0;
  }
  for (std::size_t i = 0; i < away.size(); ++i) EXPECT_LE(away[i], batch.counts[i]);
  EXPECT_TRUE(std::ranges::equal(load, planner.load()));
  return fetches;
}

double over_mean(std::span<const Rows> load) {
  const std::int64_t all = std::accumulate(load.begin(), load.end(), std::int64_t{0});
  return static_cast<double>(*std::ranges::max_element(load)) * static_cast<double>(load.size()) /
         static_cast<double>(all);
}

std::vector<std::int32_t> nothing(const Batch& batch) {
  return std::vector<std::int32_t>(index(batch.homes.ranks * batch.slots), -1);
}

TEST(BatchPlanner, LoadsOfSkewedBatchesAreWithinTwoPercentOfTheMean) {
  std::mt19937 random(kBatchSeed);
  for (const auto& [ranks, experts] : {std::pair{4, 64}, {8, 64}, {8, 256}, {16, 128}, {64, 384}}) {
    for (const int slots : {2, 4}) {
      for (const double skew : {0.0, 0.5, 1.0, 1.5, 2.0}) {
        const Batch batch = skewed(random, ranks, experts, slots, skew);
        BatchPlanner planner(batch_plan_shape(batch.homes, slots, 0, 0, 0));
        planner.plan(batch.counts, nothing(batch));
        const int copies = expect_valid(planner, batch, nothing(batch));
        EXPECT_LE(over_mean(planner.load()), 1.02) << ranks << " ranks, skew " << skew;
        EXPECT_LE(copies, 2 * ranks) << ranks << " ranks, skew " << skew;
      }
    }
  }
}

TEST(BatchPlanner, OneHotExpertIsSpreadOverAllRanks) {
  for (const int slots : {1, 3}) {
    Batch batch{{64, 16}, slots, std::vector<std::int32_t>(16 * 64, 0)};
    for (int source = 0; source < 16; ++source) batch.counts[index(source * 64 + 5)] = 100;
    BatchPlanner planner(batch_plan_shape(batch.homes, slots, 0, 0, 0));
    planner.plan(batch.counts, nothing(batch));
    EXPECT_EQ(expect_valid(planner, batch, nothing(batch)), 15);
    EXPECT_LE(over_mean(planner.load()), 1.02);
    // Each rank works on its own tokens.
    for (int place = 0; place < 16 * slots; ++place) {
      const int rank = place / slots;
      if (planner.table()[index(place)] < 0) continue;
      EXPECT_EQ(planner.quota(place, rank),
                std::min<std::int64_t>(100, planner.load()[index(rank)]));
    }
  }
}

TEST(BatchPlanner, CopiesThatAreHeldServeAgain) {
  std::mt19937 random(kBatchSeed);
  for (int i = 0; i < 20; ++i) {
    const Batch batch = skewed(random, 8, 64, 2, 1.5);
    BatchPlanner planner(batch_plan_shape(batch.homes, 2, 0, 0, 0));
    planner.plan(batch.counts, nothing(batch));
    const std::vector<std::int32_t> held(planner.table().begin(), planner.table().end());
    planner.plan(batch.counts, held);
    EXPECT_EQ(expect_valid(planner, batch, held), 0);
    Batch next = batch;  // some hundred slots other than before
    for (auto& count : next.counts) count += static_cast<int>(random() % 3);
    planner.plan(next.counts, nothing(next));
    const int anew = expect_valid(planner, next, nothing(next));
    planner.plan(next.counts, held);
    EXPECT_LE(expect_valid(planner, next, held), anew / 2) << "batch " << i;
    EXPECT_LE(over_mean(planner.load()), 1.02);
  }
}

TEST(BatchPlanner, NothingMovesWithoutSkewOrTokens) {
  Batch batch{{12, 4}, 2, std::vector<std::int32_t>(4 * 12, 7)};
  BatchPlanner planner(batch_plan_shape(batch.homes, 2, 0, 0, 0));
  for (const int each : {7, 0}) {
    std::ranges::fill(batch.counts, each);
    planner.plan(batch.counts, nothing(batch));
    EXPECT_TRUE(std::ranges::all_of(planner.table(), [](auto expert) { return expert < 0; }));
  }
}

/// Rank 0 of two has 30 rows too many, and one copy saves them. Held, it costs half.
TEST(BatchPlanner, CopiesAreMadeWhereTheySaveMoreThanTheyCost) {
  const Batch batch{{2, 2}, 1, {130, 70, 0, 0}};
  for (const auto& [copy_rows, held, copied] :
       {std::tuple{0, -1, true}, {29, -1, true}, {30, -1, false}, {59, 0, true}, {60, 0, false}}) {
    BatchPlanner planner(batch_plan_shape(batch.homes, 1, 0, copy_rows, 0));
    const std::vector<std::int32_t> there{-1, held};
    planner.plan(batch.counts, there);
    expect_valid(planner, batch, there);
    EXPECT_EQ(planner.table()[1], copied ? 0 : -1) << copy_rows << " rows, held " << held;
  }
}

/// Once a search between two neighbouring numbers of rows did not end.
TEST(BatchPlanner, SmallBatchesThatCannotBeBalancedHaveAPlan) {
  for (const auto& [ranks, local] : {std::pair{2, 4}, {4, 8}, {8, 4}}) {
    const int experts = ranks * local;
    BatchPlanner planner(batch_plan_shape({experts, ranks}, 1, 0, 0, 0));
    for (int rows = 1; rows < 200; rows += 7) {
      Batch batch{{experts, ranks}, 1, std::vector<std::int32_t>(index(ranks * experts))};
      for (int source = 0; source < ranks; ++source) {  // all of them to the experts of rank 0
        for (int i = 0; i < rows; ++i) ++batch.counts[index(source * experts + i % local)];
      }
      planner.plan(batch.counts, nothing(batch));
      expect_valid(planner, batch, nothing(batch));
    }
  }
}

TEST(BatchPlanner, CopiesLeaveTheirDomainOnlyIfItIsFull) {
  std::mt19937 random(kBatchSeed);
  for (int i = 0; i < 20; ++i) {
    // In each domain of four, rank 0 has too much and the others too little: all are alike.
    Batch batch = skewed(random, 4, 32, 4, 1.0);
    Batch both{{64, 8}, 4, std::vector<std::int32_t>(8 * 64)};
    for (int source = 0; source < 8; ++source) {
      for (int e = 0; e < 64; ++e) {
        both.counts[index(source * 64 + e)] = batch.counts[index(source % 4 * 32 + e % 32)];
      }
    }
    BatchPlanner planner(batch_plan_shape(both.homes, 4, 4, 0, 0));
    planner.plan(both.counts, nothing(both));
    expect_valid(planner, both, nothing(both));
    EXPECT_LE(over_mean(planner.load()), 1.02);
    for (int place = 0; place < 32; ++place) {
      const std::int32_t expert = planner.table()[index(place)];
      if (expert < 0) continue;
      EXPECT_EQ(both.homes.rank_of(expert) / 4, place / 4 / 4);
    }
  }
  // One domain has everything: copies must cross.
  Batch hot{{8, 4}, 2, std::vector<std::int32_t>(4 * 8)};
  for (int source = 0; source < 4; ++source) hot.counts[index(source * 8)] = 100;
  BatchPlanner planner(batch_plan_shape(hot.homes, 2, 2, 0, 0));
  planner.plan(hot.counts, nothing(hot));
  EXPECT_EQ(expect_valid(planner, hot, nothing(hot)), 3);
  EXPECT_LE(over_mean(planner.load()), 1.02);
}

/// A GPU plans by warps: what they find is what one thread finds.
TEST(BatchPlanner, AnyTeamMakesTheSamePlan) {
  std::mt19937 random(kBatchSeed);
  for (int i = 0; i < 400; ++i) {
    const TestBatch batch = test_batch(random);
    const BatchPlanShape& shape = batch.shape;
    BatchPlanner planner(shape);
    planner.plan(batch.counts, batch.held);
    const TestTeam team(1 + i % 20, i % 2 == 0);
    const BatchPlanLayout layout = make_batch_plan_layout(shape, TestTeam::kWarps, team.drafters());
    std::vector<std::byte> memory(layout.bytes, std::byte{0xa5});
    BatchPlan plan = planner.planned();
    for (auto* each : {&plan.table, &plan.load, &plan.quota}) std::ranges::fill(*each, -7);
    const BatchPlanJob job{.counts = batch.counts.data(),
                           .stride = shape.experts,
                           .held = batch.held.data(),
                           .memory = memory.data(),
                           .table = plan.table.data(),
                           .load = plan.load.data(),
                           .quota = plan.quota.data()};
    BatchPlanning(team, shape, layout, job).run();
    ASSERT_EQ(plan.table, planner.planned().table) << "case " << i;
    ASSERT_EQ(plan.load, planner.planned().load) << "case " << i;
    ASSERT_EQ(plan.quota, planner.planned().quota) << "case " << i;
  }
}

}  // namespace
}  // namespace ferry

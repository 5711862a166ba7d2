// Plans from counts between pairs are those from all counts; counts that cannot be are seen.
#include "core/pair_counts.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "core/test_crossings.hpp"

namespace ferry::test {
namespace {

constexpr unsigned kPairSeed = 20261124;

std::vector<PairCounts> all_of(const World& world) {
  std::vector<PairCounts> all;
  for (int r = 0; r < world.placement.ranks; ++r) {
    all.emplace_back(
        count_routes(world.routes[index(r)], world.tokens(r), world.topk, world.placement),
        world.placement, world.domains, r);
  }
  return all;
}

std::vector<std::byte> message(const World& world, const PairCounts& from, PairCounts::Step step,
                               int peer) {
  std::vector<std::byte> bytes(PairCounts::message_bytes(world.placement, world.domains));
  EXPECT_LE(from.write(step, peer, bytes.data()), bytes.size());
  return bytes;
}

void take_step(const World& world, std::vector<PairCounts>& all, PairCounts::Step step) {
  for (int target = 0; target < world.placement.ranks; ++target) {
    for (int source = 0; source < world.placement.ranks; ++source) {
      const auto bytes = message(world, all[index(source)], step, target);
      ASSERT_TRUE(all[index(target)].read(step, source, bytes.data())) << source << target;
    }
  }
}

TEST(PairCounts, MakeThePlansThatAllCountsMake) {
  std::mt19937 random(kPairSeed);
  for (int round = 0; round < 200; ++round) {
    SCOPED_TRACE("kPairSeed, round " + std::to_string(round));
    const World world = any_world(random);
    std::vector<PairCounts> all = all_of(world);
    for (const PairCounts::Step step : PairCounts::kSteps) take_step(world, all, step);
    for (int r = 0; r < world.placement.ranks && !::testing::Test::HasFailure(); ++r) {
      const ExchangePlan& plan = world.plans[index(r)];
      const ExchangePlan got = all[index(r)].take_plan();
      EXPECT_EQ(got.expert_slots, plan.expert_slots);
      EXPECT_EQ(got.send_tokens, plan.send_tokens);
      EXPECT_EQ(got.send_offset, plan.send_offset);
      EXPECT_EQ(got.recv_offset, plan.recv_offset);
      EXPECT_EQ(got.peer_row, plan.peer_row);
      EXPECT_EQ(got.peer_recv_rows, plan.peer_recv_rows);
      EXPECT_EQ(got.peer_sent_before, plan.peer_sent_before);
      EXPECT_EQ(got.peer_sent_rows, plan.peer_sent_rows);
      EXPECT_EQ(got.destination_offset, plan.destination_offset);
      const CrossingPlan& crossing = world.crossings[index(r)];
      const CrossingPlan crossed = all[index(r)].take_crossing(Crossing::automatic);
      EXPECT_EQ(crossed.tokens, crossing.tokens);
      EXPECT_EQ(crossed.offset, crossing.offset);
      EXPECT_EQ(crossed.feeders, crossing.feeders);
      EXPECT_EQ(crossed.feeder_row, crossing.feeder_row);
      EXPECT_EQ(crossed.feeder_tokens, crossing.feeder_tokens);
      EXPECT_EQ(crossed.feeder_first, crossing.feeder_first);
      EXPECT_EQ(crossed.feeder_sum_row, crossing.feeder_sum_row);
      EXPECT_EQ(crossed.feeder_sums, crossing.feeder_sums);
      EXPECT_EQ(crossed.staging_rows, crossing.staging_rows);
      EXPECT_EQ(crossed.chosen, crossing.chosen);
      for (int d = 0; d < world.domains.count(); ++d) {
        if (d == world.domains.of(r)) continue;
        EXPECT_EQ(crossed.rail_row[index(d)], crossing.rail_row[index(d)]);
      }
    }
  }
}

/// Whether rank 2 takes the message of rank 0, with one field replaced.
template <class Value>
bool takes(PairCounts::Step step, std::size_t at, Value value) {
  const World world = small_world();
  std::vector<PairCounts> all = all_of(world);
  for (const PairCounts::Step before : PairCounts::kSteps) {
    if (before == step) break;
    take_step(world, all, before);
  }
  auto bytes = message(world, all[0], step, 2);
  std::memcpy(bytes.data() + at, &value, sizeof(value));
  return all[2].read(step, 0, bytes.data());
}

TEST(PairCounts, SeeWhatCannotBe) {
  using Step = PairCounts::Step;
  using Head = PairCountsHead;
  const auto counts = [](std::size_t at, auto value) { return takes(Step::counts, at, value); };
  EXPECT_TRUE(counts(offsetof(Head, tokens), std::int32_t{1}));
  EXPECT_FALSE(counts(offsetof(Head, tokens), std::int32_t{2}));  // one slot
  EXPECT_FALSE(counts(offsetof(Head, tokens), std::int32_t{-1}));
  EXPECT_FALSE(counts(offsetof(Head, sent_before), std::int64_t{-1}));
  EXPECT_FALSE(counts(offsetof(Head, sent_rows), std::int64_t{0}));
  EXPECT_FALSE(counts(offsetof(Head, sum_row), std::int64_t{-1}));
  EXPECT_FALSE(counts(offsetof(Head, sums), std::int64_t{1}));
  EXPECT_TRUE(counts(offsetof(Head, crossing), std::int32_t{2}));
  EXPECT_FALSE(counts(offsetof(Head, crossing), std::int32_t{1}));  // two tokens for rank 3
  EXPECT_FALSE(counts(offsetof(Head, crossing), std::int32_t{4}));
  EXPECT_FALSE(counts(sizeof(Head), std::int32_t{-1}));      // slots of expert 2
  EXPECT_FALSE(counts(sizeof(Head), std::int32_t{65}));      // more than 64 a token
  EXPECT_FALSE(counts(sizeof(Head) + 4, std::int32_t{0}));   // tokens for rank 2, as said above
  EXPECT_FALSE(counts(sizeof(Head) + 8, std::int32_t{-1}));  // for rank 3
  const auto places = [](std::size_t at, auto value) { return takes(Step::places, at, value); };
  EXPECT_TRUE(places(offsetof(PairPlaces, first_row), std::int64_t{0}));
  EXPECT_FALSE(places(offsetof(PairPlaces, first_row), std::int64_t{-1}));
  EXPECT_FALSE(places(offsetof(PairPlaces, recv_rows), std::int64_t{-1}));
  EXPECT_FALSE(places(offsetof(PairPlaces, staging_row), std::int64_t{9}));
  EXPECT_FALSE(places(offsetof(PairPlaces, cost), -1.0));
  const auto rails = [](std::size_t at, auto value) { return takes(Step::rails, at, value); };
  EXPECT_TRUE(rails(4, std::int32_t{0}));
  EXPECT_FALSE(rails(4, std::int32_t{1}));  // rank 3 receives two rows
  EXPECT_FALSE(rails(4, std::int32_t{-1}));
  EXPECT_FALSE(rails(0, std::int32_t{1}));  // rank 2 knows better
}

}  // namespace
}  // namespace ferry::test

// Latency mode with masks: a rank is killed, or stopped for a while, and the others go on. The long
// version is mask_trials.cpp.
#include <gtest/gtest.h>

#include "decode_load.hpp"
#include "engine/test_network.hpp"
#include "masked_load.hpp"

namespace ferry::test {
namespace {

using namespace std::chrono_literals;

TEST(Masks, SurvivorsGoOnWithoutAKilledRank) {
  // The end of the process tells, not the deadline.
  MaskedJob job(std::chrono::seconds(20));
  const MaskFault fault = job.kill(0);
  EXPECT_EQ(job.end(), "");
  ASSERT_EQ(fault.mask_ms.size(), 3u);
  for (const double ms : fault.mask_ms) EXPECT_LT(ms, 10'000);
  EXPECT_GT(fault.rounds_masked, 0);
  EXPECT_EQ(shared_memory_names(), std::vector<std::string>{});
}

TEST(Masks, AStoppedRankComesBack) {
  MaskedJob job(std::chrono::milliseconds(1500));
  const MaskFault fault = job.stop({2}, 2.0);
  ASSERT_EQ(fault.mask_ms.size(), 3u);
  for (const double ms : fault.mask_ms) EXPECT_GT(ms, 750);
  EXPECT_GT(fault.rounds_masked, 0);
  EXPECT_GT(fault.rounds_after, 0);
  EXPECT_EQ(job.end(), "");
  EXPECT_EQ(shared_memory_names(), std::vector<std::string>{});
}

/// Each holds up other ranks than the other one, for they stop while they send.
TEST(Masks, StoppedRanksOfTwoDomainsComeBack) {
  MaskedJob job(std::chrono::milliseconds(1500), 2);
  const MaskFault fault = job.stop({0, 2}, 2.0);
  EXPECT_EQ(fault.mask_ms.size(), 2u);
  EXPECT_GT(fault.rounds_after, 0);
  EXPECT_EQ(job.end(), "");
  EXPECT_EQ(shared_memory_names(), std::vector<std::string>{});
}

/// The long version is decode_trials.cpp.
TEST(Masks, DecodeWithTwoCopiesOfEachExpertWhileRanksDieAndJoin) {
  DecodeJob job(6, {});
  const DecodeCounts counts = job.run(1000);
  EXPECT_EQ(job.wrong(), "");
  EXPECT_GE(counts.rounds, 1000);
  EXPECT_GT(counts.kills, 1);
  EXPECT_GT(counts.joins, 1);
}

/// In domains of two, of which a whole one may die.
TEST(Masks, DecodeInSeveralDomainsWhileRanksDieAndJoin) {
  if (!engine::test::has_network()) GTEST_SKIP() << "no libfabric on this machine";
  DecodeJob job(8, {.ranks = 6, .domain_size = 2, .pause = 100ms});
  const DecodeCounts counts = job.run(150);
  EXPECT_EQ(job.wrong(), "");
  EXPECT_GE(counts.rounds, 150);
  EXPECT_GT(counts.kills, 1);
  EXPECT_GT(counts.joins, 1);
}

TEST(Masks, DecodeInSeveralDomainsGoesOnInTheSameExchangeWhenRanksDie) {
  if (!engine::test::has_network()) GTEST_SKIP() << "no libfabric on this machine";
  DecodeJob job(9, {.joins = false, .ranks = 6, .domain_size = 3, .pause = 100ms});
  const DecodeCounts counts = job.run(100);
  EXPECT_EQ(job.wrong(), "");
  EXPECT_EQ(counts.kills, 2);
}

TEST(Masks, DecodeGoesOnInTheSameExchangeWhenRanksDie) {
  DecodeJob job(7, {.joins = false});
  const DecodeCounts counts = job.run(300);
  EXPECT_EQ(job.wrong(), "");
  EXPECT_GE(counts.rounds, 300);
  EXPECT_EQ(counts.kills, 2);
}

}  // namespace
}  // namespace ferry::test

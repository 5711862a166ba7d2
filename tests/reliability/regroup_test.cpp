// Throughput mode goes on in the same group when ranks are killed or stopped, at every stage of a
// step, rank 0 and several at once too. elastic_trials does the same many times.
#include <gtest/gtest.h>

#include <csignal>
#include <thread>

#include "elastic_load.hpp"
#include "engine/test_network.hpp"

namespace ferry::test {
namespace {

using namespace std::chrono_literals;

TEST(Regroup, RanksAreKilledAtEveryStageOneAfterAnother) {
  ElasticJob job(8, 30s);
  int victim = 0;
  for (const Stage stage :
       {Stage::anywhere, Stage::plan, Stage::dispatch, Stage::combine, Stage::after}) {
    job.lose({victim}, stage, SIGKILL);
    ASSERT_EQ(job.wrong(), "") << name_of(stage);
    ++victim;
  }
  EXPECT_EQ(job.alive().size(), 3u);
}

TEST(Regroup, SeveralAreKilledAtOnce) {
  ElasticJob job(8, 30s);
  job.lose({0, 5, 6}, Stage::anywhere, SIGKILL);
  ASSERT_EQ(job.wrong(), "");
  job.lose({2, 1, 3}, Stage::regroup, SIGKILL);
  ASSERT_EQ(job.wrong(), "");
  job.lose({7}, Stage::anywhere, SIGKILL);  // one of two
  ASSERT_EQ(job.wrong(), "");
}

TEST(Regroup, AStoppedRankIsEvictedAndComesBackLate) {
  for (const Stage stage : {Stage::anywhere, Stage::dispatch, Stage::combine, Stage::after}) {
    ElasticJob job(5, 1500ms);
    job.lose({1, 4}, stage, SIGSTOP);
    ASSERT_EQ(job.wrong(), "") << name_of(stage);
    job.resume({1, 4});
    ASSERT_EQ(job.wrong(), "") << name_of(stage);
  }
  // What a job leaves of which no rank survived goes when the user's next group is made.
  GroupConfig config;
  config.experts = 1;
  config.fabric = FabricKind::shm;
  const Group next(thread_bootstrap(1).front(), config);
  EXPECT_EQ(shared_memory_names(), std::vector<std::string>{});
}

/// Domains of two: a rail with a hole, a domain whose last rank dies, a stopped rank.
TEST(Regroup, RanksOfSeveralDomainsAreKilledAndStopped) {
  if (!engine::test::has_network()) GTEST_SKIP() << "no libfabric on this machine";
  {
    ElasticJob job(8, 30s, 2);
    job.lose({0}, Stage::combine, SIGKILL);
    ASSERT_EQ(job.wrong(), "");
    job.lose({1}, Stage::dispatch, SIGKILL);
    ASSERT_EQ(job.wrong(), "");
    job.lose({3, 4}, Stage::regroup, SIGKILL);
    ASSERT_EQ(job.wrong(), "");
  }
  ElasticJob job(5, 1500ms, 2);
  job.lose({4}, Stage::dispatch, SIGSTOP);
  ASSERT_EQ(job.wrong(), "");
  job.resume({4});
  ASSERT_EQ(job.wrong(), "");
}

/// Other domains miss it after a second; the rank of its own, which leads, waits no longer.
TEST(Regroup, NobodyWaitsForAStoppedRankOfTheDomainThatLeads) {
  if (!engine::test::has_network()) GTEST_SKIP() << "no libfabric on this machine";
  for (const int victim : {0, 1}) {
    ElasticJob job(6, 120s, 2);  // longer than the job waits for a new epoch
    job.lose({5}, Stage::dispatch, SIGKILL);
    ASSERT_EQ(job.wrong(), "");
    job.lose({victim}, Stage::plan, SIGSTOP);
    ASSERT_EQ(job.wrong(), "") << "rank " << victim;
    job.resume({victim});
    ASSERT_EQ(job.wrong(), "") << "rank " << victim;
  }
}

/// Processes take the seats of ranks that were killed, set after set; then joiners for one seat are
/// killed so long after they began, and at last a rank beside a joiner.
struct Replacements {
  std::vector<std::vector<int>> seats{};
  int joiner = 0;
  std::vector<std::chrono::microseconds> killed_after{};
  int beside = 0;
};

void replace(ElasticJob& job, std::size_t ranks, const Replacements& all) {
  for (const std::vector<int>& seats : all.seats) {
    // Before dispatch the others hold memory for its rows.
    job.lose(seats, seats.size() == 1 ? Stage::dispatch : Stage::anywhere, SIGKILL);
    ASSERT_EQ(job.wrong(), "");
    job.join(seats);
    ASSERT_EQ(job.wrong(), "");
  }
  job.lose({all.joiner}, Stage::dispatch, SIGKILL);
  for (const auto after : all.killed_after) {
    job.lose_joiner(all.joiner, after);
    ASSERT_EQ(job.wrong(), "") << after.count();
  }
  job.lose_beside_joiner(all.joiner, all.beside, 10ms);
  ASSERT_EQ(job.wrong(), "");
  job.join({all.beside});
  ASSERT_EQ(job.wrong(), "");
  EXPECT_EQ(job.alive().size(), ranks);
}

TEST(Regroup, ProcessesTakeThePlacesOfRanksThatWereKilled) {
  ElasticJob job(5, 30s);
  replace(job, 5, {{{0}, {4}, {0, 2}}, 1, {0us, 3000us, 8000us, 15'000us, 30'000us}, 3});
}

/// Domains of two. One that is left may have joined, and two are killed of which nobody is.
TEST(Regroup, ProcessesTakeThePlacesOfRanksOfSeveralDomains) {
  if (!engine::test::has_network()) GTEST_SKIP() << "no libfabric on this machine";
  ElasticJob job(6, 30s, 2);
  replace(job, 6,
          {{{0}, {1}, {5}, {1, 2, 4}, {2, 3}, {0, 1}}, 3, {0us, 8000us, 20'000us, 40'000us}, 0});
}

}  // namespace
}  // namespace ferry::test

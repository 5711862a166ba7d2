// Latency exchanges in groups that regroup and that processes join. Ranks are threads, over shm;
// deaths of processes are in tests/reliability.
#include <algorithm>
#include <latch>
#include <memory>
#include <optional>
#include <string>

#include "engine/test_network.hpp"
#include "host/latency/test_masked_load.hpp"
#include "host/throughput/test_joins.hpp"
#include "platform/process.hpp"

namespace ferry::host::test {
namespace {

GroupConfig four(std::chrono::nanoseconds deadline = 20s) {
  GroupConfig config;
  config.experts = 2 * kRanks;
  config.memory_bytes = 1 << 16;
  config.deadline = deadline;
  config.fabric = FabricKind::shm;
  return config;
}
GroupConfig replaceable(const std::string& name) {
  GroupConfig config = four();
  config.elastic = name + std::to_string(process_id());
  return config;
}

/// Though nothing has failed: the barrier of a rank may hear of another one's regroup.
GroupView regroup_together(Group& group) {
  try {
    group.barrier();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::peer_failed) throw;
  }
  return group.regroup();
}

void rounds(Load& load, int first, int count, const std::vector<int>& absent = {}) {
  for (int round = first; round < first + count; ++round) load.round(round, absent);
}

TEST(LatencyRegroup, AnExchangeGoesOnWithTheRanksOfTheView) {
  with_groups(kRanks, four(), [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    rounds(load, 1, 3);
    group.barrier();
    if (group.rank() == 3) return group.destroy();
    wait_for_a_loss(group);
    const MemoryStats before = group.memory();
    EXPECT_EQ(group.regroup().lost, std::vector<int>{3});
    EXPECT_EQ(latency.masked(), only(3));
    rounds(load, 4, 3, {3});
    EXPECT_EQ(group.memory().latency_bytes, before.latency_bytes);
    latency.clear_masks();  // of ranks that are there
    EXPECT_EQ(latency.masked(), only(3));
    latency.set_mask(3, true);
    expect_error(ErrorKind::invalid_argument, {"set_mask", "rank", "3, which was lost"},
                 [&] { latency.set_mask(3, false); });
    latency.rejoin();  // of those that are left
    rounds(load, 7, 3, {3});
    group.barrier();
  });
}

/// Rank 1 was masked by all, and was told: it is back and exact without a rejoin.
TEST(LatencyRegroup, MaskedRanksOfTheViewAreBack) {
  std::latch masked(kRanks), gone_on(kRanks);
  with_groups(kRanks, four(), [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    rounds(load, 1, 2);
    group.barrier();
    if (group.rank() != 1) {
      latency.set_mask(1, true);
      masked.arrive_and_wait();
      rounds(load, 3, 5, {1});
    } else {
      masked.arrive_and_wait();
      expect_error(ErrorKind::evicted, {"evicted", "or regroup"}, [&] { load.round(3, {}); });
    }
    gone_on.arrive_and_wait();
    EXPECT_EQ(group.regroup().lost, std::vector<int>{});
    EXPECT_EQ(latency.masked(), std::vector<bool>(kRanks, false));
    rounds(load, 10, 5);
    group.barrier();
  });
}

TEST(LatencyRegroup, ResultsOfBeforeAreReadAndNoMore) {
  with_groups(kRanks, four(), [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    std::optional<LatencyReceived> old = latency.dispatch(load.x(1), load.ids());
    std::optional<LatencyReceived> never = latency.dispatch(load.x(2), load.ids(), {.hook = true});
    regroup_together(group);
    load.expect_received(*old, 1, {});
    expect_error(ErrorKind::evicted, {"before the last rejoin or regroup"},
                 [&] { load.combine(*old); });
    expect_error(ErrorKind::evicted, {"before the last rejoin or regroup"},
                 [&] { never->receive(); });
    never.reset();
    old.reset();  // the next dispatch may need either buffer
    rounds(load, 4, 5);
    group.barrier();
  });
}

/// Ranks used it so often as others did not, when those masked them.
TEST(LatencyRegroup, AllGoOnFromOneGeneration) {
  std::latch done(kRanks);
  with_groups(kRanks, four(), [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    const int mine = group.rank() / 2;  // two and two go apart
    for (int peer = 0; peer < kRanks; ++peer) {
      if (peer / 2 != mine) latency.set_mask(peer, true);
    }
    group.barrier();
    const std::vector<int> others = mine == 0 ? std::vector<int>{2, 3} : std::vector<int>{0, 1};
    rounds(load, 1, mine == 0 ? 3 : 40, others);
    done.arrive_and_wait();
    group.regroup();
    rounds(load, 50, 5);
    group.barrier();
  });
}

/// It would wait a deadline for it, and mask it.
TEST(LatencyRegroup, ACallHearsThatAnotherRankRegroups) {
  with_groups(kRanks, four(60s), [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    rounds(load, 1, 2);
    if (group.rank() > 0) {
      expect_error(ErrorKind::peer_failed, {"called regroup; call it on this rank, too"}, [&] {
        for (;;) (void)latency.dispatch(load.x(3), load.ids());
      });
      EXPECT_EQ(*latency.mask_count(), 0u);
    }
    EXPECT_EQ(group.regroup().ranks, (std::vector<int>{0, 1, 2, 3}));
    rounds(load, 4, 3);
    group.barrier();
  });
}

TEST(LatencyRegroup, WithoutMasksItGoesOnAsLongAsAllAreThere) {
  with_groups(kRanks, four(), [&](Group& group) {
    LatencyConfig config = masked_config();
    config.masks = false;
    LatencyExchange latency(group, config);
    Load load(group, latency);
    rounds(load, 1, 3);
    regroup_together(group);
    rounds(load, 4, 3);
    group.barrier();
    if (group.rank() == 2) return group.destroy();
    wait_for_a_loss(group);
    group.regroup();
    expect_error(ErrorKind::invalid_argument,
                 {"latency dispatch", "without masks", "epoch 1", "rank 2", "made anew"},
                 [&] { load.round(7, {}); });
    expect_error(ErrorKind::invalid_argument, {"LatencyExchange", "masks", "without rank 2"},
                 [&] { LatencyExchange(group, config); });
    group.barrier();
  });
}

TEST(LatencyRegroup, OneIsMadeWithoutLostRanks) {
  with_groups(kRanks, four(), [&](Group& group) {
    group.barrier();
    if (group.rank() == 0) return group.destroy();
    wait_for_a_loss(group);
    group.regroup();
    LatencyExchange latency(group, masked_config());
    EXPECT_EQ(latency.masked(), only(0));
    EXPECT_EQ(*latency.mask_count(), 0u);
    Load load(group, latency);
    rounds(load, 1, 5, {0});
    group.barrier();
  });
}

/// Of memory that all ranks have dropped, but not of what one has not.
TEST(LatencyRegroup, OneThatIsMadeAnewTakesUpTheMemory) {
  with_groups(kRanks, four(), [&](Group& group) {
    std::optional<LatencyExchange> latency(std::in_place, group, masked_config());
    const std::size_t bytes = group.memory().latency_bytes;
    for (int i = 0; i < 300; ++i) {  // more than a rank can have segments
      rounds(*std::make_unique<Load>(group, *latency), 1, 2);
      latency.reset();
      latency.emplace(group, masked_config());
      EXPECT_EQ(group.memory().latency_bytes, bytes);
    }
    std::optional<LatencyExchange> kept;
    if (group.rank() == 1) {
      kept = std::move(latency);
    }
    latency.reset();
    latency.emplace(group, masked_config());
    EXPECT_EQ(group.memory().latency_bytes, 2 * bytes);
    Load load(group, *latency);
    rounds(load, 1, 2);
    group.barrier();
  });
}

/// A process that joins has no part in an older exchange: its place stays masked there.
TEST(LatencyRegroup, AProcessThatJoinsIsInTheNextExchange) {
  std::latch left(kRanks + 1);
  const GroupConfig config = replaceable("latency");
  const auto bootstraps = thread_bootstrap(kRanks);
  on_ranks(kRanks + 1, [&](int thread) {
    std::optional<Group> group;
    std::optional<LatencyExchange> old;
    if (thread < kRanks) {
      group.emplace(bootstraps[static_cast<std::size_t>(thread)], config);
      for (int i = 0; i < 3; ++i) {  // numbers that the joiner does not know
        old.reset();
        old.emplace(*group, masked_config());
      }
      Load load(*group, *old);
      rounds(load, 1, 3);
      group->barrier();
      if (thread == 2) {
        group->destroy();
        left.arrive_and_wait();
        return;
      }
      wait_for_a_loss(*group);
      group->regroup();
      left.arrive_and_wait();
      commit_until_one_waits(*group, 1);
      EXPECT_EQ(group->regroup().joined, std::vector<int>{2});
      EXPECT_EQ(old->masked(), only(2));
      rounds(load, 4, 3, {2});
      old->rejoin();
      rounds(load, 7, 3, {2});
    } else {
      left.arrive_and_wait();
      group.emplace(join(2, kRanks, config));
    }
    LatencyExchange latency(*group, masked_config());
    EXPECT_EQ(latency.masked(), std::vector<bool>(kRanks, false));
    Load load(*group, latency);
    rounds(load, 1, 5);
    if (old) {
      Load again(*group, *old);
      rounds(again, 10, 3, {2});
    }
    rounds(load, 6, 5);
    group->barrier();
  });
}

TEST(LatencyRegroup, AGroupThatOneBeganHasExchanges) {
  const GroupConfig config = replaceable("begun");
  std::latch begun(3);
  on_ranks(3, [&](int thread) {
    std::optional<Group> group;
    if (thread == 2) {
      group.emplace(begin(2, kRanks, config));
      LatencyExchange alone(*group, masked_config());
      Load load(*group, alone);
      rounds(load, 1, 3, {0, 1, 3});
    }
    begun.arrive_and_wait();
    if (thread != 2) group.emplace(join(thread, kRanks, config));
    while (group->view().ranks.size() < 3) {
      if (group->commit(group->view().step + 1)) group->regroup();
    }
    LatencyExchange latency(*group, masked_config());
    Load load(*group, latency);
    rounds(load, 1, 5, {3});
    group->barrier();
  });
}

class LatencyRegroupDomains : public testing::TestWithParam<int> {};

/// With endpoints of their own, too: what is under way there is fenced as the group's.
TEST_P(LatencyRegroupDomains, AnExchangeGoesOn) {
  if (!has_network()) GTEST_SKIP() << "no libfabric on this machine";
  GroupConfig config = domains_of(2);
  config.experts = 2 * kRanks;
  config.ofi.endpoints = GetParam();
  with_groups(kRanks, config, [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    rounds(load, 1, 5);
    regroup_together(group);
    rounds(load, 10, 5);
    (void)latency.dispatch(load.x(15), load.ids(), {.hook = true});  // what nobody receives
    barrier_before_some_leave(group);
    if (group.rank() == 3) return group.destroy();
    EXPECT_EQ(regroup_to(group, {0, 1, 2}).lost, std::vector<int>{3});
    rounds(load, 20, 5, {3});
    LatencyExchange next(group, masked_config());
    Load anew(group, next);
    rounds(anew, 1, 5, {3});
    rounds(load, 30, 5, {3});
    group.barrier();
  });
}

/// Such a call swaps nothing, so the last call that a rank names says nothing of it.
TEST(LatencyRegroup, ACallWithoutMasksHearsThatAnotherRankRegroups) {
  with_groups(kRanks, four(60s), [&](Group& group) {
    LatencyConfig config = masked_config();
    config.masks = false;
    LatencyExchange latency(group, config);
    Load load(group, latency);
    rounds(load, 1, 2);
    const auto start = Clock::now();
    if (group.rank() > 0) {
      expect_error(ErrorKind::peer_failed, {"rank 0 called regroup"}, [&] {
        for (;;) (void)latency.dispatch(load.x(3), load.ids());
      });
    }
    EXPECT_EQ(group.regroup().ranks, (std::vector<int>{0, 1, 2, 3}));
    EXPECT_LT(Clock::now() - start, 10s);
    group.barrier();
  });
}

/// Of ranks of another domain, too, that have told of a loss before.
TEST_P(LatencyRegroupDomains, ACallHearsThatRanksRegroupAfterALoss) {
  if (!has_network()) GTEST_SKIP() << "no libfabric on this machine";
  GroupConfig config = domains_of(2);
  config.experts = 2 * kRanks;
  config.ofi.endpoints = GetParam();
  with_groups(kRanks, config, [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    rounds(load, 1, 2);
    barrier_before_some_leave(group);
    if (group.rank() == 3) return group.destroy();
    if (group.rank() == 2) {
      expect_error(ErrorKind::peer_failed, {"called regroup; call it on this rank, too"}, [&] {
        for (;;) (void)latency.dispatch(load.x(3), load.ids());
      });
      EXPECT_LE(*latency.mask_count(), 1u);
    }
    EXPECT_EQ(regroup_to(group, {0, 1, 2}).lost, std::vector<int>{3});
    rounds(load, 4, 3, {3});
    group.barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(Endpoints, LatencyRegroupDomains, testing::Values(1, 2));

}  // namespace
}  // namespace ferry::host::test

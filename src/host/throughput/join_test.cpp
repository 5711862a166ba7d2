// Processes take the places of ranks that are lost. Ranks are threads, over shm; deaths of
// processes are in tests/reliability.
#include <atomic>
#include <cstdlib>
#include <latch>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "host/throughput/test_joins.hpp"
#include "platform/process.hpp"

namespace ferry::host::test {

using namespace engine::test;
namespace {

GroupConfig replaceable(const std::string& name, std::chrono::nanoseconds deadline = 20s) {
  GroupConfig config;
  config.experts = 12;
  config.memory_bytes = 1 << 16;
  config.deadline = deadline;
  config.fabric = FabricKind::shm;
  config.elastic = name + std::to_string(process_id());
  return config;
}

TEST(Join, OneBeginsAndTheOthersCome) {
  GroupConfig config = replaceable("begins");
  config.experts = 20;
  std::latch begun(4), three(4);
  on_ranks(4, [&](int thread) {
    const auto grow_to = [](Group& group, std::size_t ranks) {
      while (group.view().ranks.size() < ranks) {
        if (!group.commit(group.view().step + 1)) continue;
        group.regroup();
      }
      exchange_among(group, group.view().ranks);
    };
    std::optional<Group> group;
    if (thread == 2) {
      group.emplace(begin(2, 5, config));
      EXPECT_EQ(group->view(), (GroupView{2, {2}, {0, 1, 3, 4}, 0, {}}));
      exchange_among(*group, {2});
      group->commit(1);
      expect_error(ErrorKind::invalid_argument, {"plan", "expert", "rank 0", "epoch 2"},
                   [&] { exchange_among(*group, {0}, 1); });
      expect_error(ErrorKind::refused, {"rank 4", "begin", "is in one"},
                   [&] { begin(4, 5, config); });
    }
    begun.arrive_and_wait();
    if (thread == 3) three.arrive_and_wait();
    if (thread != 2) group.emplace(join(thread, 5, config));
    if (thread != 3) {
      grow_to(*group, 3);
      EXPECT_EQ(group->view().ranks, (std::vector<int>{0, 1, 2}));
      three.arrive_and_wait();
    }
    grow_to(*group, 4);
    EXPECT_EQ(group->view().lost, std::vector<int>{4});
    // Who has begun is a rank as the others are.
    barrier_before_some_leave(*group);
    if (thread == 2) return group->destroy();
    wait_for_a_loss(*group);
    EXPECT_EQ(group->regroup().ranks, (std::vector<int>{0, 1, 3}));
    exchange_among(*group, {0, 1, 3});
    group->barrier();
  });
}

/// Nobody waits for anybody between the calls, and two join meanwhile.
TEST(Join, RegroupsInARowHaveOneEpochEach) {
  constexpr int kRanks = 3, kCalls = 20;
  const GroupConfig config = replaceable("in_a_row");
  std::vector<std::vector<GroupView>> seen(kRanks);
  std::latch begun(kRanks);
  on_ranks(kRanks, [&](int rank) {
    std::mt19937 random(kSeed + static_cast<unsigned>(rank));
    GroupConfig mine = config;
    mine.on_wait = [&] { std::this_thread::sleep_for(random() % 4 * 500us); };
    std::optional<Group> group;
    if (rank == 0) group.emplace(begin(rank, kRanks, mine));
    begun.arrive_and_wait();
    if (rank != 0) group.emplace(join(rank, kRanks, mine));
    std::vector<GroupView>& views = seen[static_cast<std::size_t>(rank)];
    views.push_back(group->view());
    for (int left = kCalls; left > 0;) {
      if (left < kCalls || views.back().ranks.size() == kRanks) --left;
      std::this_thread::sleep_for(random() % 4 * 500us);
      views.push_back(group->regroup());
    }
    group->barrier();
  });
  for (const auto& views : seen) {
    for (std::size_t back = 1; back <= views.size(); ++back) {
      const GroupView &here = *(views.end() - static_cast<std::ptrdiff_t>(back)),
                      &there = *(seen[0].end() - static_cast<std::ptrdiff_t>(back));
      EXPECT_EQ(here.epoch, there.epoch) << back << " before the last, seed " << kSeed;
      EXPECT_EQ(here.ranks, there.ranks);
    }
  }
}

TEST(Join, NoGroupOfAllRanksBesideOneThatWasBegun) {
  const GroupConfig config = replaceable("beside");
  const Group begun = begin(2, 3, config);
  const auto bootstraps = thread_bootstrap(3);
  on_ranks(3, [&](int rank) {
    const std::string why = rank == 2 ? "not free" : "which one process began alone; join that";
    expect_error(ErrorKind::refused, {"rank " + std::to_string(rank), why},
                 [&] { Group(bootstraps[static_cast<std::size_t>(rank)], config); });
  });
  EXPECT_EQ(begun.view().ranks, std::vector<int>{2});
}

TEST(Join, NobodyBeginsAloneElsewhere) {
  GroupConfig config = replaceable("begins_elsewhere");
  config.domain_size = 1;
  config.network = FabricKind::sim;
  expect_error(ErrorKind::unsupported, {"3 domains", "network sim"}, [&] { begin(0, 3, config); });
  config.elastic.clear();
  expect_error(ErrorKind::invalid_argument, {"elastic", "begins or joins"},
               [&] { begin(0, 3, config); });
}

TEST(Join, AProcessTakesThePlaceOfARankThatLeft) {
  std::latch left(4);
  const GroupConfig config = replaceable("one");
  const auto bootstraps = thread_bootstrap(3);
  on_ranks(4, [&](int thread) {
    if (thread == 3) {
      left.arrive_and_wait();
      Group group = join(1, 3, config);
      const GroupView view = group.view();
      EXPECT_EQ(view.ranks, (std::vector<int>{0, 1, 2}));
      EXPECT_EQ(view.joined, (std::vector<int>{1}));
      EXPECT_EQ(view.epoch, 3u);
      exchange_among(group, {0, 1, 2});
      group.commit(view.step + 1);
      EXPECT_EQ(group.view().joined, (std::vector<int>{}));
      exchange_among(group, {0, 1, 2});
      group.barrier();
      return;
    }
    Group group(bootstraps[static_cast<std::size_t>(thread)], config);
    exchange_among(group, {0, 1, 2});
    EXPECT_FALSE(group.commit(1));
    if (thread == 1) {
      group.destroy();
      left.arrive_and_wait();
      return;
    }
    wait_for_a_loss(group);
    EXPECT_EQ(group.regroup(), (GroupView{2, {0, 2}, {1}, 1, {}}));
    exchange_among(group, {0, 2});
    left.arrive_and_wait();
    const std::uint64_t step = commit_until_one_waits(group, 2);
    EXPECT_EQ(group.regroup(), (GroupView{3, {0, 1, 2}, {}, step, {1}}));
    exchange_among(group, {0, 1, 2});
    EXPECT_FALSE(group.commit(step + 1));
    EXPECT_EQ(group.view(), (GroupView{3, {0, 1, 2}, {}, step + 1, {}}));
    exchange_among(group, {0, 1, 2});
    group.barrier();
  });
}

/// Ranks compare what the environment says, too.
TEST(Join, TheEnvironmentIsTheSameForAProcessThatJoins) {
  ::setenv("FERRY_TUNING", "on", 1);
  const GroupConfig config = replaceable("tuned");
  const auto bootstraps = thread_bootstrap(2);
  std::latch left(2);
  on_ranks(3, [&](int thread) {
    if (thread == 2) {
      left.wait();
      Group joined = join(1, 2, config);
      exchange_among(joined, {0, 1});
      joined.barrier();
      return;
    }
    Group group(bootstraps[static_cast<std::size_t>(thread)], config);
    group.barrier();
    left.count_down();
    if (thread == 1) return group.destroy();
    left.wait();
    wait_for_a_loss(group);
    commit_until_one_waits(group, group.regroup().step + 1);
    group.regroup();
    exchange_among(group, {0, 1});
    group.barrier();
  });
  ::unsetenv("FERRY_TUNING");
}

TEST(Join, SeveralAtOnceAndAllFoundersOneAfterAnother) {
  constexpr int kRanks = 4;
  const GroupConfig config = replaceable("all");
  const auto bootstraps = thread_bootstrap(kRanks);
  std::latch founders_left(2 * kRanks - 1), done(2 * kRanks - 1);
  // Ranks 0, 1 and 2 leave at once, and three processes join; then rank 3 leaves, and one joins.
  on_ranks(2 * kRanks - 1, [&](int thread) {
    std::optional<Group> group;
    if (thread < kRanks) {
      group.emplace(bootstraps[static_cast<std::size_t>(thread)], config);
      exchange_among(*group, {0, 1, 2, 3}, 1);
      group->barrier();
      if (thread != 3) group->destroy();
      founders_left.arrive_and_wait();
      if (thread != 3) return done.arrive_and_wait();
      for (GroupView view = group->view(); view.ranks.size() > 1;) {
        wait_for_a_loss(*group);
        view = group->regroup();
      }
    } else {
      founders_left.arrive_and_wait();
      group.emplace(join(thread - kRanks, kRanks, config));
    }
    std::uint64_t step = group->view().step + 1;
    while (group->view().ranks.size() < kRanks) {
      try {
        if (!group->commit(step++)) continue;
      } catch (const Error&) {  // another called regroup
      }
      step = group->regroup().step + 1;
    }
    for (int round = 0; round < 3;) {  // a last regroup may be under way
      try {
        exchange_among(*group, {0, 1, 2, 3}, 1);
        ++round;
        if (round == 3) group->barrier();
      } catch (const Error& error) {
        EXPECT_NE(error.kind(), ErrorKind::evicted);
        round = 0;
        group->regroup();
      }
    }
    done.arrive_and_wait();
  });
}

TEST(Join, APlaceThatIsNotFreeIsRefused) {
  const GroupConfig config = replaceable("taken");
  std::latch left(1);
  with_groups(2, config, [&](Group& group) {
    group.barrier();
    if (group.rank() == 0) {
      expect_error(ErrorKind::refused, {"rank 1", "place is not free", "this process"},
                   [&] { join(1, 2, config); });
    }
    group.barrier();
    if (group.rank() == 0) return left.wait();
    group.destroy();
    GroupConfig other = config;
    other.experts = 13;
    expect_error(ErrorKind::mismatch, {"cannot join", "experts is 13 on rank 1 but 12 on rank 0"},
                 [&] { join(1, 2, other); });
    other = config;
    other.memory_bytes *= 2;
    expect_error(ErrorKind::mismatch, {"memory_bytes is 131072", "65536 on rank 0"},
                 [&] { join(1, 2, other); });
    expect_error(ErrorKind::mismatch, {"the number of ranks is 3", "2 on rank 0"},
                 [&] { join(2, 3, config); });
    left.count_down();
  });
}

TEST(Join, WhoeverCannotJoinIsToldWhy) {
  GroupConfig config = replaceable("nobody", 100ms);
  expect_error(ErrorKind::deadline, {"rank 0 wants to join", "no rank of", "nobody"},
               [&] { join(0, 2, config); });
  config.elastic.clear();
  expect_error(ErrorKind::invalid_argument, {"elastic", "name"}, [&] { join(0, 2, config); });
  config = replaceable("local");
  config.fabric = FabricKind::local;
  expect_error(ErrorKind::unsupported, {"elastic", "fabric local", "shm"},
               [&] { join(0, 2, config); });
  expect_error(ErrorKind::unsupported, {"elastic", "local", "shm"},
               [&] { Group(thread_bootstrap(1).front(), config); });
}

TEST(Join, WaitsUntilTheOthersRegroup) {
  GroupConfig config = replaceable("late", 700ms);
  std::latch left(3), refused(1);
  const auto bootstraps = thread_bootstrap(2);
  on_ranks(3, [&](int thread) {
    if (thread == 2) {
      left.arrive_and_wait();
      expect_error(ErrorKind::deadline, {"rank 1", "did not call regroup"},
                   [&] { join(1, 2, config); });
      refused.count_down();
      return;
    }
    Group group(bootstraps[static_cast<std::size_t>(thread)], config);
    group.barrier();
    if (thread == 1) group.destroy();
    left.arrive_and_wait();
    refused.wait();
  });
}

TEST(Join, AnOldStepIsRefusedOnAllRanksAtOnce) {
  with_groups(3, replaceable("steps", 30s), [&](Group& group) {
    group.commit(4);
    const auto start = Clock::now();
    if (group.rank() == 1) {
      expect_error(ErrorKind::invalid_argument, {"commit", "step", "got 4", "more than 4"},
                   [&] { group.commit(4); });
    } else {
      expect_error(ErrorKind::mismatch, {"commit", "rank 1", "more than 4"},
                   [&] { group.commit(5); });
    }
    EXPECT_LT(Clock::now() - start, 10s) << "not at the deadline";
    group.commit(5);
    group.barrier();
  });
}

}  // namespace
}  // namespace ferry::host::test

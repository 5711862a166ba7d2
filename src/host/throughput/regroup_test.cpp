// A group in shared memory goes on without ranks that left or are late. Ranks are threads; deaths
// of processes are in tests/reliability.
#include <algorithm>
#include <latch>
#include <optional>
#include <random>
#include <utility>

#include "engine/test_groups.hpp"

namespace ferry::host::test {

using namespace engine::test;
namespace {

GroupConfig elastic(std::chrono::nanoseconds deadline = 20s) {
  GroupConfig config;
  config.experts = 24;
  config.memory_bytes = 1 << 16;
  config.deadline = deadline;
  return config;
}

/// Calls until one throws; its error.
Error until_it_fails(Group& group) {
  try {
    for (;;) group.barrier();
  } catch (const Error& error) {
    return error;
  }
}

TEST(Regroup, GoesOnInTheSameMemoryWithoutARankThatLeft) {
  with_groups(4, elastic(), [&](Group& group) {
    exchange_among(group, {0, 1, 2, 3}, 2);
    const Tensor kept = group.empty({16}, Dtype::f32);
    EXPECT_EQ(group.view(), (GroupView{1, {0, 1, 2, 3}, {}, 0}));
    group.barrier();
    if (group.rank() == 0) return group.destroy();
    EXPECT_EQ(until_it_fails(group).peer(), 0);
    const MemoryStats before = group.memory();
    EXPECT_EQ(group.regroup(), (GroupView{2, {1, 2, 3}, {0}, 0}));
    EXPECT_EQ(group.view(), (GroupView{2, {1, 2, 3}, {0}, 0}));
    EXPECT_EQ(group.size(), 4);
    EXPECT_TRUE(group.is_registered(kept.data()));
    exchange_among(group, {1, 2, 3}, 5);
    EXPECT_EQ(group.memory().control_bytes, before.control_bytes);
    EXPECT_EQ(group.memory().arena_bytes, before.arena_bytes);
    group.barrier();  // before one of them leaves
  });
}

TEST(Regroup, RefusesWhatIsOfTheEpochBefore) {
  with_groups(3, elastic(), [&](Group& group) {
    const Batch batch(group.rank(), 4, 16, 0);
    const Plan old = group.plan(batch.ids());
    group.barrier();
    if (group.rank() == 2) return group.destroy();
    until_it_fails(group);
    expect_error(ErrorKind::peer_left, {"regroup", "rank 2"}, [&] { group.plan(batch.ids()); });
    group.regroup();
    expect_error(ErrorKind::invalid_argument, {"plan of epoch 1", "epoch 2"},
                 [&] { group.dispatch(batch.x(), old); });
    const Batch lost(group.rank(), 4, 16, 20);
    expect_error(ErrorKind::invalid_argument,
                 {"topk_idx[0, 0]", "expert 20 of rank 2", "epoch 2", "ranks 0 and 1"},
                 [&] { group.plan(lost.ids()); });
    exchange_among(group, {0, 1}, 2);
    group.barrier();
  });
}

TEST(Regroup, SeveralRanksOneAfterAnotherAndAtOnce) {
  with_groups(6, elastic(), [&](Group& group) {
    group.barrier();
    if (group.rank() == 5 || group.rank() == 0) return group.destroy();
    until_it_fails(group);
    GroupView view = group.regroup();
    // The second may have been seen after the first: then the next call fails.
    while (view.ranks.size() > 4) {
      until_it_fails(group);
      view = group.regroup();
    }
    exchange_among(group, {1, 2, 3, 4}, 2);
    group.barrier();
    if (group.rank() == 2) return group.destroy();
    until_it_fails(group);
    view = group.regroup();
    EXPECT_EQ(view.ranks, (std::vector<int>{1, 3, 4}));
    EXPECT_EQ(view.lost, (std::vector<int>{0, 2, 5})) << "in whichever epoch";
    exchange_among(group, {1, 3, 4}, 2);
    group.barrier();
  });
}

TEST(Regroup, ARankThatIsLateIsEvictedAndHarmsNobody) {
  std::latch gone_on(2), done(3);
  with_groups(3, elastic(1s), [&](Group& group) {
    const Batch batch(group.rank(), 4, 16, group.rank() == 2 ? 0 : 5);
    group.barrier();
    if (group.rank() == 2) {
      gone_on.wait();
      expect_error(ErrorKind::evicted, {"rank 2", "went on without"}, [&] { group.barrier(); });
      expect_error(ErrorKind::evicted, {"rank 2", "went on without"}, [&] { group.regroup(); });
      expect_error(ErrorKind::evicted, {"went on without"}, [&] { group.plan(batch.ids()); });
      done.arrive_and_wait();
      return;
    }
    const Error error = until_it_fails(group);
    EXPECT_EQ(error.kind(), ErrorKind::deadline);
    EXPECT_EQ(error.peer(), 2);
    EXPECT_EQ(group.regroup(), (GroupView{2, {0, 1}, {2}, 0}));
    gone_on.count_down();
    exchange_among(group, {0, 1}, 20);
    group.barrier();
    done.arrive_and_wait();
    exchange_among(group, {0, 1}, 20);  // whatever rank 2 has said meanwhile
    group.barrier();
  });
}

/// All the registered memory that is free, as tensors full of `value`.
std::vector<Tensor> fill_memory(Group& group, float value) {
  std::vector<Tensor> all;
  for (std::int64_t rows = 64; rows > 0;) {
    try {
      all.push_back(group.empty({rows, 64}, Dtype::f32));
      std::fill_n(all.back().as<float>(), rows * 64, value);
    } catch (const Error&) {
      rows /= 2;
    }
  }
  return all;
}

bool holds(const Tensor& tensor, float value) {
  const auto* values = tensor.as<float>();
  return std::all_of(values, values + tensor.view().rows() * tensor.view().columns(),
                     [=](float each) { return each == value; });
}

/// Rank 2 has its grants, sleeps, and writes its rows when the others have gone on.
TEST(Regroup, RowsThatComeLateAreWrittenNowhereInUse) {
  std::latch asleep(1), gone_on(2), written(3);
  const auto bootstraps = thread_bootstrap(3);
  on_ranks(3, [&](int rank) {
    GroupConfig config = elastic(1s);
    bool sleeps = false;
    config.on_wait = [&] {
      if (!std::exchange(sleeps, false)) return;
      asleep.count_down();
      gone_on.wait();
    };
    Group group(bootstraps[static_cast<std::size_t>(rank)], config);
    Batch batch(rank, 8, 64, 0);
    for (std::size_t t = 0; t < batch.routes.size(); ++t) {
      batch.routes[t] = static_cast<std::int64_t>(t) % 2 * 8;  // to ranks 0 and 1
    }
    const Plan plan = group.plan(batch.ids());
    group.barrier();
    sleeps = rank == 2;
    if (rank == 0) asleep.wait();
    if (rank == 2) {
      expect_error(ErrorKind::evicted, {"went on without"},
                   [&] { group.dispatch(batch.x(), plan); });
      written.arrive_and_wait();
      return;
    }
    expect_error(ErrorKind::deadline, {"rank 2"}, [&] { group.dispatch(batch.x(), plan); });
    EXPECT_EQ(group.regroup().ranks, (std::vector<int>{0, 1}));
    const std::vector<Tensor> kept = fill_memory(group, -7);
    EXPECT_FALSE(kept.empty());
    gone_on.count_down();
    written.arrive_and_wait();
    for (const Tensor& tensor : kept) EXPECT_TRUE(holds(tensor, -7));
    group.barrier();
  });
}

TEST(Regroup, ARankThatWasLateIsBackInTime) {
  with_groups(4, elastic(1s), [&](Group& group) {
    group.barrier();
    // At 1 s the deadline names rank 2, or 3; at 1.2 s rank 2 is there, at 1.6 s rank 3.
    if (group.rank() == 2) std::this_thread::sleep_for(1200ms);
    if (group.rank() == 3) std::this_thread::sleep_for(1600ms);
    until_it_fails(group);
    EXPECT_EQ(group.regroup().ranks, (std::vector<int>{0, 1, 2, 3}));
    group.barrier();
  });
}

TEST(Regroup, ADestroyedGroupEndsItsRegroup) {
  with_groups(2, elastic(30s), [&](Group& group) {
    group.barrier();
    if (group.rank() == 1) return std::this_thread::sleep_for(600ms);  // in no call
    std::thread ends([&] {
      std::this_thread::sleep_for(200ms);
      group.destroy();
    });
    const auto start = std::chrono::steady_clock::now();
    expect_error(ErrorKind::destroyed, {"regroup", "destroyed"}, [&] { group.regroup(); });
    EXPECT_LT(std::chrono::steady_clock::now() - start, 10s) << "not at the deadline";
    ends.join();
  });
}

TEST(Regroup, HalfOfTheRanksGiveUp) {
  std::latch given_up(2);
  with_groups(2, elastic(600ms), [&](Group& group) {
    group.barrier();
    const std::string other = "rank " + std::to_string(1 - group.rank());
    const auto give_up = [&] {
      until_it_fails(group);
      expect_error(ErrorKind::deadline, {other, "no majority", "epoch 1"},
                   [&] { group.regroup(); });
      expect_error(ErrorKind::deadline, {"no majority"}, [&] { group.barrier(); });
      expect_error(ErrorKind::deadline, {"no majority"}, [&] { group.regroup(); });
    };
    if (group.rank() == 0) {
      give_up();
      group.destroy();  // and goes on elsewhere, for all that the other one knows
    }
    given_up.arrive_and_wait();
    if (group.rank() == 1) give_up();
  });
}

TEST(Regroup, AHealthyGroupLosesNobody) {
  with_groups(3, elastic(), [&](Group& group) {
    exchange_among(group, {0, 1, 2}, 1);
    if (group.rank() == 1) {
      EXPECT_EQ(group.regroup(), (GroupView{2, {0, 1, 2}, {}, 0}));
    } else {
      const Error error = until_it_fails(group);
      EXPECT_NE(std::string(error.what()).find("rank 1 called regroup"), std::string::npos)
          << error.what();
      group.regroup();
    }
    exchange_among(group, {0, 1, 2}, 3);
    group.barrier();
  });
}

TEST(Regroup, TellsTheNewestStepThatAnyRankHasCommitted) {
  with_groups(3, elastic(), [&](Group& group) {
    group.commit(1);
    group.commit(4);
    EXPECT_EQ(group.view().step, 4u);
    expect_error(ErrorKind::invalid_argument, {"commit", "step", "more than 4"},
                 [&] { group.commit(4); });
    expect_error(ErrorKind::mismatch, {"step is", "on rank"},
                 [&] { group.commit(group.rank() == 1 ? 5 : 6); });
    expect_error(ErrorKind::invalid_argument, {"commit", "step", "18446744073709551615", "less"},
                 [&] { group.commit(~std::uint64_t{0}); });
    group.barrier();
    if (group.rank() == 1) return group.destroy();
    expect_error(ErrorKind::peer_left, {"rank 1"}, [&] { group.commit(7); });
    EXPECT_EQ(group.regroup().step, 4u);
    group.commit(7);
    EXPECT_EQ(group.view().step, 7u);
    group.barrier();
  });
}

TEST(Regroup, CallsOnStreamsThatWereMadeBeforeFailAndLaterOnesDoNot) {
  with_groups(3, elastic(), [&](Group& group) {
    Stream stream;
    const Batch batch(group.rank(), 4, 16, 0);
    group.barrier();
    if (group.rank() == 2) return group.destroy();
    const Plan old = group.plan(batch.ids(), {&stream});
    DispatchOptions options{.stream = &stream};
    options.max_recv_rows = 64;
    expect_error(ErrorKind::peer_left, {"rank 2"},  // now, or from its event
                 [&] { group.dispatch(batch.x(), old, options).event.wait(); });
    group.regroup();
    expect_error(ErrorKind::peer_left, {"rank 2"}, [&] { old.recv_rows(); });
    const Plan plan = group.plan(batch.ids(), {&stream});
    const Received received = group.dispatch(batch.x(), plan, options);
    received.event.wait();
    EXPECT_EQ(plan.recv_rows(), group.rank() == 0 ? 8 : 0);
    group.barrier();
  });
}

LatencyConfig with_masks() {
  LatencyConfig config{4, 16, 1, Dtype::f32};
  config.masks = true;
  return config;
}

/// To the rank of expert 8 and back.
void decode(LatencyExchange& latency, int rank) {
  const Batch batch(rank, 4, 16, 8);
  const std::vector<float> ones(4, 1.0F);
  const LatencyReceived received = latency.dispatch(batch.x(), batch.ids());
  const ConstTensorView weights{ones.data(), Dtype::f32, {4, 1}};
  const LatencyCombineOptions options{.path = CombinePath::per_rank};
  EXPECT_TRUE(same_rows(latency.combine(received.x, received, weights, options).x, batch));
}

TEST(Regroup, LatencyExchangesWithMasksGoOnBesideIt) {
  with_groups(3, elastic(), [&](Group& group) {
    LatencyExchange latency(group, with_masks());
    decode(latency, group.rank());
    group.barrier();
    if (group.rank() == 2) return group.destroy();
    decode(latency, group.rank());
    until_it_fails(group);
    group.regroup();
    exchange_among(group, {0, 1}, 2);
    decode(latency, group.rank());
    EXPECT_EQ(latency.masked(), (std::vector<bool>{false, false, true}));
    group.barrier();
  });
}

/// Rank 2 is kept from the CPU until its deadline is over; the others come meanwhile.
TEST(Regroup, WhoeverDidNotRunItselfHearsTheOthersBeforeItBlamesThem) {
  const auto bootstraps = thread_bootstrap(3);
  on_ranks(3, [&](int rank) {
    bool sleeps = false;
    GroupConfig config = elastic(800ms);
    config.on_wait = [&] {
      if (std::exchange(sleeps, false)) std::this_thread::sleep_for(1200ms);
    };
    Group group(bootstraps[index(rank)], config);
    group.barrier();
    sleeps = rank == 2;
    if (rank != 2) std::this_thread::sleep_for(700ms);
    EXPECT_EQ(group.regroup(), (GroupView{2, {0, 1, 2}, {}, 0}));
    exchange_among(group, {0, 1, 2}, 1);
    group.barrier();
  });
}

/// Ranks 0 and 2 are kept from the CPU for a deadline; rank 1 comes a second later.
TEST(Regroup, TimeInWhichARankDidNotRunCountsAgainstNobody) {
  const auto bootstraps = thread_bootstrap(3);
  on_ranks(3, [&](int rank) {
    bool sleeps = false;
    GroupConfig config = elastic(1500ms);
    config.on_wait = [&] {
      if (std::exchange(sleeps, false)) std::this_thread::sleep_for(1500ms);
    };
    Group group(bootstraps[index(rank)], config);
    group.barrier();
    sleeps = rank != 1;
    if (rank == 1) std::this_thread::sleep_for(2500ms);
    EXPECT_EQ(group.regroup(), (GroupView{2, {0, 1, 2}, {}, 0}));
    group.barrier();
  });
}

/// Rank 1 is kept from the CPU when the deadline of rank 0 is over; rank 2 never comes.
TEST(Regroup, NobodyGivesUpBecauseARankIsSilentAtThatMoment) {
  const auto bootstraps = thread_bootstrap(3);
  std::latch gone_on(2), done(3);
  on_ranks(3, [&](int rank) {
    std::optional<Clock::time_point> sleeps_at;
    GroupConfig config = elastic(1s);
    config.on_wait = [&] {
      if (!sleeps_at || Clock::now() < *sleeps_at) return;
      sleeps_at.reset();
      std::this_thread::sleep_for(1s);
    };
    Group group(bootstraps[index(rank)], config);
    group.barrier();
    if (rank == 2) {
      gone_on.wait();
    } else {
      if (rank == 1) sleeps_at = Clock::now() + 300ms;
      EXPECT_EQ(group.regroup(), (GroupView{2, {0, 1}, {2}, 0}));
      exchange_among(group, {0, 1}, 1);
      gone_on.count_down();
    }
    done.arrive_and_wait();
  });
}

/// Ranks sleep before their calls and in them: one that is back calls again while others still
/// agree.
TEST(Regroup, ManyInARowHaveOneEpochEach) {
  constexpr std::uint64_t kCalls = 40;
  for (const int ranks : {2, 3, 4}) {
    const auto bootstraps = thread_bootstrap(ranks);
    on_ranks(ranks, [&](int rank) {
      std::mt19937 random(kSeed + static_cast<unsigned>(rank));
      const auto doze = [&] { std::this_thread::sleep_for(random() % 8 * 500us); };
      GroupConfig config = elastic();
      config.on_wait = [&] {
        if (random() % 2 == 0) doze();
      };
      Group group(bootstraps[index(rank)], config);
      const std::vector<int> all = group.view().ranks;
      LatencyExchange latency(group, with_masks());
      for (std::uint64_t call = 1; call <= kCalls; ++call) {
        if (random() % 2 == 0) doze();
        ASSERT_EQ(group.regroup(), (GroupView{call + 1, all, {}, 0})) << "seed " << kSeed;
      }
      exchange_among(group, all, 1);
      decode(latency, rank);
      EXPECT_EQ(latency.masked(), std::vector<bool>(all.size(), false));
      group.barrier();
    });
  }
}

TEST(Regroup, IsNotForDomainsWithoutANetworkThatCarriesTexts) {
  GroupConfig config = elastic();
  config.domain_size = 1;
  with_groups(2, config, [&](Group& group) {
    expect_error(ErrorKind::unsupported, {"regroup", "libfabric joins", "2 in 2"},
                 [&] { group.regroup(); });
    group.barrier();
  });
}

}  // namespace
}  // namespace ferry::host::test

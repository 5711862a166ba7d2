// Latency mode with masks: who is left out, what the others get, and how ranks come back.
#include <atomic>
#include <barrier>
#include <cstdint>
#include <optional>
#include <thread>
#include <vector>

#include "host/test_masked_load.hpp"

namespace ferry::host::test {
namespace {

/// Keeps a rank in the exchange until all are done, or have failed.
struct StayForAll {
  std::barrier<>& all;
  ~StayForAll() { all.arrive_and_wait(); }
};

std::vector<bool> only(int rank) {
  std::vector<bool> masks(kRanks, false);
  masks[static_cast<std::size_t>(rank)] = true;
  return masks;
}

/// Rank 2 stops coming, is masked, learns it, and comes back.
void late_rank(FabricKind fabric, int domain_size = 0, FabricKind network = FabricKind::automatic) {
  constexpr int kLate = 2;
  GroupConfig config = with_deadline(1s);
  config.fabric = fabric;
  config.domain_size = domain_size;
  config.network = network;
  std::barrier all(kRanks);
  with_groups(kRanks, config, [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    int round = 1;
    for (; round <= 3; ++round) load.round(round, {});
    if (group.rank() == kLate) {
      all.arrive_and_wait();  // the others have gone on
      expect_error(ErrorKind::left_behind, {"rank 2", "masked", "rejoin"},
                   [&] { load.round(round, {}); });
      all.arrive_and_wait();
    } else {
      const auto start = Clock::now();
      for (; round <= 8; ++round) load.round(round, {kLate});
      EXPECT_LT(Clock::now() - start, 3s) << "one deadline, not one for each call";
      EXPECT_EQ(latency.masked(), only(kLate));
      EXPECT_EQ(*latency.mask_count(), 1u);
      all.arrive_and_wait();
      all.arrive_and_wait();
      for (; round <= 10; ++round) load.round(round, {kLate});  // it has disturbed nobody
    }
    latency.rejoin();
    EXPECT_EQ(latency.masked(), std::vector<bool>(kRanks, false));
    for (round = 11; round <= 15; ++round) load.round(round, {});
    EXPECT_EQ(*latency.mask_count(), group.rank() == kLate ? 0u : 1u);
    group.barrier();  // throughput mode has noticed nothing
  });
}

TEST(HostMasks, ALateRankIsMaskedAndComesBack) {
  late_rank(FabricKind::local);
}

TEST(HostMasks, ALateRankIsMaskedAndComesBackOverANetwork) {
  late_rank(FabricKind::sim);
}

TEST(HostMasks, ALateRankIsMaskedAndComesBackBetweenDomains) {
  late_rank(FabricKind::local, 2, FabricKind::sim);
  late_rank(FabricKind::local, 3);  // uneven ones; copies between them
}

TEST(HostMasks, ARankThatIsLateWithinACallSpoilsNothing) {
  // It sends its rows of a generation, and the rest of that call comes when the others are far on.
  constexpr int kLate = 1;
  std::barrier all(kRanks);
  with_groups(kRanks, with_deadline(1s), [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    for (int round = 1; round <= 2; ++round) load.round(round, {});
    if (group.rank() == kLate) {
      LatencyDispatchOptions hook;
      hook.hook = true;
      LatencyReceived received = latency.dispatch(load.x(3), load.ids(), hook);
      all.arrive_and_wait();
      EXPECT_THROW(received.receive(), Error);
    } else {
      {
        const LatencyReceived received = latency.dispatch(load.x(3), load.ids());
        load.expect_received(received, 3, {});  // its rows came
        const LatencyCombined sums = load.combine(received);
        load.expect_sums(sums.x, 3, {kLate});  // nothing came back
      }
      for (int round = 4; round <= 6; ++round) load.round(round, {kLate});
      all.arrive_and_wait();
      for (int round = 7; round <= 9; ++round) load.round(round, {kLate});
    }
    latency.rejoin();
    for (int round = 10; round <= 12; ++round) load.round(round, {});
  });
}

TEST(HostMasks, MasksAreSetAndCleared) {
  std::barrier all(kRanks);
  with_groups(kRanks, with_deadline(30s), [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    const int rank = group.rank();
    const std::vector<int> others = rank < 2 ? std::vector{2, 3} : std::vector{0, 1};
    load.round(1, {});
    all.arrive_and_wait();  // whoever is in a call when another masks it was left behind
    for (const int other : others) latency.set_mask(other, true);
    all.arrive_and_wait();
    for (int round = 2; round <= 4; ++round) load.round(round, others);  // two halves
    EXPECT_EQ(latency.masked()[static_cast<std::size_t>(others[0])], true);
    EXPECT_EQ(*latency.mask_count(), 0u) << "the caller's own masks are not counted";
    all.arrive_and_wait();
    latency.clear_masks();
    all.arrive_and_wait();
    for (int round = 5; round <= 7; ++round) load.round(round, {});
    expect_error(ErrorKind::invalid_argument, {"rank", "peer"},
                 [&] { latency.set_mask(rank, true); });
    expect_error(ErrorKind::invalid_argument, {"rank", "-1"}, [&] { latency.set_mask(-1, true); });
    expect_error(ErrorKind::invalid_argument, {"rank", "4"}, [&] { latency.set_mask(4, false); });
  });
}

TEST(HostMasks, AMaskTakenBackInTheMidstOfAnExchangeVouchesForNothing) {
  // Rank 0 leaves out the rows of rank 1 and then takes the mask back. It must not tell rank 1 that
  // its part of the sums is there: what lies there is of an older generation.
  std::barrier all(kRanks);
  with_groups(kRanks, with_deadline(1s), [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    for (int round = 1; round <= 4; ++round) load.round(round, {});  // leaves old sums everywhere
    LatencyDispatchOptions hook;
    hook.hook = true;
    LatencyReceived received = latency.dispatch(load.x(5), load.ids(), hook);
    if (group.rank() != 0) received.receive();
    all.arrive_and_wait();
    if (group.rank() == 0) {
      latency.set_mask(1, true);
      received.receive();
      latency.clear_masks();
    }
    all.arrive_and_wait();
    load.expect_received(received, 5, group.rank() == 0 ? std::vector{1} : std::vector<int>{});
    const Tensor sums = load.combine(received).x;
    load.expect_sums(sums, 5, group.rank() == 1 ? std::vector{0} : std::vector<int>{});
    if (group.rank() == 1) {
      EXPECT_EQ(latency.masked(), only(0));
    }
  });
}

TEST(HostMasks, TheNextGenerationsRowsDoNotPassForThoseThatWereNotSent) {
  std::barrier all(kRanks);
  with_groups(kRanks, with_deadline(30s), [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    for (int round = 1; round <= 4; ++round) load.round(round, {});
    LatencyDispatchOptions hook;
    hook.hook = true;
    const int rank = group.rank();
    LatencyReceived fifth;
    if (rank != 1) fifth = latency.dispatch(load.x(5), load.ids(), hook);
    all.arrive_and_wait();
    if (rank == 1) {
      latency.set_mask(0, true);
      fifth = latency.dispatch(load.x(5), load.ids(), hook);  // nothing for rank 0
      latency.clear_masks();
    }
    all.arrive_and_wait();
    LatencyReceived sixth = latency.dispatch(load.x(6), load.ids(), hook);
    all.arrive_and_wait();
    fifth.receive();
    load.expect_received(fifth, 5, rank == 0 ? std::vector{1} : std::vector<int>{});
    sixth.receive();
    load.expect_received(sixth, 6, {});
    all.arrive_and_wait();
  });
}

TEST(HostMasks, ARankThatLeavesIsMaskedAtOnce) {
  with_groups(kRanks, with_deadline(60s), [&](Group& group) {
    std::optional<LatencyExchange> latency(std::in_place, group, masked_config());
    Load load(group, *latency);
    load.round(1, {});
    if (group.rank() == 3) {
      group.destroy();
      return;
    }
    const auto start = Clock::now();
    for (int round = 2; round <= 5; ++round) load.round(round, {3});
    EXPECT_LT(Clock::now() - start, 30s);
    latency->rejoin();  // without it, and it stays masked
    EXPECT_EQ(latency->masked(), only(3));
    for (int round = 6; round <= 8; ++round) load.round(round, {3});
  });
}

TEST(HostMasks, AGroupThatFailedLeavesTheExchangeAlone) {
  std::barrier all(kRanks);
  with_groups(kRanks, with_deadline(1s), [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    load.round(1, {});
    if (group.rank() != 0) {
      EXPECT_THROW(group.barrier(), Error);  // rank 0 does not come
      EXPECT_THROW(group.barrier(), Error);  // and the group stays dead
    }
    all.arrive_and_wait();
    for (int round = 2; round <= 5; ++round) load.round(round, {});
    latency.rejoin();
    load.round(6, {});
  });
}

TEST(HostMasks, RejoinNamesWhoIsMissingAndMayBeRepeated) {
  std::barrier all(kRanks);
  with_groups(kRanks, with_deadline(2s), [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    load.round(1, {});
    if (group.rank() != 3) {
      expect_error(ErrorKind::deadline, {"rank 3", "rejoin"}, [&] { latency.rejoin(); });
      expect_error(ErrorKind::left_behind, {"rejoin again"}, [&] { load.round(2, {}); });
    }
    all.arrive_and_wait();
    latency.rejoin();
    for (int round = 2; round <= 4; ++round) load.round(round, {});
  });
}

TEST(HostMasks, WhoComesToARejoinBeforeThoseWhoTryAgainWaitsForThem) {
  // It finds what they offered in the attempt that failed.
  std::barrier all(kRanks);
  with_groups(kRanks, with_deadline(1s), [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    if (group.rank() != 3) {
      expect_error(ErrorKind::deadline, {"rank 3", "rejoin"}, [&] { latency.rejoin(); });
    }
    all.arrive_and_wait();
    if (group.rank() != 3) std::this_thread::sleep_for(100ms);
    latency.rejoin();
    load.round(1, {});
  });
}

TEST(HostMasks, ResultsFromBeforeARejoinMayBeReadButKeepTheirBuffer) {
  with_groups(kRanks, with_deadline(30s), [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    load.round(1, {});
    std::optional<LatencyReceived> old = latency.dispatch(load.x(2), load.ids());
    latency.rejoin();
    load.expect_received(*old, 2, {});
    expect_error(ErrorKind::left_behind, {"before the last rejoin"}, [&] { load.combine(*old); });
    load.round(3, {});  // in the other buffer
    expect_error(ErrorKind::exhausted, {"still alive"},
                 [&] { latency.dispatch(load.x(4), load.ids()); });
    load.expect_received(*old, 2, {});
    old.reset();
    for (int round = 4; round <= 8; ++round) load.round(round, {});
  });
}

TEST(HostMasks, AResultIsNotOverwrittenAfterARejoinWhenOneBeforeItWasDroppedUnreceived) {
  with_groups(kRanks, with_deadline(30s), [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    LatencyDispatchOptions hook;
    hook.hook = true;
    latency.dispatch(load.x(1), load.ids(), hook);  // dropped before its rows were received
    latency.dispatch(load.x(2), load.ids());
    std::optional<LatencyReceived> kept = latency.dispatch(load.x(3), load.ids());
    latency.rejoin();
    load.round(4, {});  // in the other buffer
    expect_error(ErrorKind::exhausted, {"still alive"},
                 [&] { latency.dispatch(load.x(5), load.ids()); });
    load.expect_received(*kept, 3, {});
  });
}

TEST(HostMasks, NobodyWaitsLongerForARankThatWasLeftBehind) {
  constexpr auto kDeadline = 1500ms;
  with_groups(kRanks, with_deadline(kDeadline), [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    load.round(1, {});
    if (group.rank() == 2) {
      std::this_thread::sleep_for(kDeadline / 2);
      expect_error(ErrorKind::left_behind, {"rank 1", "masked"},
                   [&] { latency.dispatch(load.x(2), load.ids()); });
      // The others come when they have masked this rank: one deadline after they began to wait, not
      // two, as if it were in an earlier call.
      latency.rejoin();
    } else {
      if (group.rank() == 1) latency.set_mask(2, true);
      load.round(2, {2});
      latency.rejoin();
    }
    load.round(3, {});
  });
}

/// The same for a rank that was left behind while it was stopped in a call.
void wake_up_left_behind(int domain_size) {
  constexpr auto kDeadline = 1500ms;
  GroupConfig config = with_deadline(kDeadline);
  config.domain_size = domain_size;
  std::atomic<std::thread::id> stops{};
  config.on_wait = [&] {
    std::thread::id self = std::this_thread::get_id();
    if (stops.compare_exchange_strong(self, {})) std::this_thread::sleep_for(kDeadline);
  };
  with_groups(kRanks, config, [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    load.round(1, {});
    if (group.rank() == 2) {
      stops = std::this_thread::get_id();
      // It sends to all and waits for rank 1, which sends it nothing.
      expect_error(ErrorKind::left_behind, {"rank 1", "masked"},
                   [&] { latency.dispatch(load.x(2), load.ids()); });
    } else {
      std::this_thread::sleep_for(kDeadline / 5);
      if (group.rank() == 1) latency.set_mask(2, true);
      const LatencyReceived received = latency.dispatch(load.x(2), load.ids());
      load.expect_sums(load.combine(received).x, 2, {2});
    }
    latency.rejoin();
    load.round(3, {});
  });
}

TEST(HostMasks, NobodyWaitsLongerForARankThatWakesUpLeftBehind) {
  wake_up_left_behind(0);
}

TEST(HostMasks, NobodyWaitsLongerForARankThatWakesUpLeftBehindInAnotherDomain) {
  wake_up_left_behind(2);
}

/// Rank 0 stops, and holds up some ranks and not others.
void held_up(const GroupConfig& given) {
  // Rank 1 alone masks rank 0, and waits in combine for the others, which wait in dispatch for
  // rank 0 until their deadline, and then compute past that of rank 1.
  constexpr auto kDeadline = 800ms;
  GroupConfig config = given;
  config.deadline = kDeadline;
  std::barrier all(kRanks);
  with_groups(kRanks, config, [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    load.round(1, {});
    all.arrive_and_wait();
    const StayForAll stay{all};
    if (group.rank() == 0) return;
    if (group.rank() == 1) {
      latency.set_mask(0, true);
      std::this_thread::sleep_for(kDeadline / 2);
    }
    const LatencyReceived received = latency.dispatch(load.x(2), load.ids());
    load.expect_received(received, 2, {0});
    if (group.rank() != 1) std::this_thread::sleep_for(kDeadline * 3 / 4);
    load.expect_sums(load.combine(received).x, 2, {0});
    EXPECT_EQ(latency.masked(), only(0));
  });
}

TEST(HostMasks, RanksThatAreHeldUpDoNotMaskOneAnother) {
  held_up({});
}

TEST(HostMasks, RanksThatAreHeldUpDoNotMaskOneAnotherOverANetwork) {
  GroupConfig config;
  config.fabric = FabricKind::sim;
  held_up(config);
}

TEST(HostMasks, RanksThatAreHeldUpDoNotMaskOneAnotherInDomains) {
  GroupConfig config;
  config.domain_size = 2;
  config.network = FabricKind::sim;
  held_up(config);
}

}  // namespace
}  // namespace ferry::host::test

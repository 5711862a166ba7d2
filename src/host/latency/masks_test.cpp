// Latency mode with masks: who is left out, what the others get, and how ranks come back.
#include <barrier>
#include <optional>
#include <vector>

#include "host/latency/test_masked_ranks.hpp"

namespace ferry::host::test {
namespace {

/// Rank 2 stops coming, is masked, learns it, and comes back.
void late_rank(FabricKind fabric, int domain_size = 0, FabricKind network = FabricKind::automatic) {
  constexpr int kLate = 2;
  GroupConfig config = with_deadline(1s);
  config.fabric = fabric;
  config.domain_size = domain_size;
  config.network = network;
  MaskedRanks ranks;
  ranks.run(config, [&](Group& group, LatencyExchange& latency, Load& load) {
    int round = 1;
    for (; round <= 3; ++round) load.round(round, {});
    if (group.rank() == kLate) {
      ranks.meet();  // the others have gone on
      expect_error(ErrorKind::evicted, {"rank 2", "masked", "rejoin"},
                   [&] { load.round(round, {}); });
      ranks.meet();
    } else {
      ranks.count_waits();
      for (; round <= 8; ++round) load.round(round, {kLate});
      EXPECT_LT(ranks.waited(group.rank()), 3s) << "one deadline, not one for each call";
      EXPECT_EQ(latency.masked(), only(kLate));
      EXPECT_EQ(*latency.mask_count(), 1u);
      ranks.meet();
      ranks.meet();
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
  MaskedRanks ranks;
  ranks.run(with_deadline(1s), [&](Group& group, LatencyExchange& latency, Load& load) {
    for (int round = 1; round <= 2; ++round) load.round(round, {});
    if (group.rank() == kLate) {
      LatencyReceived received = latency.dispatch(load.x(3), load.ids(), {.hook = true});
      ranks.meet();
      EXPECT_THROW(received.receive(), Error);
    } else {
      {
        const LatencyReceived received = latency.dispatch(load.x(3), load.ids());
        load.expect_received(received, 3, {});  // its rows came
        const LatencyCombined sums = load.combine(received);
        load.expect_sums(sums.x, 3, {kLate});  // nothing came back
      }
      for (int round = 4; round <= 6; ++round) load.round(round, {kLate});
      ranks.meet();
      for (int round = 7; round <= 9; ++round) load.round(round, {kLate});
    }
    latency.rejoin();
    for (int round = 10; round <= 12; ++round) load.round(round, {});
  });
}

TEST(HostMasks, MasksAreSetAndCleared) {
  MaskedRanks ranks;
  ranks.run(with_deadline(30s), [&](Group& group, LatencyExchange& latency, Load& load) {
    const int rank = group.rank();
    const std::vector<int> others = rank < 2 ? std::vector{2, 3} : std::vector{0, 1};
    load.round(1, {});
    ranks.meet();  // whoever is in a call when another masks it was evicted
    for (const int other : others) latency.set_mask(other, true);
    ranks.meet();
    for (int round = 2; round <= 4; ++round) load.round(round, others);  // two halves
    EXPECT_EQ(latency.masked()[static_cast<std::size_t>(others[0])], true);
    EXPECT_EQ(*latency.mask_count(), 0u) << "the caller's own masks are not counted";
    ranks.meet();
    latency.clear_masks();
    ranks.meet();
    for (int round = 5; round <= 7; ++round) load.round(round, {});
    expect_error(ErrorKind::invalid_argument, {"rank", "peer"},
                 [&] { latency.set_mask(rank, true); });
    expect_error(ErrorKind::invalid_argument, {"rank", "-1"}, [&] { latency.set_mask(-1, true); });
    expect_error(ErrorKind::invalid_argument, {"rank", "4"}, [&] { latency.set_mask(4, false); });
  });
}

TEST(HostMasks, NobodyWaitsForRowsThatRanksDidNotSendEachOtherWhileMasked) {
  std::barrier all(kRanks);
  GroupConfig config = with_deadline(30s);
  config.domain_size = 2;  // inside a domain nobody waits for what is dropped unread
  with_groups(kRanks, config, [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    const std::vector<int> others = group.rank() < 2 ? std::vector{2, 3} : std::vector{0, 1};
    load.round(1, {});
    all.arrive_and_wait();
    for (const int other : others) latency.set_mask(other, true);
    all.arrive_and_wait();
    latency.dispatch(load.x(2), load.ids(),
                     {.hook = true});  // dropped before its rows were received
    all.arrive_and_wait();
    latency.clear_masks();
    all.arrive_and_wait();
    for (int round = 3; round <= 6; ++round) load.round(round, {});
    EXPECT_EQ(*latency.mask_count(), 0u);
    all.arrive_and_wait();
  });
}

TEST(HostMasks, AMaskTakenBackInTheMidstOfAnExchangeVouchesForNothing) {
  // Rank 0 leaves out the rows of rank 1 and then takes the mask back. It must not tell rank 1 that
  // its part of the sums is there: what lies there is of an older generation.
  MaskedRanks ranks;
  ranks.run(with_deadline(30s), [&](Group& group, LatencyExchange& latency, Load& load) {
    for (int round = 1; round <= 4; ++round) load.round(round, {});  // leaves old sums everywhere
    LatencyReceived received = latency.dispatch(load.x(5), load.ids(), {.hook = true});
    if (group.rank() != 0) received.receive();
    ranks.meet();
    if (group.rank() == 0) {
      latency.set_mask(1, true);
      received.receive();
      latency.clear_masks();
    }
    ranks.meet();
    load.expect_received(received, 5, group.rank() == 0 ? std::vector{1} : std::vector<int>{});
    const Tensor sums = load.combine(received).x;
    load.expect_sums(sums, 5, group.rank() == 1 ? std::vector{0} : std::vector<int>{});
    if (group.rank() == 1) {
      EXPECT_EQ(latency.masked(), only(0));
    }
  });
}

TEST(HostMasks, TheNextGenerationsRowsDoNotPassForThoseThatWereNotSent) {
  MaskedRanks ranks;
  ranks.run(with_deadline(30s), [&](Group& group, LatencyExchange& latency, Load& load) {
    for (int round = 1; round <= 4; ++round) load.round(round, {});
    const int rank = group.rank();
    LatencyReceived fifth;
    if (rank != 1) fifth = latency.dispatch(load.x(5), load.ids(), {.hook = true});
    ranks.meet();
    if (rank == 1) {
      latency.set_mask(0, true);
      fifth = latency.dispatch(load.x(5), load.ids(), {.hook = true});  // nothing for rank 0
      latency.clear_masks();
    }
    ranks.meet();
    LatencyReceived sixth = latency.dispatch(load.x(6), load.ids(), {.hook = true});
    ranks.meet();
    fifth.receive();
    load.expect_received(fifth, 5, rank == 0 ? std::vector{1} : std::vector<int>{});
    sixth.receive();
    load.expect_received(sixth, 6, {});
    ranks.meet();
  });
}

TEST(HostMasks, ARankThatLeavesIsMaskedAtOnce) {
  MaskedRanks ranks;
  ranks.run(with_deadline(60s), [&](Group& group, LatencyExchange& latency, Load& load) {
    load.round(1, {});
    if (group.rank() == 3) {
      group.destroy();
      return;
    }
    const auto start = Clock::now();
    for (int round = 2; round <= 5; ++round) load.round(round, {3});
    EXPECT_LT(Clock::now() - start, 30s);
    latency.rejoin();  // without it, and it stays masked
    EXPECT_EQ(latency.masked(), only(3));
    for (int round = 6; round <= 8; ++round) load.round(round, {3});
  });
}

TEST(HostMasks, AGroupThatFailedLeavesTheExchangeAlone) {
  MaskedRanks ranks;
  ranks.run(with_deadline(1s), [&](Group& group, LatencyExchange& latency, Load& load) {
    load.round(1, {});
    if (group.rank() != 0) {
      EXPECT_THROW(group.barrier(), Error);  // rank 0 does not come
      EXPECT_THROW(group.barrier(), Error);  // and the group stays dead
    }
    ranks.meet();
    for (int round = 2; round <= 5; ++round) load.round(round, {});
    latency.rejoin();
    load.round(6, {});
  });
}

TEST(HostMasks, RejoinNamesWhoIsMissingAndMayBeRepeated) {
  MaskedRanks ranks;
  ranks.run(with_deadline(1s), [&](Group& group, LatencyExchange& latency, Load& load) {
    load.round(1, {});
    if (group.rank() != 3) {
      expect_error(ErrorKind::deadline, {"rank 3", "rejoin"}, [&] { latency.rejoin(); });
      expect_error(ErrorKind::evicted, {"rejoin again"}, [&] { load.round(2, {}); });
    }
    ranks.meet();
    latency.rejoin();
    for (int round = 2; round <= 4; ++round) load.round(round, {});
  });
}

TEST(HostMasks, WhoComesToARejoinBeforeThoseWhoTryAgainWaitsForThem) {
  // It finds what they offered in the attempt that failed.
  MaskedRanks ranks;
  ranks.run(with_deadline(1s), [&](Group& group, LatencyExchange& latency, Load& load) {
    if (group.rank() != 3) {
      expect_error(ErrorKind::deadline, {"rank 3", "rejoin"}, [&] { latency.rejoin(); });
    } else {
      ranks.count_waits();
    }
    ranks.meet();
    if (group.rank() != 3) ranks.until([&] { return ranks.waited(3) > 20ms; });
    latency.rejoin();
    load.round(1, {});
  });
}

TEST(HostMasks, ResultsFromBeforeARejoinMayBeReadButKeepTheirBuffer) {
  MaskedRanks ranks;
  ranks.run(with_deadline(30s), [&](Group&, LatencyExchange& latency, Load& load) {
    load.round(1, {});
    std::optional<LatencyReceived> old = latency.dispatch(load.x(2), load.ids());
    latency.rejoin();
    load.expect_received(*old, 2, {});
    expect_error(ErrorKind::evicted, {"before the last rejoin"}, [&] { load.combine(*old); });
    load.round(3, {});  // in the other buffer
    expect_error(ErrorKind::exhausted, {"still alive"},
                 [&] { latency.dispatch(load.x(4), load.ids()); });
    load.expect_received(*old, 2, {});
    old.reset();
    for (int round = 4; round <= 8; ++round) load.round(round, {});
  });
}

TEST(HostMasks, AResultIsNotOverwrittenAfterARejoinWhenOneBeforeItWasDroppedUnreceived) {
  MaskedRanks ranks;
  ranks.run(with_deadline(30s), [&](Group&, LatencyExchange& latency, Load& load) {
    latency.dispatch(load.x(1), load.ids(),
                     {.hook = true});  // dropped before its rows were received
    latency.dispatch(load.x(2), load.ids());
    std::optional<LatencyReceived> kept = latency.dispatch(load.x(3), load.ids());
    latency.rejoin();
    load.round(4, {});  // in the other buffer
    expect_error(ErrorKind::exhausted, {"still alive"},
                 [&] { latency.dispatch(load.x(5), load.ids()); });
    load.expect_received(*kept, 3, {});
  });
}

}  // namespace
}  // namespace ferry::host::test

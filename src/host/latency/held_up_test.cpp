// Latency mode with masks: a rank that stops holds up some ranks and not others. Those that it
// holds up are waited for, in calls and in a rejoin; a rank that was evicted is not.
#include <atomic>

#include "host/latency/test_masked_ranks.hpp"

namespace ferry::host::test {
namespace {

constexpr auto kDeadline = 800ms;

TEST(HostHeldUp, NobodyWaitsLongerForARankThatWasEvicted) {
  std::atomic<bool> told{false};
  MaskedRanks ranks;
  ranks.run(with_deadline(kDeadline), [&](Group& group, LatencyExchange& latency, Load& load) {
    load.round(1, {});
    ranks.count_waits();
    ranks.meet();
    if (group.rank() == 2) {
      ranks.until([&] {
        return told && ranks.waited(0) > kDeadline / 2 && ranks.waited(3) > kDeadline / 2;
      });
      expect_error(ErrorKind::evicted, {"masked this rank"},
                   [&] { latency.dispatch(load.x(2), load.ids()); });
    } else {
      if (group.rank() == 1) {
        latency.set_mask(2, true);
        told = true;
      }
      load.round(2, {2});
      // Not two deadlines, as if rank 2 were in an earlier call.
      EXPECT_LT(ranks.waited(group.rank()), kDeadline * 3 / 2);
    }
    latency.rejoin();
    load.round(3, {});
  });
}

/// The same for a rank that was evicted while it was stopped in a call.
void wake_up_evicted(int domain_size) {
  GroupConfig config = with_deadline(kDeadline);
  config.domain_size = domain_size;
  std::atomic<int> combining{0};
  MaskedRanks ranks;
  ranks.run(config, [&](Group& group, LatencyExchange& latency, Load& load) {
    load.round(1, {});
    if (group.rank() == 2) {
      ranks.stop_in_wait([&] {
        return combining == 2 && ranks.waited(0) > kDeadline * 3 / 4 &&
               ranks.waited(3) > kDeadline * 3 / 4;
      });
      // It sends to all and waits for rank 1, which sends it nothing.
      expect_error(ErrorKind::evicted, {"masked this rank"},
                   [&] { latency.dispatch(load.x(2), load.ids()); });
    } else {
      ranks.until([&] { return ranks.stopped(2); });
      if (group.rank() == 1) latency.set_mask(2, true);
      const LatencyReceived received = latency.dispatch(load.x(2), load.ids());
      ranks.count_waits();
      if (group.rank() != 1) ++combining;
      load.expect_sums(load.combine(received).x, 2, {2});
      EXPECT_LT(ranks.waited(group.rank()), kDeadline * 3 / 2);
    }
    latency.rejoin();
    load.round(3, {});
  });
}

TEST(HostHeldUp, NobodyWaitsLongerForARankThatWakesUpEvicted) {
  wake_up_evicted(0);
}

TEST(HostHeldUp, NobodyWaitsLongerForARankThatWakesUpEvictedInAnotherDomain) {
  wake_up_evicted(2);
}

/// Rank 0 stops, and holds up some ranks and not others.
void held_up(const GroupConfig& given) {
  // Rank 1 alone masks rank 0, and waits in combine for the others, which wait in dispatch for
  // rank 0 until their deadline, and then compute past that of rank 1.
  GroupConfig config = given;
  config.deadline = kDeadline;
  std::atomic<bool> combining{false};
  MaskedRanks ranks;
  ranks.run(config, [&](Group& group, LatencyExchange& latency, Load& load) {
    load.round(1, {});
    ranks.count_waits();
    ranks.meet();
    if (group.rank() == 0) {
      ranks.meet();
      return;
    }
    if (group.rank() == 1) {
      latency.set_mask(0, true);
      ranks.until(
          [&] { return ranks.waited(2) > kDeadline / 4 && ranks.waited(3) > kDeadline / 4; });
    }
    const LatencyReceived received = latency.dispatch(load.x(2), load.ids());
    load.expect_received(received, 2, {0});
    if (group.rank() == 1) {
      ranks.count_waits();
      combining = true;
    } else {
      ranks.until([&] { return combining && ranks.waited(1) > kDeadline * 5 / 4; });
    }
    load.expect_sums(load.combine(received).x, 2, {0});
    EXPECT_EQ(latency.masked(), only(0));
    ranks.meet();
  });
}

TEST(HostHeldUp, RanksThatAreHeldUpDoNotMaskOneAnother) {
  held_up({});
}

TEST(HostHeldUp, RanksThatAreHeldUpDoNotMaskOneAnotherOverANetwork) {
  GroupConfig config;
  config.fabric = FabricKind::sim;
  held_up(config);
}

TEST(HostHeldUp, RanksThatAreHeldUpDoNotMaskOneAnotherInDomains) {
  GroupConfig config;
  config.domain_size = 2;
  config.network = FabricKind::sim;
  held_up(config);
}

/// Rank 2 gives no weights. Rank 1 has masked it and goes on to the rejoin; the others wait for it
/// until their deadline, which ends with that of the rejoin.
void rejoin_of_held_up(int domain_size) {
  GroupConfig config = with_deadline(kDeadline);
  config.domain_size = domain_size;
  std::atomic<bool> sent{false}, rejoining{false};
  MaskedRanks ranks;
  ranks.run(config, [&](Group& group, LatencyExchange& latency, Load& load) {
    load.round(1, {});
    const auto late = [&] { return rejoining && ranks.waited(1) > kDeadline * 5 / 4; };
    if (group.rank() == 2) {
      latency.dispatch(load.x(2), load.ids(), {.hook = true});
      sent = true;
      ranks.until(late);
    } else {
      if (group.rank() == 1) {
        ranks.until([&] { return sent.load(); });
        latency.set_mask(2, true);
      }
      const LatencyReceived received = latency.dispatch(load.x(2), load.ids());
      load.expect_sums(load.combine(received).x, 2, {2});
      if (group.rank() != 1) ranks.until(late);
    }
    if (group.rank() == 1) {
      ranks.count_waits();
      rejoining = true;
    }
    latency.rejoin();
    load.round(3, {});
  });
}

TEST(HostHeldUp, ARejoinWaitsForRanksThatAreHeldUp) {
  rejoin_of_held_up(0);
}

TEST(HostHeldUp, ARejoinWaitsForRanksThatAreHeldUpInAnotherDomain) {
  rejoin_of_held_up(2);
}

TEST(HostHeldUp, NobodyGivesUpARejoinToWhichAllHaveCome) {
  // Rank 0 stops when it has offered; rank 3 comes late, so that the others' deadlines end before
  // rank 0 answers. Then they must not give up: rank 0 and rank 3 have all answers.
  MaskedRanks ranks;
  ranks.run(with_deadline(kDeadline), [&](Group& group, LatencyExchange& latency, Load& load) {
    load.round(1, {});
    ranks.count_waits();
    ranks.meet();
    if (group.rank() == 0) {
      ranks.stop_in_wait([&] { return ranks.waited(1) > kDeadline * 5 / 4; });
    } else if (group.rank() == 3) {
      ranks.until([&] { return ranks.stopped(0) && ranks.waited(1) > kDeadline / 2; });
    }
    latency.rejoin();
    load.round(2, {});
  });
}

}  // namespace
}  // namespace ferry::host::test

// What the simulated network promises, and that it is as bad as it may be.
#include "fabric/sim/sim.hpp"

#include "fabric/test_ranks.hpp"

namespace ferry::fabric::test {
namespace {

constexpr Setting kSim{"sim", "sim", false};

/// True when in one of these rounds of 40 signals to 40 flags a later one was seen before an
/// earlier one; the first such round is the last.
bool sees_overtaking(const SimOptions& options, int rounds) {
  constexpr std::uint64_t kFlags = 40;
  std::atomic<bool> overtaken = false;
  run_ranks(kSim, 2, [&](Rank& me) {
    const auto fabric = me.make(options);
    const Segment mine = me.connect(*fabric, 64 * kFlags);
    for (int round = 1; round <= rounds; ++round) {
      me.barrier();
      if (overtaken) break;  // on both ranks: written only when this round's signals have come
      if (me.rank() == 0) {
        for (std::uint64_t f = 0; f < kFlags; ++f) {
          fabric->publish(1, {0, 64 * f}, std::uint64_t(round), 0, std::uint64_t(round));
        }
        continue;
      }
      bool seen = false;
      for (bool all = false; !all;) {
        all = true;
        // From the last to the first: an order that the source kept never shows a gap.
        bool later_is_there = false;
        for (std::uint64_t f = kFlags; f-- > 0;) {
          const bool there = flag_value(mine, 64 * f) >= std::uint64_t(round);
          if (!there && later_is_there) seen = true;
          later_is_there = later_is_there || there;
          all = all && there;
        }
        std::this_thread::yield();
      }
      if (seen) overtaken = true;
    }
    me.barrier();
  });
  return overtaken;
}

// On a busy machine the reader may sleep while all signals of a round come: so many rounds.
TEST(SimFabric, SignalsOvertakeEachOther) {
  EXPECT_TRUE(sees_overtaking({.max_delay_us = 2000}, 3000));
}

TEST(SimFabric, OrKeepTheirOrderIfTold) {
  EXPECT_FALSE(sees_overtaking({.max_delay_us = 2000, .reorder = false}, 30));
}

// One flag, many values, each with its own late bytes: no value may show before its bytes or skip
// back.
TEST(SimFabric, OneFlagGrowsInOrderAndBehindItsBytes) {
  run_ranks(kSim, 2, [](Rank& me) {
    const auto fabric = me.make({.max_delay_us = 1000});
    constexpr std::uint64_t kValues = 300;
    const Segment mine = me.connect(*fabric, 64 + 8 * kValues);
    if (me.rank() == 0) {
      for (std::uint64_t g = 1; g <= kValues; ++g) {
        fabric->put(1, {0, 56 + 8 * g}, &g, 8, g);
        fabric->publish(1, {0, 0}, g, 8, g);
      }
    } else {
      std::uint64_t last = 0;
      const auto end = Clock::now() + kDeadline;
      while (last < kValues && Clock::now() < end) {
        const std::uint64_t seen = flag_value(mine, 0);
        EXPECT_GE(seen, last);
        for (; last < seen; ++last) {
          std::uint64_t value = 0;
          std::memcpy(&value, mine.data + 64 + 8 * last, 8);
          ASSERT_EQ(value, last + 1);
        }
      }
      EXPECT_EQ(last, kValues);
    }
    me.barrier();
  });
}

TEST(SimFabric, AFlagWaitsForBytesSentAfterIt) {
  run_ranks(kSim, 2, [](Rank& me) {
    const auto fabric = me.make();
    const Segment mine = me.connect(*fabric, 4096);
    const Bytes data(100, std::byte{1});
    if (me.rank() == 0) {
      fabric->publish(1, {0, 0}, 1, 100, 7);  // counts bytes that are not even sent
      fabric->put(1, {0, 64}, data.data(), 60, 7);
      fabric->put(1, {0, 500}, data.data(), 100, 8);  // another tag does not count
    }
    me.barrier();
    if (me.rank() == 1) {
      EXPECT_FALSE(await_flag(mine, 0, 1, 30ms));
    }
    me.barrier();
    if (me.rank() == 0) {
      fabric->put(1, {0, 200}, data.data(), 40, 7);
    } else {
      EXPECT_TRUE(await_flag(mine, 0, 1));
    }
    me.barrier();
  });
}

// 20 KB over a link of 1 MB/s take 20 ms, and those of two sources over one target's link 40.
TEST(SimFabric, ALinkHasTheRateThatItWasGiven) {
  run_ranks(kSim, 3, [](Rank& me) {
    const auto fabric = me.make({.max_delay_us = 0, .bytes_per_us = 1});
    const Segment mine = me.connect(*fabric, 65536);
    const Bytes data(20'000, std::byte{1});
    const auto start = Clock::now();  // before anybody can send
    me.barrier();
    if (me.rank() > 0) {
      const auto place = 192 + 20'000 * std::uint64_t(me.rank());
      fabric->put(0, {0, place}, data.data(), data.size(), 1);
      fabric->publish(0, {0, 64 * std::uint64_t(me.rank())}, 1, data.size(), 1);
    } else {
      ASSERT_TRUE(await_flag(mine, 64, 1) && await_flag(mine, 128, 1));
      EXPECT_GE(Clock::now() - start, 40ms);
    }
    me.barrier();
  });
}

TEST(SimFabric, ASmallQueueHoldsBackButLosesNothing) {
  run_ranks(kSim, 3, [](Rank& me) {
    const auto fabric = me.make({.max_delay_us = 100, .queue_bytes = 4096});
    constexpr std::size_t kBytes = 9984;  // larger than the queue
    const Segment mine = me.connect(*fabric, 3 * (kBytes + 64));
    const auto base = std::size_t(me.rank()) * kBytes;
    for (std::uint64_t g = 1; g <= 10; ++g) {
      const Bytes data(kBytes, static_cast<std::byte>(g + std::uint64_t(me.rank())));
      for (int peer = 0; peer < 3; ++peer) {
        fabric->put(peer, {0, base}, data.data(), kBytes, g);
        fabric->publish(peer, {0, 3 * kBytes + 64 * std::size_t(me.rank())}, g, kBytes, g);
      }
      for (std::size_t source = 0; source < 3; ++source) {
        ASSERT_TRUE(await_flag(mine, 3 * kBytes + 64 * source, g));
        for (std::size_t i = 0; i < kBytes; ++i) {
          ASSERT_EQ(mine.data[source * kBytes + i], static_cast<std::byte>(g + source));
        }
      }
      me.barrier();  // before the next generation overwrites
    }
  });
}

TEST(SimFabric, AFailedRankVanishes) {
  run_ranks(kSim, 3, [](Rank& me) {
    const auto fabric = me.make({.fail_rank = 1, .fail_after_ops = 2});
    const Segment mine = me.connect(*fabric, 4096);
    const std::uint64_t word = 5;
    if (me.rank() == 1) {
      fabric->put(0, {0, 128}, &word, 8, 1);
      fabric->publish(0, {0, 0}, 1, 8, 1);  // the last that arrives
      fabric->publish(0, {0, 64}, 1, 0, 2);
      fabric->put(2, {0, 128}, &word, 8, 2);
      fabric->publish(2, {0, 0}, 1, 0, 2);
    }
    if (me.rank() == 0) {
      EXPECT_TRUE(await_flag(mine, 0, 1));
    }
    me.barrier();
    if (me.rank() != 1) {
      EXPECT_FALSE(await_flag(mine, me.rank() == 0 ? 64 : 0, 1, 30ms));
      EXPECT_EQ(fabric->peer_state(1), PeerState::dead);
      EXPECT_EQ(fabric->peer_state(2 - me.rank()), PeerState::alive);
    } else {
      EXPECT_EQ(fabric->peer_state(1), PeerState::alive);
    }
    me.barrier();
  });
}

TEST(SimFabric, AStalledRankLooksAlive) {
  run_ranks(kSim, 2, [](Rank& me) {
    const auto fabric = me.make({.stall_rank = 0, .stall_after_ops = 1});
    const Segment mine = me.connect(*fabric, 4096);
    if (me.rank() == 0) {
      fabric->publish(1, {0, 0}, 1, 0, 1);
      fabric->publish(1, {0, 64}, 1, 0, 1);
    } else {
      EXPECT_TRUE(await_flag(mine, 0, 1));
      EXPECT_FALSE(await_flag(mine, 64, 1, 30ms));
      EXPECT_EQ(fabric->peer_state(0), PeerState::alive);
    }
    me.barrier();
  });
}

TEST(SimFabric, EndsAtOnceWithPartsUnderWay) {
  const auto start = Clock::now();
  run_ranks(kSim, 2, [](Rank& me) {
    auto fabric = me.make({.max_delay_us = 60'000'000});
    me.connect(*fabric, 4096);
    const Bytes data(1000, std::byte{1});
    for (int i = 0; i < 50; ++i) fabric->put(1 - me.rank(), {0, 0}, data.data(), 1000, 1);
    fabric.reset();
  });
  EXPECT_LT(Clock::now() - start, 10s);
}

TEST(SimFabric, RefusesOptionsOutOfRange) {
  run_ranks(kSim, 2, [](Rank& me) {
    expect_error(ErrorKind::invalid_argument, {"fail_rank is 2", "-1 to 1"},
                 [&] { me.make({.fail_rank = 2}); });
    expect_error(ErrorKind::invalid_argument, {"stall_rank is -2"},
                 [&] { me.make({.stall_rank = -2}); });
  });
}

TEST(SimFabric, AllRanksMakeTheSameFabric) {
  run_ranks(kSim, 2, [](Rank& me) {
    expect_error(ErrorKind::mismatch, {"same kind of fabric"}, [&] {
      if (me.rank() == 0) make_local_fabric(me.bootstrap, kDeadline);
      if (me.rank() == 1) make_sim_fabric(me.bootstrap, {}, kDeadline);
    });
  });
}

}  // namespace
}  // namespace ferry::fabric::test

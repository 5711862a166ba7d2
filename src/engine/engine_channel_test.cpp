// Channels: what a peer says is checked, and who is named when several ranks leave.
#include "engine/channel.hpp"

#include <latch>

#include "core/layout.hpp"
#include "engine/test_groups.hpp"
#include "fabric/domains/domain_fabric.hpp"
#include "fabric/local/local.hpp"
#include "fabric/sim/sim.hpp"
#include "platform/death_watch.hpp"
#include "platform/posix/test_stderr.hpp"

namespace ferry::engine::test {
namespace {

constexpr std::size_t kMessage = sizeof(StepMessage) + fabric::kMaxHandleBytes;

/// One rank: a local fabric, its ranks in domains of `domain_size` if that is not 0, with its
/// control segment attached everywhere, and a channel on it.
struct ChannelSeat {
  GroupConfig config;
  std::shared_ptr<Memory> memory;
  ControlLayout layout;
  fabric::Segment control;
  std::unique_ptr<Channel> channel;

  ChannelSeat(Bootstrap& bootstrap, std::chrono::nanoseconds deadline, int domain_size)
      : ChannelSeat(bootstrap, deadline,
                    fabric::make_domain_fabric(Domains::blocks(bootstrap.size(), domain_size),
                                               fabric::make_local_fabric(bootstrap, 20s))) {}

  ChannelSeat(Bootstrap& bootstrap, std::chrono::nanoseconds deadline,
              std::unique_ptr<fabric::Fabric> fabric) {
    config.deadline = deadline;
    memory = std::make_shared<Memory>(std::move(fabric));
    layout = make_control_layout(bootstrap.size(), kMessage);
    control = memory->fabric->register_memory(layout.bytes);
    const auto handles = bootstrap.all_gather(control.handle, 20s);
    for (int peer = 0; peer < bootstrap.size(); ++peer) {
      if (peer == bootstrap.rank()) continue;
      memory->fabric->attach(peer, 0, layout.bytes, handles[static_cast<std::size_t>(peer)]);
    }
    bootstrap.all_gather({}, 20s);
    channel = std::make_unique<Channel>(memory, config, control, layout);
  }
};

void with_seats(int ranks, const std::function<void(Channel&, std::size_t)>& body,
                std::chrono::nanoseconds deadline = 20s, int domain_size = 0) {
  const auto bootstraps = thread_bootstrap(ranks);
  on_ranks(ranks, [&](int r) {
    ChannelSeat seat(*bootstraps[static_cast<std::size_t>(r)], deadline, domain_size);
    body(*seat.channel, seat.layout.bytes);
  });
}

TEST(Channel, PlacesOfAPeerAreCheckedBeforeUse) {
  struct Place {
    std::uint32_t segment;
    std::uint64_t offset, bytes;
    bool good;
  };
  const std::uint64_t end = make_control_layout(2, kMessage).bytes;
  for (const Place& place :
       {Place{0, 0, end, true}, Place{0, end, 0, true}, Place{0, 64, end - 64, true},
        Place{0, 64, end - 63, false}, Place{0, end + 64, 0, false}, Place{1, 0, 0, false},
        Place{0, 2, 8, false}, Place{0, ~0ull - 63, 128, false}, Place{0, 64, ~0ull - 32, false},
        Place{99999, 0, 8, false}}) {
    with_seats(2, [&](Channel& channel, std::size_t) {
      StepMessage head;
      head.segment = place.segment;
      head.offset = place.offset;
      channel.swap("test", head);
      if (channel.rank() != 0) return;
      const StepMessage theirs = channel.head(1);
      const auto check = [&] {
        channel.checked("test: rows", 1, {theirs.segment, theirs.offset}, place.bytes);
      };
      if (place.good) {
        EXPECT_NO_THROW(check());
        EXPECT_NO_THROW(channel.check_usable("later"));
      } else {
        expect_error(ErrorKind::mismatch, {"rank 1", "test: rows", "segment"}, check);
        expect_error(ErrorKind::mismatch, {"later", "rank 1"},
                     [&] { channel.check_usable("later"); });
      }
    });
  }
}

TEST(Channel, ARankThatLeftInPeaceDoesNotHideOneThatIsMissed) {
  std::latch left(3);
  with_seats(3, [&](Channel& channel, std::size_t) {
    channel.swap("together", {});
    if (channel.rank() < 2) {
      if (channel.rank() == 0) channel.deliver(2, 0);  // rank 0 has done its part, rank 1 has not
      channel.leave();
      left.arrive_and_wait();
      return;
    }
    left.arrive_and_wait();
    const auto start = Clock::now();
    expect_error(ErrorKind::peer_left, {"rank 1", "destroyed"},
                 [&] { channel.await_delivered("rows", 1); });
    EXPECT_LT(Clock::now() - start, 10s);
  });
}

TEST(Channel, NewsOfARankThatLeftReachesThoseWhoWaitForTheReporter) {
  with_seats(3, [&](Channel& channel, std::size_t) {
    channel.swap("together", {});
    const auto start = Clock::now();
    if (channel.rank() == 0) {
      channel.deliver(2, 0);
      channel.leave();
    } else if (channel.rank() == 1) {  // waits for rank 0
      expect_error(ErrorKind::peer_left, {"rank 0"}, [&] { channel.await_delivered("rows", 0); });
    } else {  // waits for rank 1 alone
      try {
        channel.await_delivered("rows", 1);
        ADD_FAILURE() << "rank 1 never delivered";
      } catch (const Error& e) {
        EXPECT_EQ(e.peer(), 0) << e.what();
      }
    }
    EXPECT_LT(Clock::now() - start, 10s);
  });
}

/// Ranks 1 and 3 have ended the call; rank 0, which stood still, has not yet told rank 2 that its
/// rows are there.
TEST(Channel, ACallThatAllRanksHaveMadeEndsWellAfterOneCallsRegroup) {
  for (const int domain_size : {0, 1}) {
    std::latch stopped(1), passed_on(2), met(4);
    with_seats(
        4,
        [&](Channel& channel, std::size_t) {
          const int rank = channel.rank();
          const auto makes_the_next_call = [&] {  // which rank 1 never makes
            const auto start = Clock::now();
            expect_error(ErrorKind::peer_failed, {"rank 1 called regroup"},
                         [&] { channel.swap("alone", {}); });
            EXPECT_LT(Clock::now() - start, 10s);
          };
          channel.swap("together", {});
          for (int i = 0; i < 4; ++i) {
            if (rank != 0 || i != 2) channel.deliver(i, 0);
          }
          if (rank == 0) {
            passed_on.arrive_and_wait();
            std::this_thread::sleep_for(100ms);  // longer than a time slice of a wait
            channel.deliver(2, 0);
          }
          channel.await_delivered("rows");
          if (rank == 1) {
            channel.stop(true);
            stopped.count_down();
          } else if (rank == 3) {
            stopped.wait();
            makes_the_next_call();
            passed_on.count_down();
          } else {
            makes_the_next_call();
          }
          met.arrive_and_wait();
        },
        20s, domain_size);
  }
}

/// Rank 0 is stopped in the call that rank 1 has ended: rank 2 must not be late for the regroup.
TEST(Channel, AWaitEndsSoonAfterARegroupWhateverItWaitsFor) {
  std::latch met(3);
  with_seats(3, [&](Channel& channel, std::size_t) {
    channel.swap("together", {});
    channel.deliver(1, 0);
    if (channel.rank() != 0) channel.deliver(2, 0);
    if (channel.rank() == 1) {
      channel.deliver(0, 0);
      channel.await_delivered("rows");
      channel.stop(true);
    } else if (channel.rank() == 2) {
      const auto start = Clock::now();
      expect_error(ErrorKind::peer_failed, {"rank 1 called regroup"},
                   [&] { channel.await_delivered("rows", 0); });
      EXPECT_LT(Clock::now() - start, 10s);
    }
    met.arrive_and_wait();
  });
}

TEST(Channel, NewsOfARankThatCalledRegroupReachesThoseWhoWaitForTheReporter) {
  std::latch met(3);
  with_seats(3, [&](Channel& channel, std::size_t) {
    channel.swap("together", {});
    const auto start = Clock::now();
    if (channel.rank() == 0) {
      channel.stop(false);  // in the middle of its call
    } else {                // rank 1 waits for rank 0, rank 2 for rank 1 alone
      expect_error(ErrorKind::peer_failed, {"rank 0 called regroup"},
                   [&] { channel.await_delivered("rows", channel.rank() - 1); });
    }
    EXPECT_LT(Clock::now() - start, 10s);
    met.arrive_and_wait();
  });
}

TEST(Channel, TheDeadlineIsOfEachWaitAndNamesTheRankThatDoesNotWait) {
  std::latch over(3);
  with_seats(
      3,
      [&](Channel& channel, std::size_t) {
        channel.swap("together", {});
        const auto start = Clock::now();
        if (channel.rank() == 0) {
          over.arrive_and_wait();  // alive, but elsewhere
          return;
        }
        if (channel.rank() == 1) std::this_thread::sleep_for(150ms);
        expect_error(ErrorKind::deadline, {"rank 0"}, [&] { channel.swap("again", {}); });
        EXPECT_GE(Clock::now() - start, 290ms);
        EXPECT_LT(Clock::now() - start, 10s);
        over.arrive_and_wait();
      },
      300ms);
}

/// The rank that this wait's deadline names.
int named(Channel& channel, const std::function<void()>& wait) {
  try {
    wait();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::deadline) << e.what();
    return e.peer();
  }
  ADD_FAILURE() << "rank " << channel.rank() << ": no error";
  return -1;
}

// Rank 0 waits for rank 1, which began to wait for rank 2 a little later: its deadline comes first.
TEST(Channel, WhoWaitsForARankThatWaitsHearsWhomThatOneMisses) {
  std::latch over(3);
  with_seats(
      3,
      [&](Channel& channel, std::size_t) {
        channel.swap("together", {});
        if (channel.rank() == 1) std::this_thread::sleep_for(100ms);
        if (channel.rank() < 2) {
          EXPECT_EQ(named(channel, [&] { channel.await_delivered("rows", channel.rank() + 1); }),
                    2);
        }
        over.arrive_and_wait();
      },
      400ms);
}

// Ranks 0 and 1 wait for ranks 2 and 3 of another domain, of which they do not see that rank 2
// waits for rank 3.
TEST(Channel, AcrossDomainsWhoeverSeesMoreSaysWhoIsLate) {
  std::latch over(4);
  with_seats(
      4,
      [&](Channel& channel, std::size_t) {
        channel.swap("together", {});
        if (channel.rank() < 2) {
          for (int peer = 0; peer < 2; ++peer) channel.deliver(peer, 0);
          EXPECT_EQ(named(channel, [&] { channel.await_delivered("rows"); }), 3);
        } else if (channel.rank() == 2) {
          std::this_thread::sleep_for(60ms);
          EXPECT_EQ(named(channel, [&] { channel.await_delivered("rows", 3); }), 3);
        }
        over.arrive_and_wait();
      },
      800ms, 2);
}

// The same of rank 0, which lacks rank 2's part alone.
TEST(Channel, AcrossDomainsARankThatAloneIsMissingMayBeHeldUp) {
  std::latch over(4);
  with_seats(
      4,
      [&](Channel& channel, std::size_t) {
        channel.swap("together", {});
        if (channel.rank() == 2) std::this_thread::sleep_for(60ms);
        if (channel.rank() % 2 == 0) {
          const int awaited = channel.rank() == 0 ? 2 : 3;
          EXPECT_EQ(named(channel, [&] { channel.await_delivered("rows", awaited); }), 3);
        }
        over.arrive_and_wait();
      },
      800ms, 2);
}

// Each rank but the last waits for the next one, and began to later than the one before: rank 0's
// time is over when rank 1, and rank 2, still have some. None sees another.
TEST(Channel, AcrossDomainsTheLastOfThoseWhoWaitForEachOtherNamesTheLateRank) {
  constexpr int kRanks = 4;
  constexpr auto kDeadline = 1000ms;
  std::latch over(kRanks);
  with_seats(
      kRanks,
      [&](Channel& channel, std::size_t) {
        channel.swap("together", {});
        std::this_thread::sleep_for(channel.rank() * kDeadline * 4 / 5);
        if (channel.rank() < kRanks - 1) {
          const int next = channel.rank() + 1;
          EXPECT_EQ(named(channel, [&] { channel.await_delivered("rows", next); }), kRanks - 1);
        }
        over.arrive_and_wait();
      },
      kDeadline, 1);
}

// Ranks that wait for each other, because they make different calls, and one that waits for them.
TEST(Channel, AcrossDomainsRanksThatWaitForEachOtherAreNamed) {
  std::latch over(3);
  with_seats(
      3,
      [&](Channel& channel, std::size_t) {
        channel.swap("together", {});
        const int awaited = channel.rank() == 1 ? 2 : 1;
        EXPECT_NE(named(channel, [&] { channel.await_delivered("rows", awaited); }), 0);
        over.arrive_and_wait();
      },
      300ms, 1);
}

// A wait that has ended holds up nobody.
TEST(Channel, AcrossDomainsARankThatHasWaitedIsNamed) {
  std::latch over(3);
  with_seats(
      3,
      [&](Channel& channel, std::size_t) {
        channel.swap("together", {});
        if (channel.rank() == 0) {
          EXPECT_EQ(named(channel, [&] { channel.await_delivered("rows", 1); }), 1);
        } else if (channel.rank() == 1) {
          channel.await_delivered("rows", 2);
        } else {
          std::this_thread::sleep_for(400ms);  // rank 1 has said that it waits
          channel.deliver(1, 0);
        }
        over.arrive_and_wait();
      },
      1000ms, 1);
}

// The failure broadcast that rank 1 leaves overtakes what rank 1 raised before: chunks, then a
// delivery.
TEST(Channel, AcrossDomainsWhatARankSentBeforeItLeftIsAwaited) {
  with_seats(
      2,
      [&](Channel& channel, std::size_t) {
        channel.swap("together", {});
        constexpr int kChunks = 4;  // more than there were generations
        if (channel.rank() == 0) {
          for (int i = 0; i < kChunks; ++i) channel.await_chunk("chunks", 1);
          channel.await_delivered("rows", 1);
          return;
        }
        for (int i = 0; i + 1 < kChunks; ++i) channel.send_chunk(0, 0);
        channel.leave();
        std::this_thread::sleep_for(200ms);
        channel.send_chunk(0, 0);
        std::this_thread::sleep_for(1200ms);
        channel.deliver(0, 0);
      },
      20s, 1);
}

// Ranks that wait for the dead one say so, and wake nobody.
TEST(Channel, AWaitPollsOftenAfterADeathOfAnotherRank) {
  with_seats(2, [&](Channel& channel, std::size_t) {
    channel.swap("together", {});
    if (channel.rank() == 1) return;
    alignas(kLineBytes) std::byte flags[2 * kLineBytes] = {};
    const Awaited nobody{{flags, kLineBytes, 2}, 0};
    GroupWatch watch(channel, nobody, "test");
    const auto settle = [&] {
      for (int polls = 0; polls < 7; ++polls) {
        std::this_thread::sleep_for(std::chrono::nanoseconds(watch.slice_ns()));
        EXPECT_TRUE(watch.check().ok());
      }
      return watch.slice_ns();
    };
    const std::uint64_t usual = settle();
    DeathWatch::tell();
    EXPECT_EQ(watch.slice_ns(), 1u);
    EXPECT_TRUE(watch.check().ok());
    EXPECT_EQ(watch.slice_ns(), usual / 64);
    EXPECT_EQ(settle(), usual);
  });
}

TEST(Channel, ALongWaitSaysForWhom) {
  ::setenv("FERRY_WAIT_NOTICE", "0.05", 1);
  const ferry::test::Stderr err;
  with_seats(
      4,
      [&](Channel& channel, std::size_t) {
        const std::string said = " s for other ranks (together): ranks 1-3 did not come yet; ";
        if (channel.rank() > 0) {
          EXPECT_TRUE(err.comes("ferry: rank 0 has waited ")) << err.text();
          EXPECT_TRUE(err.comes(said)) << err.text();
        }
        channel.swap("together", {});
      },
      40s, 0);
  ::unsetenv("FERRY_WAIT_NOTICE");
}

TEST(Channel, AcrossDomainsARankThatLeftTooEarlyIsNamedAtTheDeadline) {
  with_seats(
      2,
      [&](Channel& channel, std::size_t) {
        channel.swap("together", {});
        if (channel.rank() == 1) {
          channel.leave();
          return;
        }
        expect_error(ErrorKind::peer_left, {"rank 1", "destroyed"},
                     [&] { channel.await_delivered("rows", 1); });
      },
      400ms, 1);
}

// Whoever waits for it need not hear from others that it is the one.
TEST(Channel, AcrossDomainsTheDeadlineOfARankThatLeftIsNotExtended) {
  const auto bootstraps = thread_bootstrap(3);
  std::latch asked(3), left(3), over(3);
  on_ranks(3, [&](int r) {
    ChannelSeat seat(*bootstraps[index(r)], 20s, 1);
    Channel& channel = *seat.channel;
    channel.swap("together", {});
    const protocol::FlagArray flags{seat.control.data + seat.layout.delivered, kLineBytes, 3};
    if (r == 0) {
      EXPECT_GT(channel.grace({flags, 1, 1}).count(), 0);
    }
    asked.arrive_and_wait();
    if (r == 1) channel.leave();
    left.arrive_and_wait();
    if (r == 0) {
      EXPECT_EQ(channel.grace({flags, 1, 1}).count(), 0);
      EXPECT_GT(channel.grace({flags, 1, 2}).count(), 0);  // is not awaited from the one that left
    }
    over.arrive_and_wait();
  });
}

// It leaves in the middle of a call, and its connections end before the deadline.
TEST(Channel, AcrossDomainsARankThatLeftAndEndedHasLeft) {
  const auto bootstraps = thread_bootstrap(2);
  std::latch heard(2), ended(2), over(2);
  on_ranks(2, [&](int r) {
    constexpr int kChunks = 10, kOperations = 1000;
    Bootstrap& bootstrap = *bootstraps[index(r)];
    const fabric::SimOptions options{
        .seed = kSeed, .reorder = false, .fail_rank = 1, .fail_after_ops = kOperations};
    ChannelSeat seat(bootstrap, 20s, fabric::make_sim_fabric(bootstrap, options, 20s));
    Channel& channel = *seat.channel;
    channel.swap("together", {});
    if (r == 1) {
      channel.leave();
      for (int i = 0; i < kChunks; ++i) channel.send_chunk(0, 0);
      heard.arrive_and_wait();
      for (int i = 0; i < kOperations; ++i) channel.send_chunk(0, 0);
      ended.arrive_and_wait();
    } else {
      for (int i = 0; i < kChunks; ++i) channel.await_chunk("chunks", 1);  // came behind the news
      heard.arrive_and_wait();
      ended.arrive_and_wait();
      expect_error(ErrorKind::peer_left, {"rank 1", "destroyed"},
                   [&] { channel.await_delivered("rows", 1); });
    }
    over.arrive_and_wait();
  });
}

}  // namespace
}  // namespace ferry::engine::test

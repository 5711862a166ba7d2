// What only processes can do: die, be stopped, fork, leave names behind.
#include <csignal>
#include <filesystem>
#include <random>

#include "fabric/shm/handshake.hpp"
#include "fabric/shm/names.hpp"
#include "fabric/test_names.hpp"
#include "fabric/test_ranks.hpp"
#include "platform/posix/test_rights.hpp"

namespace ferry::fabric::test {
namespace {

constexpr Setting kShmProcesses{"shm", "shm", true};

std::set<std::int64_t> pids_of(Processes& processes, int ranks) {
  std::set<std::int64_t> pids;
  for (int r = 0; r < ranks; ++r) pids.insert(processes[r].pid());
  return pids;
}

void die() {
  std::raise(SIGKILL);
}

TEST(ShmFabric, NamesAreForTheOwnerAndGoWithTheSeal) {
  run_ranks(kShmProcesses, 2, [](Rank& me) {
    ferry::test::withhold_rights();
    const auto fabric = me.make();
    const Segment mine = fabric->register_memory(5000);
    const auto names = own_names();
    ASSERT_EQ(names.size(), 1u);
    const std::string file = "/dev/shm/" + *names.begin();
    EXPECT_EQ(std::filesystem::status(file).permissions(),
              static_cast<std::filesystem::perms>(0600));
    EXPECT_EQ(std::filesystem::file_size(file), 8192u);
    const auto handles = me.bootstrap.all_gather(mine.handle, kDeadline, {});
    fabric->attach(1 - me.rank(), 0, 5000, handles[std::size_t(1 - me.rank())]);
    me.barrier();
    fabric->seal(mine.id);
    EXPECT_TRUE(own_names().empty());
    me.barrier();
  });
}

TEST(ShmFabric, NothingIsLeftByARankThatSealsNothing) {
  run_ranks(kShmProcesses, 2, [](Rank& me) {
    auto fabric = me.make();
    for (int i = 0; i < 3; ++i) fabric->register_memory(4096);
    EXPECT_EQ(own_names().size(), 3u);
    fabric.reset();
    EXPECT_TRUE(own_names().empty());
    me.barrier();
  });
}

TEST(ShmFabric, OneRankNeedsNoName) {
  run_ranks(kShmProcesses, 1, [](Rank& me) {
    const auto fabric = me.make();
    fabric->register_memory(4096);
    EXPECT_TRUE(own_names().empty());
  });
}

TEST(ShmFabric, TooManyOpenNamesAreRefused) {
  run_ranks(kShmProcesses, 2, [](Rank& me) {
    const auto fabric = me.make();
    for (int i = 0; i < 64; ++i) fabric->register_memory(1);
    expect_error(ErrorKind::exhausted, {"64 segments", "attach"},
                 [&] { fabric->register_memory(1); });
    fabric->seal(5);
    EXPECT_EQ(fabric->register_memory(1).id, 64u);
    me.barrier();
  });
}

TEST(ShmFabric, ADeadPeerIsSeenBeforeItsParentWaitsForIt) {
  Processes ranks(kShmProcesses, 3, [](Rank& me) {
    const auto fabric = me.make();
    me.connect(*fabric, 4096);
    me.barrier();
    if (me.rank() == 1) {
      me.board.notes[0] = nanoseconds_now();
      die();
    }
    EXPECT_TRUE(eventually([&] { return fabric->peer_state(1) == PeerState::dead; }));
    const auto seen = nanoseconds_now();
    EXPECT_LT(std::chrono::nanoseconds(seen - me.board.notes[0]), 100ms);
    EXPECT_EQ(fabric->peer_state(me.rank()), PeerState::alive);
    EXPECT_EQ(fabric->peer_state(2 - me.rank()), PeerState::alive);  // the other survivor
    // Its memory stays: nothing faults.
    std::memset(fabric->pointer(1, 0), 1, 4096);
    fabric->publish(1, {0, 0}, 1, 0, 1);
    // Both survivors poll before one of them leaves.
    me.board.notes[1].fetch_add(1);
    EXPECT_TRUE(eventually([&] { return me.board.notes[1] == 2; }));
  });
  ranks.expect_success({1});  // waits for the zombie only when all have ended
}

TEST(ShmFabric, ADeadPeerIsSeenAfterItWasReaped) {
  Processes ranks(kShmProcesses, 2, [](Rank& me) {
    const auto fabric = me.make();
    me.barrier();
    if (me.rank() == 1) die();
    EXPECT_TRUE(eventually([&] { return me.board.notes[0] == 1; }));  // reaped
    EXPECT_EQ(fabric->peer_state(1), PeerState::dead);
    EXPECT_EQ(fabric->peer_state(1), PeerState::dead);
  });
  EXPECT_TRUE(ranks.reap(1).killed);
  ranks.board().notes[0] = 1;
  ranks.expect_success();
}

TEST(ShmFabric, AStoppedPeerIsAlive) {
  Processes ranks(kShmProcesses, 2, [](Rank& me) {
    const auto fabric = me.make();
    me.barrier();
    me.board.notes[0].fetch_add(1);
    if (me.rank() == 1) {
      EXPECT_TRUE(eventually([&] { return me.board.notes[2] == 1; }));
      return;
    }
    EXPECT_TRUE(eventually([&] { return me.board.notes[1] == 1; }));  // stopped
    EXPECT_EQ(fabric->peer_state(1), PeerState::alive);
    me.board.notes[2] = 1;
  });
  EXPECT_TRUE(eventually([&] { return ranks.board().notes[0] == 2; }));
  ranks[1].signal(SIGSTOP);
  ranks.board().notes[1] = 1;
  EXPECT_TRUE(eventually([&] { return ranks.ended(0); }));
  ranks[1].signal(SIGCONT);
  ranks.expect_success();
}

// Ranks register, attach and seal all the time; one is killed at any moment. Survivors that forget
// it, or only leave, remove what it had.
TEST(ShmFabric, KilledAtAnyMomentNothingIsLeft) {
  std::mt19937 random(kSeed);
  int rounds_with_names = 0;
  for (int round = 0; round < 24; ++round) {
    SCOPED_TRACE("round " + std::to_string(round) + " seed " + std::to_string(kSeed));
    const bool forgets = round % 2 == 0;
    Processes ranks(kShmProcesses, 3, [forgets](Rank& me) {
      const auto fabric = me.make();
      me.board.notes[0].fetch_add(1);
      const auto died = [&] { return fabric->peer_state(2) == PeerState::dead; };
      const OnWait poll = [&] {
        if (me.rank() != 2 && died()) throw Error(ErrorKind::peer_failed, "dead");
      };
      try {
        for (std::size_t bytes = 4096;; bytes = bytes % 1'000'000 + 40'000) {
          const Segment a = fabric->register_memory(bytes);
          const Segment b = fabric->register_memory(bytes);
          for (const Segment& mine : {a, b}) {
            const auto handles = me.bootstrap.all_gather(mine.handle, kDeadline, poll);
            for (int peer = 0; peer < 3; ++peer) {
              fabric->attach(peer, mine.id, bytes, handles[std::size_t(peer)]);
            }
          }
          me.bootstrap.all_gather({}, kDeadline, poll);
          fabric->seal(a.id);
          fabric->seal(b.id);
        }
      } catch (const Error& e) {
        if (e.kind() != ErrorKind::peer_failed) throw;
      }
      me.board.notes[1].fetch_add(1);
      EXPECT_TRUE(eventually([&] { return me.board.notes[2] == 1; }));  // the parent counted
      if (!forgets || me.rank() != 0) return;
      fabric->forget(2);
      EXPECT_TRUE(names_of({me.board.notes[3].load()}).empty());
    });
    const auto pids = pids_of(ranks, 3);
    ranks.board().notes[3] = ranks[2].pid();
    EXPECT_TRUE(eventually([&] { return ranks.board().notes[0] == 3; }));
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 20'000));
    ranks[2].kill();
    EXPECT_TRUE(eventually([&] { return ranks.board().notes[1] == 2; }));
    if (!names_of({ranks[2].pid()}).empty()) ++rounds_with_names;
    ranks.board().notes[2] = 1;
    ranks.expect_success({2});
    EXPECT_TRUE(names_of(pids).empty()) << *names_of(pids).begin();
  }
  EXPECT_GT(rounds_with_names, 0) << "no kill hit the window: the test shows nothing";
}

TEST(ShmFabric, WhatAWhollyKilledJobLeftGoesWithTheNextJob) {
  Processes job(kShmProcesses, 2, [](Rank& me) {
    const auto fabric = me.make();
    fabric->register_memory(4096);
    me.barrier();
    die();
  });
  const auto pids = pids_of(job, 2);
  job.expect_success({0, 1});
  EXPECT_EQ(names_of(pids).size(), 2u);
  Processes other(kShmProcesses, 2, [](Rank& me) {
    const auto fabric = me.make();
    fabric->register_memory(4096);
    me.board.notes[0].fetch_add(1);
    EXPECT_TRUE(eventually([&] { return me.board.notes[1] == 1; }));
  });
  EXPECT_TRUE(eventually([&] { return other.board().notes[0] == 2; }));
  EXPECT_TRUE(names_of(pids).empty());
  EXPECT_EQ(names_of(pids_of(other, 2)).size(), 2u);  // but nothing of those who live
  remove_orphans();
  EXPECT_EQ(names_of(pids_of(other, 2)).size(), 2u);
  other.board().notes[1] = 1;
  other.expect_success();
}

TEST(ShmFabric, AForkedChildRemovesNothing) {
  run_ranks(kShmProcesses, 2, [](Rank& me) {
    auto fabric = me.make();
    fabric->register_memory(4096);
    ferry::test::Child child([&] {
      fabric->seal(0);
      fabric->forget(1 - me.rank());
      fabric.reset();
      return 0;
    });
    EXPECT_TRUE(child.wait().good());
    EXPECT_EQ(own_names().size(), 1u);
    me.barrier();
  });
}

TEST(ShmFabric, RanksOfAnotherHostAreRefused) {
  class Elsewhere final : public Bootstrap {
   public:
    int rank() const override { return 0; }
    int size() const override { return 2; }
    std::vector<Bytes> all_gather(std::span<const std::byte> mine, std::chrono::nanoseconds,
                                  const OnWait&) override {
      ShmHandshake other{.key = {}, .identity = this_identity()};
      other.identity.boot_id = "another";
      other.identity.host = "far";
      return {Bytes(mine.begin(), mine.end()), to_bytes(other)};
    }
  } elsewhere;
  expect_error(ErrorKind::unsupported, {"rank 0", "rank 1", "far", "different hosts"},
               [&] { make_shm_fabric(elsewhere, kDeadline); });
}

}  // namespace
}  // namespace ferry::fabric::test

// What only processes can do: die, be stopped, fork, fill /dev/shm, leave names behind.
#include <dirent.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include <random>
#include <set>

#include "fabric/shm/greeting.hpp"
#include "fabric/shm/names.hpp"
#include "fabric/shm/object.hpp"
#include "fabric/test_ranks.hpp"

namespace ferry::fabric::test {
namespace {

constexpr Setting kShm{"shm", "shm", true};

/// Names in /dev/shm whose owner is one of `pids`.
std::set<std::string> names_of(const std::set<pid_t>& pids) {
  std::set<std::string> names;
  DIR* folder = opendir("/dev/shm");
  if (folder == nullptr) return names;
  while (const dirent* entry = readdir(folder)) {
    const auto owner = owner_of(entry->d_name);
    if (owner && pids.count(static_cast<pid_t>(owner->pid)) > 0) names.insert(entry->d_name);
  }
  closedir(folder);
  return names;
}

std::set<pid_t> pids_of(const Processes& processes, int ranks) {
  std::set<pid_t> pids;
  for (int r = 0; r < ranks; ++r) pids.insert(processes.pid(r));
  return pids;
}

void die() {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

TEST(ShmFabric, NamesAreForTheOwnerAndGoWithTheSeal) {
  run_ranks(kShm, 2, [](Rank& me) {
    umask(0777);  // takes even the owner's rights from new files
    const auto fabric = me.make();
    const Segment mine = fabric->register_memory(5000);
    const auto names = names_of({getpid()});
    ASSERT_EQ(names.size(), 1u);
    struct stat info{};
    ASSERT_EQ(stat(("/dev/shm/" + *names.begin()).c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 07777, 0600u);
    EXPECT_EQ(info.st_size, 8192);
    const auto handles = me.bootstrap.all_gather(mine.handle, kDeadline, {});
    fabric->attach(1 - me.rank(), 0, 5000, handles[std::size_t(1 - me.rank())]);
    me.barrier();
    fabric->seal(mine.id);
    EXPECT_TRUE(names_of({getpid()}).empty());
    me.barrier();
  });
}

TEST(ShmFabric, NothingIsLeftByARankThatSealsNothing) {
  run_ranks(kShm, 2, [](Rank& me) {
    auto fabric = me.make();
    for (int i = 0; i < 3; ++i) fabric->register_memory(4096);
    EXPECT_EQ(names_of({getpid()}).size(), 3u);
    fabric.reset();
    EXPECT_TRUE(names_of({getpid()}).empty());
    me.barrier();
  });
}

TEST(ShmFabric, OneRankNeedsNoName) {
  run_ranks(kShm, 1, [](Rank& me) {
    const auto fabric = me.make();
    fabric->register_memory(4096);
    EXPECT_TRUE(names_of({getpid()}).empty());
  });
}

TEST(ShmFabric, TooManyOpenNamesAreRefused) {
  run_ranks(kShm, 2, [](Rank& me) {
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
  Processes ranks(kShm, 3, [](Rank& me) {
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
    // Both survivors look before one of them leaves.
    me.board.notes[1].fetch_add(1);
    EXPECT_TRUE(eventually([&] { return me.board.notes[1] == 2; }));
  });
  ranks.expect_success({1});  // waits for the zombie only when all have ended
}

TEST(ShmFabric, ADeadPeerIsSeenAfterItWasReaped) {
  Processes ranks(kShm, 2, [](Rank& me) {
    const auto fabric = me.make();
    me.barrier();
    if (me.rank() == 1) die();
    EXPECT_TRUE(eventually([&] { return me.board.notes[0] == 1; }));  // reaped
    EXPECT_EQ(fabric->peer_state(1), PeerState::dead);
    EXPECT_EQ(fabric->peer_state(1), PeerState::dead);
  });
  EXPECT_TRUE(WIFSIGNALED(ranks.reap(1)));
  ranks.board().notes[0] = 1;
  ranks.expect_success();
}

TEST(ShmFabric, AStoppedPeerIsAlive) {
  Processes ranks(kShm, 2, [](Rank& me) {
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
  kill(ranks.pid(1), SIGSTOP);
  ranks.board().notes[1] = 1;
  EXPECT_TRUE(eventually([&] { return ranks.ended(0); }));
  kill(ranks.pid(1), SIGCONT);
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
    Processes ranks(kShm, 3, [forgets](Rank& me) {
      const auto fabric = me.make();
      me.board.notes[0].fetch_add(1);
      const auto died = [&] { return fabric->peer_state(2) == PeerState::dead; };
      const OnWait look = [&] {
        if (me.rank() != 2 && died()) throw Error(ErrorKind::peer_failed, "dead");
      };
      try {
        for (std::size_t bytes = 4096;; bytes = bytes % 1'000'000 + 40'000) {
          const Segment a = fabric->register_memory(bytes);
          const Segment b = fabric->register_memory(bytes);
          for (const Segment& mine : {a, b}) {
            const auto handles = me.bootstrap.all_gather(mine.handle, kDeadline, look);
            for (int peer = 0; peer < 3; ++peer) {
              fabric->attach(peer, mine.id, bytes, handles[std::size_t(peer)]);
            }
          }
          me.bootstrap.all_gather({}, kDeadline, look);
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
      EXPECT_TRUE(names_of({static_cast<pid_t>(me.board.notes[3])}).empty());
    });
    const auto pids = pids_of(ranks, 3);
    ranks.board().notes[3] = ranks.pid(2);
    EXPECT_TRUE(eventually([&] { return ranks.board().notes[0] == 3; }));
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 20'000));
    kill(ranks.pid(2), SIGKILL);
    EXPECT_TRUE(eventually([&] { return ranks.board().notes[1] == 2; }));
    if (!names_of({ranks.pid(2)}).empty()) ++rounds_with_names;
    ranks.board().notes[2] = 1;
    ranks.expect_success({2});
    EXPECT_TRUE(names_of(pids).empty()) << *names_of(pids).begin();
  }
  EXPECT_GT(rounds_with_names, 0) << "no kill hit the window: the test shows nothing";
}

TEST(ShmFabric, WhatAWhollyKilledJobLeftGoesWithTheNextJob) {
  Processes job(kShm, 2, [](Rank& me) {
    const auto fabric = me.make();
    fabric->register_memory(4096);
    me.barrier();
    die();
  });
  const auto pids = pids_of(job, 2);
  job.expect_success({0, 1});
  EXPECT_EQ(names_of(pids).size(), 2u);
  Processes other(kShm, 2, [](Rank& me) {
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
  run_ranks(kShm, 2, [](Rank& me) {
    auto fabric = me.make();
    fabric->register_memory(4096);
    const pid_t pid = fork();
    if (pid == 0) {
      fabric->seal(0);
      fabric->forget(1 - me.rank());
      fabric.reset();
      _exit(0);
    }
    int status = 1;
    ASSERT_EQ(waitpid(pid, &status, 0), pid);
    EXPECT_EQ(status, 0);
    EXPECT_EQ(names_of({getpid()}).size(), 1u);
    me.barrier();
  });
}

TEST(ShmFabric, MoreThanDevShmHoldsIsRefused) {
  run_ranks(kShm, 2, [](Rank& me) {
    struct statvfs info{};
    ASSERT_EQ(statvfs("/dev/shm", &info), 0);
    if (info.f_blocks == 0) GTEST_SKIP() << "/dev/shm has no limit";
    const auto fabric = me.make();
    const std::size_t total = info.f_blocks * info.f_frsize;
    expect_error(ErrorKind::exhausted,
                 {"/dev/shm", "needed " + std::to_string(total + 4096), "free ", "--shm-size"},
                 [&] { fabric->register_memory(total + 4096); });
    EXPECT_TRUE(names_of({getpid()}).empty());
    EXPECT_EQ(fabric->register_memory(4096).id, 0u);  // the failure took no number
    me.barrier();
  });
}

/// A small /dev/shm for this process alone; false without the right to mount.
bool private_dev_shm(const char* options) {
  if (unshare(CLONE_NEWNS) == 0 && mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
      mount("tmpfs", "/dev/shm", "tmpfs", 0, options) == 0) {
    return true;
  }
  std::printf("not shown: this test needs the right to mount\n");
  return false;
}

TEST(ShmFabric, AFullDevShmIsAnError) {
  run_ranks(kShm, 1, [](Rank& me) {
    if (!private_dev_shm("size=4m")) return;
    const auto fabric = me.make();
    std::vector<Segment> segments;
    expect_error(ErrorKind::exhausted, {"rank 0", "/dev/shm", "needed 602112", "free 581632"}, [&] {
      for (int i = 0; i < 100; ++i) {
        segments.push_back(fabric->register_memory(600'000));
        std::memset(segments.back().data, 1, 600'000);
      }
    });
    EXPECT_EQ(segments.size(), 6u);
  });
  run_ranks(kShm, 2, [](Rank& me) {
    if (!private_dev_shm("size=4m,nr_inodes=3")) return;  // the folder and two files
    if (me.rank() == 1) return;
    const std::string name = object_name({1, 2}, this_process(), 0, 0);
    create_object(name + "a", 4096, 0);
    create_object(name + "b", 4096, 0);
    expect_error(ErrorKind::exhausted, {"shm_open"}, [&] { create_object(name + "c", 4096, 0); });
  });
}

// Free space looks sufficient to both, and is not: the reservation decides, nobody gets SIGBUS.
TEST(ShmFabric, TwoThatFillDevShmTogetherGetNoSignal) {
  run_ranks(kShm, 1, [](Rank&) {
    if (!private_dev_shm("size=4m")) return;
    const std::string name = object_name({1, 2}, this_process(), 0, 0);
    std::vector<pid_t> children;
    for (const char* suffix : {"a", "b"}) {
      children.push_back(fork());
      if (children.back() != 0) continue;
      for (int i = 0; i < 100; ++i) {
        try {
          const SharedObject object = create_object(name + suffix, 3 << 20, 0);
          std::memset(object.memory->data(), 1, 3 << 20);
          shm_unlink((name + suffix).c_str());
        } catch (const Error& e) {
          if (e.kind() != ErrorKind::exhausted) _exit(2);
          if (access(("/dev/shm" + name + suffix).c_str(), F_OK) == 0) _exit(3);  // a name is left
        }
      }
      _exit(0);
    }
    for (const pid_t child : children) {
      int status = -1;
      waitpid(child, &status, 0);
      EXPECT_EQ(status, 0);
    }
  });
}

TEST(ShmFabric, AnObjectThatIsNotThePeersIsRefused) {
  const std::string name = object_name({1, 2}, this_process(), 0, 0);
  const SharedObject object = create_object(name, 8192, 0);
  const Attachment attachment{Wire::shm, 1, 0, 0, 8192, {}};
  EXPECT_NE(open_object(name, attachment, object.inode), nullptr);
  expect_error(ErrorKind::system, {"rank 0", "is not the object"},
               [&] { open_object(name, attachment, object.inode + 1); });
  Attachment larger = attachment;
  larger.bytes = 8193;
  expect_error(ErrorKind::system, {"has only 8192 bytes"},
               [&] { open_object(name, larger, object.inode); });
  ASSERT_EQ(chmod(("/dev/shm" + name).c_str(), 0660), 0);
  expect_error(ErrorKind::system, {"is not the object"},
               [&] { open_object(name, attachment, object.inode); });
  // A name that is there is never taken over.
  expect_error(ErrorKind::system, {"shm_open", "exists"}, [&] { create_object(name, 4096, 0); });
  EXPECT_EQ(access(("/dev/shm" + name).c_str(), F_OK), 0);
  shm_unlink(name.c_str());
  expect_error(ErrorKind::system, {"died or left"},
               [&] { open_object(name, attachment, object.inode); });
}

TEST(ShmFabric, NamesCannotBeGuessedFromOneAnother) {
  std::set<std::string> names;
  for (int rank = 0; rank < 8; ++rank) {
    for (SegmentId segment = 0; segment < 8; ++segment) {
      for (std::uint64_t key = 0; key < 8; ++key) {
        const auto name = object_name({key, 0}, this_process(), rank, segment);
        names.insert(name.substr(name.size() - 32));
        EXPECT_EQ(owner_of(name.substr(1)), [] {
          ProcessName owner = this_process();
          owner.time_namespace = 0;  // not part of the name
          return owner;
        }());
      }
    }
  }
  EXPECT_EQ(names.size(), 512u);
  // The first vector of the reference implementation with 16 bytes of input, 00 01 .. 0f.
  EXPECT_EQ(siphash({0x0706050403020100, 0x0f0e0d0c0b0a0908}, 0x0706050403020100,
                    0x0f0e0d0c0b0a0908),
            0x3f2acc7f57c29bdbu);
}

TEST(ShmFabric, OtherNamesAreNotOurs) {
  for (const char* name :
       {"", "ferry-", "ferry-1.2.3", "ferry-1.2.3-", "ferry-1.2.3-0123456789abcdef0123456789abcde",
        "ferry-1.2.3-0123456789abcdef0123456789abcdeg", "ferry-1.0.3-0123456789abcdef0123456789abcdef",
        "ferry-1.-2.3-0123456789abcdef0123456789abcdef", "sem.ferry", "xferry-1.2.3-00"}) {
    EXPECT_FALSE(owner_of(name)) << name;
  }
}

TEST(ShmFabric, RanksOfAnotherHostAreRefused) {
  class Elsewhere final : public Bootstrap {
   public:
    int rank() const override { return 0; }
    int size() const override { return 2; }
    std::vector<Bytes> all_gather(std::span<const std::byte> mine, std::chrono::nanoseconds,
                                  const OnWait&) override {
      ShmGreeting other{.key = {}, .identity = this_identity()};
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

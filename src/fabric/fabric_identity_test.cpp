// Who joins whom: identities and the choice of a fabric.
#include "fabric/identity.hpp"

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "fabric/shm/object.hpp"
#include "fabric/test_ranks.hpp"
#include "platform/host.hpp"
#include "platform/posix/test_limits.hpp"
#include "platform/posix/test_threads.hpp"

namespace ferry::fabric::test {
namespace {

Identity identity(std::int64_t pid) {
  Identity made;
  made.boot_id = "0b5e3f6a-0000-4000-8000-000000000001";
  made.host = "alpha";
  made.process = {.pid_namespace = 10, .time_namespace = 11, .start_time = 500, .pid = pid};
  made.shm_device = 25;
  made.user = 1000;
  return made;
}

void expect_problem(const std::vector<Identity>& ranks, int peer,
                    const std::vector<std::string>& words, Reachable by = Reachable::nothing) {
  const Choice choice = choose(ranks);
  EXPECT_EQ(choice.by, by);
  EXPECT_EQ(choice.peer, peer);
  for (const auto& word : words) {
    EXPECT_NE(choice.problem.find(word), std::string::npos) << choice.problem;
  }
}

TEST(Identity, ThisOneIsKnown) {
  const Identity self = this_identity();
  EXPECT_EQ(self.boot_id.size(), 36u);
  EXPECT_EQ(self.process.pid, process_id());
  EXPECT_NE(self.process.pid_namespace, 0u);
  EXPECT_NE(self.process.start_time, 0u);
  EXPECT_NE(self.shm_device, 0u);
  EXPECT_EQ(self.user, user_id());
  EXPECT_EQ(self, this_identity());
}

TEST(Identity, SurvivesTheWire) {
  for (const Identity& sent : {this_identity(), identity(1), Identity{}}) {
    EXPECT_EQ(identity_from(to_bytes(sent), 0, 1), sent);
  }
  const auto bytes = to_bytes(identity(7));
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    expect_error(ErrorKind::mismatch, {"rank 3", "rank 5", "same version"},
                 [&] { identity_from(std::span(bytes).first(length), 3, 5); });
  }
  auto other = bytes;
  other[0] ^= std::byte{1};
  expect_error(ErrorKind::mismatch, {"cannot be read"}, [&] { identity_from(other, 0, 1); });
  other = bytes;
  std::memset(other.data() + 56, 0xff, 8);  // both text lengths
  expect_error(ErrorKind::mismatch, {"cannot be read"}, [&] { identity_from(other, 0, 1); });
}

TEST(Hosts, RanksThatShareMemoryAreOne) {
  Identity beta = identity(7), container = identity(8), other_user = identity(9);
  beta.boot_id = "0b5e3f6a-0000-4000-8000-000000000002";
  beta.host = "beta";
  container.shm_device = 26;
  other_user.user = 1001;
  const std::vector<Identity> ranks{identity(5), beta, identity(6), container, beta, other_user};
  EXPECT_EQ(hosts_of(ranks), (std::vector<int>{0, 1, 0, 3, 1, 5}));
  Identity bare = identity(5);
  bare.shm_device = 0;  // no /dev/shm: shares nothing, not even with its like
  EXPECT_EQ(hosts_of(std::vector{bare, bare}), (std::vector<int>{0, 1}));
}

TEST(Choose, OneProcessIsLocal) {
  EXPECT_EQ(choose(std::vector{identity(5)}).by, Reachable::local);
  EXPECT_EQ(choose(std::vector{identity(5), identity(5)}).by, Reachable::local);
  auto no_shm = identity(5);
  no_shm.shm_device = 0;
  EXPECT_EQ(choose(std::vector{no_shm, no_shm}).by, Reachable::local);
}

TEST(Choose, ProcessesOfOneHostShareMemory) {
  EXPECT_EQ(choose(std::vector{identity(5), identity(6)}).by, Reachable::shm);
  EXPECT_EQ(choose(std::vector{identity(5), identity(5), identity(6)}).by, Reachable::shm);
  auto later = identity(5);  // the same number, another process
  later.process.start_time = 501;
  EXPECT_EQ(choose(std::vector{identity(5), later}).by, Reachable::shm);
  auto container = identity(5);  // containers that share /dev/shm
  container.process.pid_namespace = 77;
  container.host = "beta";
  EXPECT_EQ(choose(std::vector{identity(5), container}).by, Reachable::shm);
}

TEST(Choose, SaysWhyNothingJoinsThem) {
  auto far = identity(5);
  far.boot_id = "0b5e3f6a-0000-4000-8000-000000000002";
  far.host = "beta";
  expect_problem({identity(5), identity(6), far}, 2,
                 {"rank 0 on host alpha", "rank 2 on host beta", "different hosts", "ofi"},
                 Reachable::network);
  far.host = "alpha";  // two hosts of one name
  expect_problem({identity(5), far}, 1, {"different hosts"}, Reachable::network);
  auto container = identity(6);
  container.shm_device = 26;
  expect_problem({identity(5), container}, 1, {"different /dev/shm", "--ipc=host"});
  auto none = identity(6);
  none.shm_device = 0;
  expect_problem({identity(5), none}, 1, {"no /dev/shm"});
  auto user = identity(6);
  user.user = 0;
  expect_problem({identity(5), user}, 1, {"different users", "1000 and 0"});
}

TEST(Choose, NamesARankWithoutFileDescriptorsAndNoOtherHost) {
  Identity poor;
  {
    const ferry::test::NoFilesLeft none;
    poor = this_identity();
  }
  EXPECT_NE(poor.problem.find("this process may have 96"), std::string::npos) << poor.problem;
  poor = identity_from(to_bytes(poor), 0, 1);
  expect_problem({this_identity(), poor}, 1, {"rank 1", "too many open files", "96", "ulimit -n"});
  EXPECT_EQ(choose(std::vector{this_identity(), poor}).kind, ErrorKind::exhausted);
  poor.problem = "\n" + std::string(10'000, 'x');
  EXPECT_LT(choose(std::vector{poor}).problem.size(), 700u);
}

TEST(Choose, SharedMemoryWithoutFileDescriptorsSaysSo) {
  const std::string name = "/ferry-test-no-files-" + std::to_string(process_id());
  const ferry::test::NoFilesLeft none;
  expect_error(ErrorKind::exhausted, {"rank 3", "too many open files", "96", "ulimit -n"},
               [&] { create_object(name, 4096, 3); });
}

void sleep_on() {
  for (;;) std::this_thread::sleep_for(1h);
}

/// A child that does not come back.
struct OwnChild {
  explicit OwnChild(const std::function<void()>& body = sleep_on)
      : child([&] {
          body();
          sleep_on();
          return 0;
        }) {
    name = this_process();
    name.pid = child.pid();
    name.start_time = start_time_of(child.pid()).value_or(0);
  }
  ferry::test::Child child;
  ProcessName name{};
};

TEST(ProcessWatch, SeesThroughReusedNumbers) {
  EXPECT_EQ(ProcessWatch(this_process()).state(), PeerState::alive);
  OwnChild other;
  const ProcessName name = other.name;
  ProcessName earlier = name;
  earlier.start_time -= 1;  // an earlier process had this number
  EXPECT_EQ(ProcessWatch(earlier).state(), PeerState::dead);
  earlier.pid_namespace += 1;  // the number means nothing here
  EXPECT_EQ(ProcessWatch(earlier).state(), PeerState::unknown);
  ProcessWatch watch(name);
  EXPECT_EQ(watch.state(), PeerState::alive);
  other.child.kill();
  EXPECT_TRUE(eventually([&] { return watch.state() == PeerState::dead; }, 2s));  // a zombie
  EXPECT_EQ(ProcessWatch(name).state(), PeerState::dead);  // also if watched only from now on
  other.child.wait();
  EXPECT_EQ(watch.state(), PeerState::dead);
  EXPECT_EQ(ProcessWatch(name).state(), PeerState::dead);
}

TEST(ProcessWatch, EndsBeforeItIsDead) {
  // The pages keep the kernel busy between the two; a busy machine may still miss the moment.
  constexpr std::size_t kBytes = std::size_t{256} << 20;
  int tries = 0;
  for (bool seen = false; !seen && tries < 20; ++tries) {
    const auto board = make_board();
    OwnChild other([&] {
      const std::unique_ptr<volatile char[]> pages(new char[kBytes]);  // volatile: written for real
      for (std::size_t at = 0; at < kBytes; at += 4096) pages[at] = 1;
      board->notes[0] = 1;
      sleep_on();
    });
    ProcessWatch watch(other.name);
    ASSERT_TRUE(eventually([&] { return board->notes[0] == 1; }));
    EXPECT_FALSE(watch.ends());
    other.child.kill();
    while (watch.state() == PeerState::alive && !seen) {
      seen = watch.ends() && watch.state() == PeerState::alive;
    }
    EXPECT_TRUE(eventually([&] { return watch.state() == PeerState::dead && watch.ends(); }, 5s));
  }
  EXPECT_LT(tries, 20) << "it was never seen to end before it was dead";
}

TEST(ProcessWatch, DoesNotEndWithItsFirstThread) {
  OwnChild other([] {
    std::thread(sleep_on).detach();
    ferry::test::end_this_thread();
  });
  ProcessWatch watch(other.name);
  const std::string stat = "/proc/" + std::to_string(other.child.pid()) + "/stat";
  const auto first_ended = [&] {
    std::string line;
    return std::getline(std::ifstream(stat), line) && line.find(") Z ") != std::string::npos;
  };
  ASSERT_TRUE(eventually(first_ended, 5s));
  EXPECT_FALSE(watch.ends());
  EXPECT_EQ(watch.state(), PeerState::alive);
  other.child.kill();
  EXPECT_TRUE(eventually([&] { return watch.ends(); }, 5s));
}

/// Sleeps on a word that nobody changes, far longer than the test may take.
TEST(DeathWatch, EndSleepsOfOtherWords) {
  OwnChild other;
  ProcessWatch watch(other.name);
  const std::uint64_t before = DeathWatch::count();
  std::atomic<bool> has_slept{false}, woken{false};
  alignas(protocol::kFlagStride) std::uint64_t words[2] = {};
  std::thread sleeper([&] {
    const protocol::Sleepers<> flag(protocol::Flag{words});
    flag.sleep(0, 1);  // a thread that has never slept has not seen the deaths before
    has_slept = true;
    flag.sleep(0, 120'000'000'000);
    woken = true;
  });
  const protocol::Flag sleepers{words + 1};
  EXPECT_TRUE(eventually([&] { return has_slept && sleepers.load(protocol::order::relaxed) > 0; }));
  other.child.kill();
  EXPECT_TRUE(eventually([&] { return woken.load(); }));
  EXPECT_EQ(DeathWatch::count(), before + 1);
  EXPECT_EQ(watch.state(), PeerState::dead);
  sleeper.join();
}

/// Of a thread that has polled and is about to sleep, on a word that nobody changes.
TEST(DeathWatch, EndsASleepThatBeginsAfterIt) {
  const std::uint64_t word = 0;
  std::atomic<int> slept{0};
  std::atomic<bool> told{false};
  std::thread sleeper([&] {
    futex_wait(&word, 0, 1);
    slept = 1;
    while (!told) std::this_thread::yield();
    futex_wait(&word, 0, 120'000'000'000);
    slept = 2;
  });
  EXPECT_TRUE(eventually([&] { return slept == 1; }));
  wake_sleepers();
  told = true;
  EXPECT_TRUE(eventually([&] { return slept == 2; }));
  sleeper.join();
}

/// The thread that wakes it must not take one of another process for it.
TEST(DeathWatch, EndsSleepsOnAWordOnWhichAnotherProcessSleeps) {
  const std::shared_ptr<void> block = ferry::test::shared_block(64);
  auto* word = static_cast<std::uint64_t*>(block.get());
  const ferry::test::Child other([&] {
    for (;;) futex_wait(word, 0, 120'000'000'000);
    return 0;
  });
  constexpr int kTimes = 20'000;
  std::atomic<int> told{0}, heard{0};
  std::thread sleeper([&] {
    while (heard < kTimes) {
      if (told == heard) futex_wait(word, 0, 120'000'000'000);
      heard = told.load();
    }
  });
  while (told < kTimes) {
    ++told;
    wake_sleepers();
    while (heard < told) std::this_thread::yield();
  }
  sleeper.join();
}

TEST(DeathWatch, AThreadOnlyWhileProcessesAreWatched) {
  const auto threads = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/task"), {});
  };
  const auto alone = threads();
  const OwnChild other;
  {
    ProcessWatch watch(other.name);
    ProcessWatch another(other.name);
    EXPECT_EQ(threads(), alone + 1);
    // The parent's thread and its descriptors stay as they are.
    ferry::test::Child forked([&] {
      ProcessWatch moved(std::move(watch));
      return 0;
    });
    EXPECT_TRUE(forked.wait().good());
  }
  EXPECT_TRUE(eventually([&] { return threads() == alone; }));
}

}  // namespace
}  // namespace ferry::fabric::test

#include "protocol/sync.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "platform/test_child.hpp"
#include "protocol/failure_broadcast.hpp"
#include "protocol/thread_ranks_test.hpp"
#include "protocol/watch.hpp"

namespace ferry::protocol {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

milliseconds since(steady_clock::time_point start) {
  return std::chrono::duration_cast<milliseconds>(steady_clock::now() - start);
}

TEST(Wait, DeadlineFiresOnTime) {
  alignas(64) std::uint64_t word[2] = {3};
  for (const milliseconds timeout : {milliseconds(0), milliseconds(10), milliseconds(120)}) {
    const auto start = steady_clock::now();
    DeadlineWatch watch(timeout);
    const Status status =
        Flag{word}.wait_until([](std::uint64_t seen) { return seen >= 4; }, watch);
    EXPECT_EQ(status.code, Status::Code::kDeadline);
    EXPECT_EQ(status.seen, 3u);
    EXPECT_GE(since(start), timeout);
    EXPECT_LT(since(start),
              timeout + milliseconds(500));  // a loaded machine, not a missed deadline
  }
}

TEST(Wait, AFlagThatIsThereBeatsADeadline) {
  alignas(64) std::uint64_t word[2] = {4};
  DeadlineWatch watch(milliseconds(-5));
  const Status status = Flag{word}.wait_until([](std::uint64_t seen) { return seen >= 4; }, watch);
  EXPECT_TRUE(status.ok());
  EXPECT_EQ(status.seen, 4u);
}

TEST(Wait, SleepsAreCutIntoSlices) {
  struct Counting {
    int checks = 0;
    std::uint64_t spin_ns() { return 0; }
    std::uint64_t slice_ns() { return 2'000'000; }
    Status check() {
      Status status;
      if (++checks == 5) status.code = Status::Code::kInterrupted;
      return status;
    }
  } watch;
  alignas(64) std::uint64_t word[2] = {};
  const Status status = Flag{word}.wait_until([](std::uint64_t seen) { return seen > 0; }, watch);
  EXPECT_EQ(status.code, Status::Code::kInterrupted);
  EXPECT_EQ(watch.checks, 5);
}

TEST(Wait, AWatchMayNameThePeer) {
  struct Accusing {
    std::uint64_t spin_ns() { return 0; }
    std::uint64_t slice_ns() { return 1'000'000; }
    Status check() { return {Status::Code::kPeerFailed, 7, 0, 0}; }
  } watch;
  alignas(64) std::uint64_t word[2] = {};
  const Status status = await_flag(Flag{word}, 2, 5, kAnyAhead, watch);
  EXPECT_EQ(status.code, Status::Code::kPeerFailed);
  EXPECT_EQ(status.peer, 7);
  EXPECT_EQ(status.expected, 5u);
}

TEST(Wait, StoreAndWakeEndASleep) {
  alignas(64) std::uint64_t word[2] = {};
  const auto start = steady_clock::now();
  std::thread writer([&] {
    std::this_thread::sleep_for(milliseconds(30));
    publish_in_memory(Flag{word}, 1);
  });
  // One long slice: only the wake can end the sleep before it.
  DeadlineWatch watch(std::chrono::seconds(30), 0, 30'000'000'000u);
  EXPECT_TRUE(Flag{word}.wait_until([](std::uint64_t seen) { return seen == 1; }, watch).ok());
  writer.join();
  EXPECT_LT(since(start), std::chrono::seconds(10));
}

TEST(Wait, WakesAcrossProcesses) {
  const auto page = test::shared_block(4096);
  auto* words = static_cast<std::uint64_t*>(page.get());
  constexpr Generation kRounds = 200;
  const auto play = [&](int me) {  // ping-pong: each waits for the other's flag, without spinning
    for (Generation g = 1; g <= kRounds; ++g) {
      DeadlineWatch watch(std::chrono::seconds(30), 0, 30'000'000'000u);
      if (me == 0) publish_in_memory(Flag{words + 0}, g);
      const Status status = Flag{words + (1 - me) * 8}.wait_until(
          [g](std::uint64_t seen) { return seen >= g; }, watch);
      if (!status.ok()) return false;
      if (me == 1) publish_in_memory(Flag{words + 8}, g);
    }
    return true;
  };
  const auto start = steady_clock::now();
  test::Child child([&] { return play(1) ? 0 : 1; });
  EXPECT_TRUE(play(0));
  EXPECT_TRUE(child.wait().good());
  EXPECT_LT(since(start), std::chrono::seconds(20));
}

/// Its count stays; those who sleep on the flag later are woken as before.
TEST(Wait, AProcessKilledInItsSleepLosesNoWake) {
  const auto page = test::shared_block(4096);
  const Flag flag{static_cast<std::uint64_t*>(page.get())};
  const Flag sleepers{flag.word + 1};
  const auto await = [flag](std::uint64_t wanted) {
    DeadlineWatch watch(std::chrono::seconds(30), 0, 30'000'000'000u);
    return flag.wait_until([wanted](std::uint64_t seen) { return seen >= wanted; }, watch).ok();
  };
  const auto until_asleep = [sleepers](std::uint64_t count) {
    while (sleepers.load(order::relaxed) != count) std::this_thread::yield();
  };
  test::Child child([&] { return await(1) ? 0 : 1; });
  until_asleep(1);
  child.kill();
  child.wait();
  const auto start = steady_clock::now();
  for (std::uint64_t value = 1; value <= 3; ++value) {
    std::thread sleeper([&] { EXPECT_TRUE(await(value)); });
    until_asleep(2);
    publish_in_memory(flag, value);
    sleeper.join();
  }
  EXPECT_EQ(sleepers.load(order::relaxed), 1u);
  EXPECT_LT(since(start), std::chrono::seconds(20));
}

TEST(FailureBroadcasts, TheFirstOfManyThreadsReachesEveryRank) {
  constexpr int kRanks = 3;
  const FlagLayout layout{kRanks, Place{0, 0}, kFlagStride};
  const Place own{0, layout.bytes()};
  for (int round = 0; round < 50; ++round) {
    const ThreadRanks group(kRanks, layout.bytes() + 64);
    MemoryReach reach([&](int peer, Place place) { return group.address(peer, place); });
    const auto broadcasts_of = [&](int rank) {
      return FailureBroadcasts<>(layout, rank, group.address(rank, layout.flags),
                                 reinterpret_cast<std::uint64_t*>(group.address(rank, own)));
    };
    EXPECT_FALSE(broadcasts_of(1).scan());
    std::thread first([&] { broadcasts_of(0).raise(reach, FailureBroadcast::Kind::kLate, 1, 5); });
    std::thread second([&] { broadcasts_of(0).raise(reach, FailureBroadcast::Kind::kLate, 2, 6); });
    first.join();
    second.join();
    const std::optional<FailureBroadcast> seen = broadcasts_of(0).scan();
    ASSERT_TRUE(seen);
    EXPECT_EQ(seen->reporter, 0);
    EXPECT_EQ(seen->generation, static_cast<Generation>(seen->culprit + 4));
    for (int rank = 1; rank < kRanks; ++rank) EXPECT_EQ(broadcasts_of(rank).scan(), seen);
    broadcasts_of(2).raise(reach, FailureBroadcast::Kind::kDied, 1, 7);  // what is certain wins
    EXPECT_EQ(broadcasts_of(0).scan()->kind, FailureBroadcast::Kind::kDied);
  }
}

}  // namespace
}  // namespace ferry::protocol

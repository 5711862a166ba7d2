// Ranks that are processes, on every system: they meet at the store, exchange over shared memory,
// and name the one that is killed. FERRY_JOINS: how often the ranks join (5).
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ferry/ferry.hpp>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "platform/test_child.hpp"

namespace ferry::test {
namespace {

using namespace std::chrono_literals;

constexpr int kSpawned = 4, kVictim = 2;
constexpr std::int64_t kRows = 32, kWidth = 64, kSpawnedExperts = 8;
constexpr std::int64_t kAtLeast = 20;  // exchanges before the kill

struct SpawnedBoard {
  std::array<std::atomic<std::int64_t>, kSpawned> steps;  // done
  std::array<std::atomic<bool>, kSpawned> wrong;
  std::array<std::array<char, 400>, kSpawned> error;
  std::array<std::atomic<int>, kSpawned> peer;  // whom the error names, plus one
  std::atomic<std::int64_t> killed_ns;
  std::array<std::atomic<std::int64_t>, kSpawned> named_ns;  // after the kill; or of a step
};

std::int64_t steady_ns() {
  return std::chrono::steady_clock::now().time_since_epoch() / 1ns;
}

/// Tokens that go to two experts of different ranks come back doubled.
void exchange_once(Group& group, SpawnedBoard& board) {
  const int rank = group.rank();
  const std::int64_t step = board.steps[static_cast<std::size_t>(rank)];
  std::vector<float> x(kRows * kWidth);
  std::vector<std::int64_t> ids(kRows * 2);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 100 + rank + step % 7);
  for (std::int64_t t = 0; t < kRows; ++t) {
    ids[static_cast<std::size_t>(t) * 2] = (t + step) % kSpawnedExperts;
    ids[static_cast<std::size_t>(t) * 2 + 1] = (t + step + 4) % kSpawnedExperts;
  }
  const Plan plan = group.plan({ids.data(), Dtype::i64, {kRows, 2}});
  const Received in = group.dispatch({x.data(), Dtype::f32, {kRows, kWidth}}, plan);
  const Combined out = group.combine(in.x, plan);
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (out.x.as<float>()[i] != 2 * x[i]) board.wrong[static_cast<std::size_t>(rank)] = true;
  }
}

Group join_spawned(int rank, std::uint16_t port) {
  TcpOptions options;
  options.rank = rank;
  options.size = kSpawned;
  options.port = port;
  options.secret = "of the spawned ranks";
  GroupConfig config;
  config.experts = kSpawnedExperts;
  config.memory_bytes = std::size_t{1} << 20;
  config.fabric = FabricKind::shm;
  return Group(tcp_bootstrap(options), config);
}

/// A port that the parent alone chooses, before its children start.
std::uint16_t spawned_port(std::atomic<int>& word) {
  int none = 0;
  word.compare_exchange_strong(none, 10000 + static_cast<int>(steady_ns() / 1000 % 20000));
  return static_cast<std::uint16_t>(word.load());
}

int exchange_until_an_error(SpawnedBoard& board, int rank, std::uint16_t port) {
  const auto mine = static_cast<std::size_t>(rank);
  try {
    Group group = join_spawned(rank, port);
    for (;;) {
      exchange_once(group, board);
      ++board.steps[mine];
    }
  } catch (const Error& error) {
    board.named_ns[mine] = steady_ns() - board.killed_ns;
    std::strncpy(board.error[mine].data(), error.what(), board.error[mine].size() - 1);
    board.peer[mine] = error.peer() + 1;
  }
  return 0;
}

TEST(Spawned, RanksNameTheOneThatIsKilled) {
  const auto board = std::static_pointer_cast<SpawnedBoard>(shared_block(sizeof(SpawnedBoard)));
  const auto word = std::static_pointer_cast<std::atomic<int>>(shared_block(sizeof(int)));
  const std::uint16_t port = spawned_port(*word);

  std::vector<Child> ranks;
  for (int r = 0; r < kSpawned; ++r) {
    ranks.emplace_back([&, r] { return exchange_until_an_error(*board, r, port); });
  }
  const auto due = std::chrono::steady_clock::now() + 60s;
  while (board->steps[kVictim] < kAtLeast && std::chrono::steady_clock::now() < due &&
         !ranks[kVictim].ended()) {
    std::this_thread::sleep_for(1ms);
  }
  EXPECT_GE(board->steps[kVictim], kAtLeast) << board->error[kVictim].data();
  board->killed_ns = steady_ns();
  ranks[kVictim].kill();
  EXPECT_TRUE(ranks[kVictim].wait().killed);
  for (std::size_t r = 0; r < kSpawned; ++r) {
    if (r == kVictim) continue;
    EXPECT_EQ(ranks[r].wait().code, 0);
    EXPECT_EQ(board->peer[r], kVictim + 1) << "rank " << r << ": " << board->error[r].data();
    EXPECT_FALSE(board->wrong[r]) << "rank " << r;
    ::testing::Test::RecordProperty("named_us", std::to_string(board->named_ns[r] / 1000));
  }
}

/// Joins so often, each time at another port, and exchanges once; then tells the time of a step.
int join_and_exchange(SpawnedBoard& board, int rank, std::uint16_t port, int joins) {
  const auto mine = static_cast<std::size_t>(rank);
  try {
    for (int round = 0; round < joins; ++round) {
      // So that now one and now another comes first, rank 0 with the store as well.
      std::this_thread::sleep_for(std::chrono::milliseconds((rank * 7 + round * 5) % 11));
      Group group = join_spawned(rank, static_cast<std::uint16_t>(port + round));
      exchange_once(group, board);
      ++board.steps[mine];
      group.barrier();
    }
    constexpr int kTimed = 300;
    Group group = join_spawned(rank, static_cast<std::uint16_t>(port + joins));
    for (int i = 0; i < kTimed / 3; ++i) exchange_once(group, board);
    const std::int64_t start = steady_ns();
    for (int i = 0; i < kTimed; ++i) exchange_once(group, board);
    board.named_ns[mine] = (steady_ns() - start) / kTimed;
    group.barrier();
  } catch (const Error& error) {
    std::strncpy(board.error[mine].data(), error.what(), board.error[mine].size() - 1);
    return 1;
  }
  return 0;
}

TEST(Spawned, EveryRankJoinsEveryTime) {
  const auto board = std::static_pointer_cast<SpawnedBoard>(shared_block(sizeof(SpawnedBoard)));
  const auto word = std::static_pointer_cast<std::atomic<int>>(shared_block(sizeof(int)));
  const std::uint16_t port = spawned_port(*word);
  const char* const asked = std::getenv("FERRY_JOINS");
  const int joins = asked != nullptr ? std::atoi(asked) : 5;
  std::vector<Child> ranks;
  for (int r = 0; r < kSpawned; ++r) {
    ranks.emplace_back([&, r] { return join_and_exchange(*board, r, port, joins); });
  }
  for (std::size_t r = 0; r < kSpawned; ++r) {
    EXPECT_EQ(ranks[r].wait().code, 0) << "rank " << r << ": " << board->error[r].data();
    EXPECT_EQ(board->steps[r], joins) << "rank " << r;
    EXPECT_FALSE(board->wrong[r]) << "rank " << r;
  }
  std::printf("%d joins of %d ranks; a step: %lld us\n", joins, kSpawned,
              static_cast<long long>(board->named_ns[0] / 1000));
}

}  // namespace
}  // namespace ferry::test

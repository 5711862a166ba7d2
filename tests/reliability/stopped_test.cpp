// A rank is stopped in the midst of a call that makes memory: the others give up and take theirs
// away, and it hears why.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "platform/test_child.hpp"
#include "processes.hpp"

namespace ferry::test {
namespace {

struct Board {
  std::atomic<bool> stopped{false};  ///< rank 1, in a wait
  std::atomic<bool> resumed{false};
};

void await(const std::atomic<bool>& flag) {
  while (!flag) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

/// Rank 1 stops while it waits for rank 0. When it goes on, all have sent their messages and none
/// has memory any more.
void make_exchange(int rank, std::shared_ptr<Bootstrap> bootstrap, Board& board,
                   const Reporter& reporter) {
  GroupConfig config;
  config.experts = 6;
  config.deadline = std::chrono::milliseconds(1500);
  bool stops = false;
  config.on_wait = [&] {
    if (!std::exchange(stops, false)) return;
    board.stopped = true;
    await(board.resumed);
  };
  std::optional<Group> group;
  try {
    group.emplace(std::move(bootstrap), config);
  } catch (const Error&) {
    reporter.line("no group");
    return;
  }
  reporter.line("group");
  stops = rank == 1;
  if (rank == 0) await(board.stopped);
  try {
    const LatencyExchange latency(*group, {16, 64, 2, Dtype::f32});
    reporter.line("made");
  } catch (const Error& error) {
    reporter.line(std::string(name_of(error.kind())) + ": " + error.what());
  }
}

/// False: the deadline was too short to make the group on this machine.
bool stop_and_resume(Board& board) {
  Ranks ranks(3, [&](int rank, std::shared_ptr<Bootstrap> bootstrap, const Reporter& reporter) {
    make_exchange(rank, std::move(bootstrap), board, reporter);
  });
  bool made = true;
  for (const int rank : {0, 1, 2}) made = ranks.line(rank, 30) == "group" && made;
  if (!made) {
    board.stopped = board.resumed = true;
    for (const int rank : {0, 1, 2}) ranks.join(rank, 30);
    return false;
  }
  for (const int rank : {0, 2}) {
    const std::string text = ranks.line(rank, 30);
    EXPECT_NE(text.find("deadline: rank " + std::to_string(rank)), std::string::npos) << text;
    EXPECT_NE(text.find(": rank 1 "), std::string::npos) << text;
    EXPECT_EQ(ranks.join(rank, 30), 0);
  }
  board.resumed = true;
  const std::string text = ranks.line(1, 30);
  for (const char* part : {"deadline: rank 1: LatencyExchange: buffers",
                           "rank 1 missed the deadline (reported by rank ", "stopped"}) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }
  EXPECT_EQ(ranks.join(1, 30), 0);
  return true;
}

TEST(Stopped, ARankThatWasStoppedWhileAnExchangeWasMadeHearsThatItWasLate) {
  const std::shared_ptr<void> shared = test::shared_block(sizeof(Board));
  bool done = false;
  for (int attempts = 20; !done && attempts > 0; --attempts) {
    done = stop_and_resume(*new (shared.get()) Board);
  }
  EXPECT_TRUE(done);
  EXPECT_EQ(shared_memory_names(), std::vector<std::string>{});
}

}  // namespace
}  // namespace ferry::test

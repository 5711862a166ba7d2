#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>

#include "bootstrap/test_ranks.hpp"

namespace ferry::bootstrap {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

TEST(ThreadBootstrap, EveryRankGetsEveryPartInOrder) {
  for (int n : {1, 2, 3, 8}) {
    auto boots = thread_bootstrap(n);
    run_ranks_well(n, [&](int r) {
      EXPECT_EQ(boots[std::size_t(r)]->rank(), r);
      EXPECT_EQ(boots[std::size_t(r)]->size(), n);
      for (int round = 0; round < 50; ++round) {
        // Uneven lengths, one of them zero.
        const std::string mine(std::size_t((r * 7 + round) % 5), char('a' + r));
        const Parts parts = boots[std::size_t(r)]->all_gather(bytes_of(mine), 20s);
        ASSERT_EQ(parts.size(), std::size_t(n));
        for (int s = 0; s < n; ++s) {
          EXPECT_EQ(text_of(parts[std::size_t(s)]),
                    std::string(std::size_t((s * 7 + round) % 5), char('a' + s)));
        }
      }
      boots[std::size_t(r)].reset();  // leaving right after the last round disturbs nobody
    });
  }
}

TEST(ThreadBootstrap, DeadlineNamesTheRanksThatDidNotCome) {
  auto boots = thread_bootstrap(4);
  const auto start = Clock::now();
  auto errors = run_ranks(4, [&](int r) {
    if (r == 1 || r == 3) return;
    boots[std::size_t(r)]->all_gather({}, r == 0 ? 100ms : 20000ms);
  });
  EXPECT_LT(Clock::now() - start, 5s);  // rank 0's deadline ends the wait of rank 2, too
  for (int r : {0, 2}) {
    ASSERT_TRUE(errors[std::size_t(r)]);
    const Error& e = *errors[std::size_t(r)];
    EXPECT_EQ(e.kind(), ErrorKind::deadline);
    EXPECT_EQ(e.rank(), r);
    EXPECT_EQ(e.peer(), 1);
    EXPECT_TRUE(contains(e, "ranks 1 and 3 did not come within 100 ms")) << e.what();
  }
  const Error late = error_from([&] { boots[3]->all_gather({}, 1s); });
  EXPECT_EQ(late.kind(), ErrorKind::peer_failed);
  EXPECT_TRUE(contains(late, "came too late: rank 0")) << late.what();
}

TEST(ThreadBootstrap, ADestroyedRankIsNamedAtOnce) {
  for (bool before : {true, false}) {
    auto boots = thread_bootstrap(3);
    const auto start = Clock::now();
    auto errors = run_ranks(3, [&](int r) {
      if (r == 1) {
        if (!before) std::this_thread::sleep_for(50ms);
        boots[1].reset();
        return;
      }
      if (before) std::this_thread::sleep_for(50ms);
      boots[std::size_t(r)]->all_gather({}, 20s);
    });
    EXPECT_LT(Clock::now() - start, 5s);
    for (int r : {0, 2}) {
      ASSERT_TRUE(errors[std::size_t(r)]);
      EXPECT_EQ(errors[std::size_t(r)]->kind(), ErrorKind::peer_left);
      EXPECT_EQ(errors[std::size_t(r)]->peer(), 1) << errors[std::size_t(r)]->what();
    }
  }
}

TEST(ThreadBootstrap, OnWaitIsPolledAndEndsTheWait) {
  auto boots = thread_bootstrap(3);
  std::atomic<bool> thrown{false};
  auto errors = run_ranks(3, [&](int r) {
    if (r == 2) return;
    if (r == 1) {
      boots[1]->all_gather({}, 20s);
      return;
    }
    int polls = 0;
    auto longest = 0ns;
    auto last = Clock::now();
    try {
      boots[0]->all_gather({}, 20s, [&] {
        longest = std::max(longest, std::chrono::nanoseconds(Clock::now() - last));
        last = Clock::now();
        if (++polls == 10) throw std::runtime_error("stop");
      });
    } catch (const std::runtime_error& e) {
      thrown = std::string(e.what()) == "stop";
    }
    EXPECT_EQ(polls, 10);
    EXPECT_LT(longest, 1s);  // 50 ms promised; a loaded machine may oversleep
  });
  EXPECT_TRUE(thrown);
  ASSERT_TRUE(errors[1]);
  EXPECT_EQ(errors[1]->kind(), ErrorKind::peer_failed);
  EXPECT_EQ(errors[1]->peer(), 0);
  EXPECT_TRUE(contains(*errors[1], "rank 0 was interrupted")) << errors[1]->what();
}

TEST(ThreadBootstrap, RefusesBadCalls) {
  EXPECT_EQ(error_from([] { thread_bootstrap(0); }).kind(), ErrorKind::invalid_argument);
  auto boots = thread_bootstrap(2);
  std::thread first([&] { error_from([&] { boots[0]->all_gather({}, 1s); }); });
  std::this_thread::sleep_for(100ms);
  const Error e = error_from([&] { boots[0]->all_gather({}, 1s); });
  first.join();
  EXPECT_TRUE(e.kind() == ErrorKind::invalid_argument || e.kind() == ErrorKind::deadline);
}

TEST(ThreadBootstrap, NegativeAndHugeDeadlines) {
  auto boots = thread_bootstrap(2);
  EXPECT_EQ(error_from([&] { boots[0]->all_gather({}, -1s); }).kind(), ErrorKind::deadline);
  auto others = thread_bootstrap(2);
  auto errors = run_ranks(
      2, [&](int r) { others[std::size_t(r)]->all_gather({}, std::chrono::nanoseconds::max()); });
  EXPECT_FALSE(errors[0] || errors[1]);
}

}  // namespace
}  // namespace ferry::bootstrap

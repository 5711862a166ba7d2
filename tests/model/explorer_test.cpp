// Is the explorer itself right? Litmus tests with known answers, and failures that it must see.
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <random>
#include <set>
#include <utility>

#include "explorer.hpp"

namespace ferry::model {
namespace {

using protocol::Flag;
using protocol::order;

std::uint64_t* word(int i) {
  return reinterpret_cast<std::uint64_t*>(Explorer::current().arena()) + i * 8;
}
std::uint64_t* data(int i) {
  return word(64 + i);
}

struct Never {
  std::uint64_t spin_ns() { return 0; }
  std::uint64_t slice_ns() { return 0; }
  protocol::Status check() { return {protocol::Status::Code::kDeadline, -1, 0, 0}; }
};

Report explore(int fibers, std::function<void(int)> body, std::function<void()> finish = {},
               Bounds bounds = {.preemptions = 10}) {
  Explorer explorer;
  Scenario scenario;
  scenario.fibers = fibers;
  scenario.setup = [] {};
  scenario.body = std::move(body);
  scenario.finish = std::move(finish);
  return explorer.explore(scenario, bounds);
}

using Outcomes = std::set<std::pair<std::uint64_t, std::uint64_t>>;

TEST(Explorer, MessagePassing) {
  for (const bool sound : {true, false}) {
    Outcomes seen;
    std::uint64_t flag = 0, value = 0;
    const Report report = explore(
        2,
        [&](int fiber) {
          if (fiber == 0) {
            Flag{word(0)}.store(1, order::relaxed);
            Flag{word(1)}.store(1, sound ? order::release : order::relaxed);
          } else {
            flag = Flag{word(1)}.load(order::acquire);
            value = Flag{word(0)}.load(order::relaxed);
          }
        },
        [&] { seen.insert({flag, value}); });
    EXPECT_TRUE(report.passed && report.complete) << report.failure;
    Outcomes expected{{0, 0}, {0, 1}, {1, 1}};
    if (!sound) expected.insert({1, 0});
    EXPECT_EQ(seen, expected);
  }
}

TEST(Explorer, StoreBufferingShowsBothZeros) {  // release/acquire does not forbid it
  Outcomes seen;
  std::uint64_t got[2] = {};
  const Report report = explore(
      2,
      [&](int fiber) {
        Flag{word(fiber)}.store(1, order::release);
        got[fiber] = Flag{word(1 - fiber)}.load(order::acquire);
      },
      [&] { seen.insert({got[0], got[1]}); });
  EXPECT_TRUE(report.complete);
  EXPECT_EQ(seen, (Outcomes{{0, 0}, {0, 1}, {1, 0}, {1, 1}}));
}

TEST(Explorer, OneWordNeverGoesBack) {
  Outcomes seen;
  std::uint64_t a = 0, b = 0;
  const Report report = explore(
      2,
      [&](int fiber) {
        if (fiber == 0) {
          Flag{word(0)}.store(1, order::relaxed);
          Flag{word(0)}.store(2, order::relaxed);
        } else {
          a = Flag{word(0)}.load(order::relaxed);
          b = Flag{word(0)}.load(order::relaxed);
        }
      },
      [&] { seen.insert({a, b}); });
  EXPECT_TRUE(report.complete);
  EXPECT_EQ(seen, (Outcomes{{0, 0}, {0, 1}, {0, 2}, {1, 1}, {1, 2}, {2, 2}}));
}

TEST(Explorer, IndependentReadsMayDisagree) {  // IRIW: allowed without sequential consistency
  bool disagreed = false;
  std::uint64_t got[4] = {};
  const Report report = explore(
      4,
      [&](int fiber) {
        if (fiber < 2) {
          Flag{word(fiber)}.store(1, order::release);
        } else {
          got[(fiber - 2) * 2] = Flag{word(fiber - 2)}.load(order::acquire);
          got[(fiber - 2) * 2 + 1] = Flag{word(3 - fiber)}.load(order::acquire);
        }
      },
      [&] { disagreed |= got[0] == 1 && got[1] == 0 && got[2] == 1 && got[3] == 0; });
  EXPECT_TRUE(report.complete);
  EXPECT_TRUE(disagreed);
}

TEST(Explorer, AnyoneMayWinACompareExchange) {
  std::set<std::uint64_t> final_values;
  const Report report = explore(
      3,
      [&](int fiber) {
        std::uint64_t expected = 0;
        Flag{word(0)}.compare_exchange(expected, static_cast<std::uint64_t>(fiber) + 1,
                                       order::relaxed);
      },
      [&] { final_values.insert(Flag{word(0)}.load(order::relaxed)); });
  EXPECT_TRUE(report.complete);
  EXPECT_EQ(final_values, (std::set<std::uint64_t>{1, 2, 3}));
}

TEST(Explorer, ReleaseSequenceGoesOnThroughExchange) {
  const Report report = explore(3, [&](int fiber) {
    Never watch;
    if (fiber == 0) {
      protocol::write(data(0), std::uint64_t{5});
      Flag{word(0)}.store(1, order::release);
    } else if (fiber == 1) {
      std::uint64_t expected = 1;
      Flag{word(0)}.compare_exchange(expected, 2, order::relaxed);
    } else {
      Flag{word(0)}.wait_until([](std::uint64_t v) { return v >= 1; }, watch);
      if (protocol::read(data(0)) != 5) Explorer::current().fail("wrong data");
    }
  });
  EXPECT_TRUE(report.passed && report.complete) << report.failure << report.schedule;
}

TEST(Explorer, ReleaseSequenceGoesOnThroughAdditions) {
  for (const bool sound : {true, false}) {
    const Report report = explore(2, [&](int fiber) {
      if (fiber == 0) {
        Flag{word(0)}.store(1, order::relaxed);
        Flag{word(1)}.fetch_add(1, sound ? order::release : order::relaxed);
        Flag{word(1)}.fetch_add(1, order::relaxed);
      } else if (Flag{word(1)}.fetch_add(0, order::acquire) == 2 &&
                 Flag{word(0)}.load(order::relaxed) == 0) {
        Explorer::current().fail("did not acquire");
      }
    });
    EXPECT_EQ(report.passed, sound) << report.failure << report.schedule;
  }
}

TEST(Explorer, AdditionsReadTheNewest) {
  std::set<std::uint64_t> sums;
  const Report report = explore(
      3, [&](int) { Flag{word(0)}.fetch_add(1, order::relaxed); },
      [&] { sums.insert(Flag{word(0)}.load(order::relaxed)); });
  EXPECT_TRUE(report.complete);
  EXPECT_EQ(sums, (std::set<std::uint64_t>{3}));
}

/// A wake that comes before the sleep is lost, unless the sleeper reads the word first, as a futex
/// does.
TEST(Explorer, SeesLostWakes) {
  for (const bool stores : {true, false}) {
    const Report report = explore(2, [&](int fiber) {
      if (fiber == 1) return model::sleep(word(0), 0);
      if (stores) Flag{word(0)}.store(1, order::relaxed);
      model::wake(word(0));
    });
    EXPECT_EQ(report.passed, stores) << report.schedule;
    if (!stores) {
      EXPECT_EQ(report.failure.find("deadlock: rank 1 sleeps"), 0u) << report.failure;
    }
  }
}

TEST(Explorer, SeesDataRaces) {
  const Report report = explore(2, [&](int) { protocol::write(data(0), std::uint64_t{1}); });
  EXPECT_NE(report.failure.find("data race"), std::string::npos);
  EXPECT_NE(report.schedule.find("rank 1: write"), std::string::npos) << report.schedule;
}

TEST(Explorer, SeesDeadlocks) {
  const Report report = explore(2, [&](int fiber) {
    Never watch;
    Flag{word(fiber)}.wait_until([](std::uint64_t v) { return v > 0; }, watch);
    Flag{word(1 - fiber)}.store(1, order::release);
  });
  EXPECT_NE(report.failure.find("deadlock"), std::string::npos);
}

TEST(Explorer, SeesAValueThatPassedBy) {  // == misses a value that was overwritten in time
  const Report report = explore(2, [&](int fiber) {
    Never watch;
    if (fiber == 0) {
      Flag{word(0)}.store(1, order::release);
      Flag{word(0)}.store(2, order::release);
    } else {
      Flag{word(0)}.wait_until([](std::uint64_t v) { return v == 1; }, watch);
    }
  });
  EXPECT_NE(report.failure.find("deadlock"), std::string::npos);
}

TEST(Explorer, EndsSlicesAnywhere) {
  std::set<int> outcomes;
  int ok = 0;
  const Report report = explore(
      2,
      [&](int fiber) {
        Never watch;
        if (fiber == 0) {
          Flag{word(0)}.store(1, order::release);
        } else {
          ok = Flag{word(0)}.wait_until([](std::uint64_t v) { return v == 1; }, watch).ok() ? 1 : 0;
        }
      },
      [&] { outcomes.insert(ok); }, {.preemptions = 2, .slices = 1});
  EXPECT_TRUE(report.complete);
  EXPECT_EQ(outcomes, (std::set<int>{0, 1}));
}

TEST(Explorer, ReportsALimit) {
  const Report report = explore(3,
                                [&](int fiber) {
                                  Flag{word(fiber)}.store(1, order::release);
                                  Flag{word(3)}.load(order::relaxed);
                                },
                                {}, {.preemptions = 2, .executions = 2});
  EXPECT_TRUE(report.passed);
  EXPECT_FALSE(report.complete);
}

/// Two fibers must take turns n times to count to n + 2: that takes n preemptions, no fewer.
TEST(Explorer, CountsPreemptions) {
  for (const int preemptions : {0, 1, 2}) {
    std::uint64_t most = 0;
    const Report report = explore(
        2,
        [&](int fiber) {
          for (std::uint64_t value = static_cast<std::uint64_t>(fiber); value < 4; value += 2) {
            std::uint64_t expected = value;
            Flag{word(0)}.compare_exchange(expected, value + 1, order::relaxed);
          }
        },
        [&] { most = std::max(most, Flag{word(0)}.load(order::relaxed)); },
        {.preemptions = preemptions});
    EXPECT_TRUE(report.complete);
    EXPECT_EQ(most, static_cast<std::uint64_t>(preemptions) + 2);
  }
}

// Random small programs: with and without reductions, the same outcomes.
struct Operation {
  int kind = 0;  // 0 load, 1 store, 2 compare-exchange, 3 wait, 4 add, 5 sleep, 6 wake
  int at = 0;
  std::uint64_t value = 0;
  order how = order::relaxed;
};
using Program = std::array<std::array<Operation, 4>, 3>;
using Seen = std::array<std::array<std::uint64_t, 4>, 3>;

Program random_program(std::mt19937_64& random) {
  Program program;
  for (auto& fiber : program) {
    for (Operation& operation : fiber) {
      operation.kind = static_cast<int>(random() % 7);
      operation.at = static_cast<int>(random() % 2);
      operation.value = 1 + random() % 3;
      const bool strong = random() % 2 == 0;
      if (strong) operation.how = operation.kind == 1 ? order::release : order::acquire;
    }
  }
  return program;
}

std::uint64_t perform(const Operation& operation) {
  const Flag flag{word(operation.at)};
  Never watch;
  std::uint64_t expected = operation.value - 1;
  switch (operation.kind) {
    case 0: return flag.load(operation.how);
    case 1: flag.store(operation.value, operation.how); return 0;
    case 2: return flag.compare_exchange(expected, operation.value, operation.how) ? 100 : expected;
    case 4: return flag.fetch_add(operation.value, operation.how);
    case 5: model::sleep(flag.word, expected); return 0;
    case 6: model::wake(flag.word); return 0;
    default: {
      const std::uint64_t wanted = operation.value;
      const protocol::Status status =
          flag.wait_until([wanted](std::uint64_t v) { return v >= wanted; }, watch, operation.how);
      return status.ok() ? status.seen : 200;
    }
  }
}

TEST(Explorer, ReductionsLoseNoOutcome) {
  constexpr std::uint64_t kSeed = 20261121;
  SCOPED_TRACE(kSeed);
  std::mt19937_64 random(kSeed);
  std::uint64_t naive_executions = 0, reduced_executions = 0;
  for (int round = 0; round < 150; ++round) {
    const Program program = random_program(random);
    const int fibers = round % 4 == 0 ? 3 : 2;
    const std::size_t steps = fibers == 3 ? 3 : 4;
    const bool forget = round % 3 == 0;  // what came before the second step
    for (const int preemptions : {0, 1, 2}) {
      std::set<Seen> outcomes[2];
      for (const bool naive : {false, true}) {
        Seen seen{};
        const Report report = explore(
            fibers,
            [&](int fiber) {
              const auto f = static_cast<std::size_t>(fiber);
              for (std::size_t i = 0; i < steps; ++i) {
                if (forget && i == 1) {
                  seen[f][0] = 0;
                  Explorer::current().checkpoint(1);
                }
                seen[f][i] = perform(program[f][i]);
              }
            },
            [&] { outcomes[naive ? 1 : 0].insert(seen); },
            {.preemptions = preemptions, .slices = 1, .naive = naive});
        ASSERT_TRUE(report.complete) << report.failure << report.schedule;
        (naive ? naive_executions : reduced_executions) += report.executions;
      }
      ASSERT_EQ(outcomes[0], outcomes[1]) << "round " << round << ", " << preemptions;
    }
  }
  EXPECT_LT(reduced_executions, naive_executions);
  std::printf("  %llu executions instead of %llu\n",
              static_cast<unsigned long long>(reduced_executions),
              static_cast<unsigned long long>(naive_executions));
}

}  // namespace
}  // namespace ferry::model

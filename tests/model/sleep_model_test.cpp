// Sleeping on flags (protocol/sync.hpp, Sleepers): whoever sleeps is woken.
#include <gtest/gtest.h>

#include "world.hpp"

namespace ferry::model::sleep_model {
namespace {

using protocol::Flag;
using protocol::order;
using protocol::Sleepers;
using protocol::SleepTraits;

std::uint64_t* arena_word(int i) {
  return reinterpret_cast<std::uint64_t*>(Explorer::current().arena()) + i;
}
Flag flag_of(int i) {
  return Flag{arena_word(2 * i)};
}
std::uint64_t* data_of(int i) {
  return arena_word(100 + i);
}

/// Ends a wait only when a time slice did.
struct SliceWatch {
  std::uint64_t spin_ns() { return 0; }
  std::uint64_t slice_ns() { return 0; }
  Status check() {
    Status status;
    if (Explorer::current().slices_used()) status.code = Status::Code::kDeadline;
    return status;
  }
};

/// A wait without its spinning.
template <class Traits>
Status await(Flag flag, std::uint64_t wanted) {
  SliceWatch watch;
  const auto reached = [wanted](std::uint64_t seen) { return seen >= wanted; };
  Status status;
  status.seen = flag.load(order::acquire);
  if (reached(status.seen)) return status;
  return Sleepers<Traits>(flag).sleep_until(reached, watch, status.seen, order::acquire);
}

template <class Traits>
void wake(Flag flag) {
  Sleepers<Traits>(flag).wake();
}

template <class Traits>
void publish(Flag flag, std::uint64_t value) {
  if (!Traits::kPublishesFirst) wake<Traits>(flag);
  flag.store(value, order::release);
  if (Traits::kPublishesFirst) wake<Traits>(flag);
}

struct Asleep : SleepTraits {
  static constexpr bool kPublishesFirst = true;
};

Report explore(int fibers, const std::function<void(int)>& body, const Bounds& bounds) {
  Explorer explorer;
  Scenario scenario;
  scenario.fibers = fibers;
  scenario.setup = [&explorer] {
    for (int i = 0; i < 3; ++i) {
      explorer.name(explorer.arena() + i * 16, 8, "flag " + std::to_string(i));
      explorer.name(explorer.arena() + i * 16 + 8, 8, "sleepers " + std::to_string(i));
    }
  };
  scenario.body = body;
  return explorer.explore(scenario, bounds);
}

void expect_awake(const Status& status) {
  if (!status.ok() && !Explorer::current().slices_used()) {
    Explorer::current().fail("gave up without cause");
  }
}

/// Two ranks raise each other's flags in turn, with data behind them. `killed`: ranks that counted
/// themselves as sleepers of both flags and then died.
template <class Traits = Asleep>
Report ping_pong(std::uint64_t generations, const Bounds& bounds, int killed = 0) {
  return explore(
      2 + killed,
      [=](int rank) {
        if (rank >= 2) {
          for (int i = 0; i < 2; ++i) Flag{flag_of(i).word + 1}.fetch_add(1, Traits::kCount);
          return;
        }
        for (std::uint64_t g = 1; g <= generations; ++g) {
          protocol::write(data_of(2 * (1 - rank) + static_cast<int>(g % 2)), g);
          publish<Traits>(flag_of(1 - rank), g);
          const Status status = await<Traits>(flag_of(rank), g);
          expect_awake(status);
          if (!status.ok()) return;
          if (protocol::read(data_of(2 * rank + static_cast<int>(g % 2))) != g) {
            Explorer::current().fail("wrong data");
          }
        }
      },
      bounds);
}

/// Two threads wait for different values of one flag.
template <class Traits = Asleep>
Report two_sleepers(const Bounds& bounds) {
  return explore(
      3,
      [](int rank) {
        if (rank > 0) return expect_awake(await<Traits>(flag_of(0), static_cast<unsigned>(rank)));
        publish<Traits>(flag_of(0), 1);
        publish<Traits>(flag_of(0), 2);
      },
      bounds);
}

/// Several ranks ring one bell.
template <class Traits = Asleep>
Report bell(const Bounds& bounds) {
  return explore(
      3,
      [](int rank) {
        if (rank == 0) return expect_awake(await<Traits>(flag_of(0), 2));
        flag_of(0).fetch_add(1, order::release);
        wake<Traits>(flag_of(0));
      },
      bounds);
}

TEST(SleepModel, EverybodyIsWoken) {
  expect_sound("sleep, 2 ranks, 3 generations", ping_pong(3, {3, 0}));
  expect_sound("sleep, 2 ranks, 2 generations, 1 slice", ping_pong(2, {2, 1}));
  expect_sound("sleep, two on one flag", two_sleepers({4, 0}));
  expect_sound("sleep, two on one flag, 1 slice", two_sleepers({2, 1}));
  expect_sound("sleep, a bell that two ring", bell({4, 0}));
  expect_sound("sleep, a bell that two ring, 1 slice", bell({2, 1}));
}

TEST(SleepModel, AKilledSleeperDoesNoHarm) {
  expect_sound("sleep, 2 ranks and one killed", ping_pong(2, {3, 0}, 1));
}

struct LoadsTheCount : Asleep {
  static std::uint64_t sleepers(Flag count) { return count.load(order::acquire); }
};
struct RelaxedWaker : Asleep {
  static std::uint64_t sleepers(Flag count) { return count.fetch_add(0, order::relaxed); }
};
struct RelaxedSleeper : Asleep {
  static constexpr order kCount = order::relaxed;
};
struct DoesNotCheck : Asleep {
  static constexpr bool kChecks = false;
};
struct WakesFirst : Asleep {
  static constexpr bool kPublishesFirst = false;
};

TEST(SleepModel, MutantsAreCaught) {
  const Bounds bounds{3, 0};
  expect_caught("sleep: the waker loads the count", ping_pong<LoadsTheCount>(2, bounds));
  expect_caught("sleep: the waker reads it relaxed", ping_pong<RelaxedWaker>(2, bounds));
  expect_caught("sleep: the sleeper counts relaxed", ping_pong<RelaxedSleeper>(2, bounds));
  expect_caught("sleep: no check before the sleep", ping_pong<DoesNotCheck>(2, bounds));
  expect_caught("sleep: wakes before it publishes", ping_pong<WakesFirst>(2, bounds));
  expect_caught("sleep: two on one flag, count loaded", two_sleepers<LoadsTheCount>(bounds));
  expect_caught("sleep: two on one flag, no check", two_sleepers<DoesNotCheck>(bounds));
  expect_caught("sleep: a bell, count loaded", bell<LoadsTheCount>(bounds));
  expect_caught("sleep: a bell, no check", bell<DoesNotCheck>(bounds));
}

}  // namespace
}  // namespace ferry::model::sleep_model

// The turn of a call among those of its group.
#pragma once
#include <chrono>
#include <mutex>

#include "ferry/bootstrap.hpp"

namespace ferry::cuda {

/// Waits for it. `check` is asked meanwhile, and once it is there: it may throw.
template <class Check>
std::unique_lock<std::timed_mutex> take_turn(std::timed_mutex& mutex, const OnWait& on_wait,
                                             const Check& check) {
  constexpr auto kPollPeriod = std::chrono::milliseconds(40);
  std::unique_lock turn(mutex, std::defer_lock);
  while (!turn.try_lock_for(kPollPeriod)) {
    check();
    if (on_wait) on_wait();
  }
  check();
  return turn;
}

}  // namespace ferry::cuda

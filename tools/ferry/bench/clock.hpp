// Times one operation of all ranks, again and again.
#pragma once
#include <chrono>

#include "bench/board.hpp"
#include "ferry/group.hpp"

namespace ferry::cli {

/// Nanoseconds of one call; its result is dropped outside the measured time.
template <class Operation>
double time_of(const Operation& operation) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point begin = Clock::now();
  [[maybe_unused]] const auto result = operation();
  return std::chrono::duration<double, std::nano>(Clock::now() - begin).count();
}

/// Collective: warm-up, then one sample an iteration, every one after a barrier.
template <class Operation>
void measure(const BenchSettings& settings, const BenchBoard& board, BenchCase which, Group& group,
             const Operation& operation) {
  for (int i = -settings.warmup; i < settings.iterations; ++i) {
    group.barrier();
    const double taken = time_of(operation);
    if (i >= 0) board.sample(which, group.rank(), i) = taken;
    if (group.rank() == 0) board.report(which);
  }
}

}  // namespace ferry::cli

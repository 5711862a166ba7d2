// Where the ranks of a benchmark leave what they measured.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "bench/data.hpp"
#include "bench/settings.hpp"
#include "run/shared_array.hpp"

namespace ferry::cli {

/// Of one run, shared between the ranks (threads or forked processes) and the command. Every
/// element is written by one rank and read after it ended; the progress is read meanwhile.
class BenchBoard {
 public:
  explicit BenchBoard(const BenchSettings& settings)
      : lines(lines_of(settings)),
        ranks_(static_cast<std::size_t>(settings.ranks)),
        iterations_(static_cast<std::size_t>(settings.iterations)),
        samples_(2 * lines.size() * ranks_ * iterations_),
        rows_((lines.empty() ? 1 : lines.back().tokens_index + 1) * ranks_),
        progress_(2) {}

  /// Microseconds of one call; where calls are timed in chains, `alone` is a single one.
  double& sample(std::size_t line, int rank, int iteration, bool alone = false) const {
    const std::size_t first = (2 * line + (alone ? 1 : 0)) * ranks_;
    return samples_[(first + static_cast<std::size_t>(rank)) * iterations_ +
                    static_cast<std::size_t>(iteration)];
  }
  BenchRows& rows(std::size_t tokens_index, int rank) const {
    return rows_[tokens_index * ranks_ + static_cast<std::size_t>(rank)];
  }
  /// The first line of a case: where there is one configuration, the line.
  std::size_t line_of(BenchCase which) const {
    const auto found = std::find_if(lines.begin(), lines.end(),
                                    [&](const BenchLine& line) { return line.which == which; });
    return static_cast<std::size_t>(found - lines.begin());
  }
  /// The line that rank 0 is at, and how often it has done something in all.
  void report(std::size_t line) const {
    std::atomic_ref(progress_[0])
        .store(static_cast<std::uint32_t>(line), std::memory_order_relaxed);
    std::atomic_ref(progress_[1]).fetch_add(1, std::memory_order_relaxed);  // only shown to people
  }
  BenchCase now() const {
    return lines[std::atomic_ref(progress_[0]).load(std::memory_order_relaxed)].which;
  }
  std::uint32_t done() const {
    return std::atomic_ref(progress_[1]).load(std::memory_order_relaxed);
  }

  const std::vector<BenchLine> lines;

 private:
  std::size_t ranks_;
  std::size_t iterations_;
  SharedArray<double> samples_;
  SharedArray<BenchRows> rows_;
  SharedArray<std::uint32_t> progress_;
};

/// Microseconds of one call; its result is dropped outside the measured time.
template <class Operation>
double time_of(const Operation& operation) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point begin = Clock::now();
  [[maybe_unused]] const auto result = operation();
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

}  // namespace ferry::cli

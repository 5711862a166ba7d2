// Where the ranks of a benchmark leave what they measured.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "bench/data.hpp"
#include "bench/settings.hpp"
#include "run/shared_array.hpp"

namespace ferry::cli {

/// Shared between the ranks (threads or forked processes) and the command. Every element is written
/// by one rank and read after it ended; the progress is read meanwhile.
class BenchBoard {
 public:
  explicit BenchBoard(const BenchSettings& settings)
      : ranks_(static_cast<std::size_t>(settings.ranks)),
        iterations_(static_cast<std::size_t>(settings.iterations)),
        samples_(kBenchCases * ranks_ * iterations_),
        rows_(2 * ranks_),
        progress_(2) {}

  /// Nanoseconds.
  double& sample(BenchCase which, int rank, int iteration) const {
    const auto c = static_cast<std::size_t>(which);
    return samples_[(c * ranks_ + static_cast<std::size_t>(rank)) * iterations_ +
                    static_cast<std::size_t>(iteration)];
  }
  BenchRows& rows(bool latency, int rank) const {
    return rows_[(latency ? ranks_ : 0) + static_cast<std::size_t>(rank)];
  }
  /// What rank 0 does now, and how often it has done something in all.
  void report(BenchCase now) const {
    std::atomic_ref(progress_[0]).store(static_cast<std::uint32_t>(now), std::memory_order_relaxed);
    std::atomic_ref(progress_[1]).fetch_add(1, std::memory_order_relaxed);  // only shown to people
  }
  BenchCase now() const {
    return static_cast<BenchCase>(std::atomic_ref(progress_[0]).load(std::memory_order_relaxed));
  }
  std::uint32_t done() const {
    return std::atomic_ref(progress_[1]).load(std::memory_order_relaxed);
  }

 private:
  std::size_t ranks_;
  std::size_t iterations_;
  SharedArray<double> samples_;
  SharedArray<BenchRows> rows_;
  SharedArray<std::uint32_t> progress_;
};

}  // namespace ferry::cli

// For the protocol tests: ranks as threads, with memory at the same place in every rank.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "protocol/flags.hpp"
#include "protocol/reach.hpp"
#include "protocol/watch.hpp"

namespace ferry::protocol {

/// Zeroed memory of `bytes` for each rank, aligned to lines.
class ThreadRanks {
 public:
  ThreadRanks(int ranks, std::size_t bytes) : ranks_(ranks), bytes_((bytes + 63) / 64 * 64) {
    const std::size_t all = bytes_ * static_cast<std::size_t>(ranks) + 64;
    memory_ = std::make_unique<std::byte[]>(all);
    void* at = memory_.get();
    std::size_t room = all;
    base_ = static_cast<std::byte*>(std::align(64, all - 64, at, room));
  }

  std::byte* address(int rank, Place place) const {
    return base_ + static_cast<std::size_t>(rank) * bytes_ + place.offset;
  }

  /// Runs `body(rank, reach)` on one thread for each rank.
  template <class Body>
  void run(Body body) const {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks_; ++rank) {
      threads.emplace_back([this, rank, &body] {
        MemoryReach reach([this](int peer, Place place) { return address(peer, place); });
        body(rank, reach);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

 private:
  int ranks_;
  std::size_t bytes_;
  std::unique_ptr<std::byte[]> memory_;
  std::byte* base_;
};

/// Never reached unless a test hangs.
inline DeadlineWatch long_wait() {
  return DeadlineWatch(std::chrono::seconds(60));
}

/// What word `i` of a message holds.
inline std::uint64_t word_of(int source, int target, Generation g, std::uint64_t i) {
  return (static_cast<std::uint64_t>(source) << 48) ^ (static_cast<std::uint64_t>(target) << 40) ^
         (g << 8) ^ i;
}

}  // namespace ferry::protocol

// How processes that take the places of lost ranks reach a rank's GPU memory, and it theirs: a page
// in the control segment of its CPU, behind the flags. Where nobody joins there is none.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/create.hpp"
#include "fabric/cuda/device_memory.hpp"

namespace ferry::cuda {

/// In shared memory, zeroed at first, written by its owner alone.
class GpuPage {
 public:
  // Of the owner.

  /// Throws Error(system) if the card is too long.
  void show(std::span<const std::byte> card);
  void add(const fabric::Segment& segment);

  // Of the others.

  /// fabric::DeviceMemory::card; empty: nothing is shown yet, or its process has ended and the page
  /// is gone. Throws Error(mismatch), like `segments`, if it cannot be.
  std::vector<std::byte> card() const;
  std::vector<engine::Card> segments() const;

 private:
  static constexpr std::size_t kMostCard = 2048;

  std::uint64_t card_bytes_;  // set after `card_`
  std::array<std::byte, kMostCard> card_;
  std::uint64_t count_;  // each is written before it counts
  std::array<engine::Card, fabric::kMaxDeviceSegments> segments_;
};

}  // namespace ferry::cuda

// Regions of one call, given back when it has ended.
#pragma once
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine/memory.hpp"

namespace ferry::engine {

/// Holds regions until they are handed on (`keep`) or the object ends, which gives them back. If
/// the call failed, the arena holds them back: a peer may still write there.
class Regions {
 public:
  explicit Regions(std::shared_ptr<Memory> memory) : memory_(std::move(memory)) {}
  ~Regions() { release_all(); }
  Regions(const Regions&) = delete;
  Regions& operator=(const Regions&) = delete;

  /// Takes several regions or none. Sizes of 0 are taken too.
  std::optional<std::vector<Region>> take(const std::vector<std::size_t>& sizes) {
    std::vector<Region> taken;
    for (std::size_t bytes : sizes) {
      const auto region = memory_->arena.allocate(bytes);
      if (!region) {
        for (const Region& got : taken) memory_->arena.release(got);
        return std::nullopt;
      }
      taken.push_back(*region);
    }
    held_.insert(held_.end(), taken.begin(), taken.end());
    return taken;
  }
  static std::size_t total(const std::vector<std::size_t>& sizes) {
    std::size_t bytes = 0;
    for (std::size_t size : sizes) bytes += size + 2 * kRegionAlignment;
    return bytes;
  }
  /// Hands a region to a tensor.
  std::shared_ptr<void> keep(const Region& region) {
    std::erase_if(held_, [&](const Region& held) { return held.data == region.data; });
    return lease(memory_, region);
  }
  void release_all() {
    for (const Region& region : held_) memory_->arena.release(region);
    held_.clear();
  }

 private:
  std::shared_ptr<Memory> memory_;
  std::vector<Region> held_;
};

}  // namespace ferry::engine

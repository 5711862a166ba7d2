// Hands out pieces of registered segments and takes them back.
#pragma once
#include <cstddef>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "fabric/fabric.hpp"

namespace ferry::engine {

/// A piece of this rank's registered memory.
struct Region {
  fabric::Address address{};
  std::byte* data = nullptr;
  std::size_t bytes = 0;    ///< rounded up to kRegionAlignment
  std::uint64_t epoch = 0;  ///< of the arena, when it was taken
};

inline constexpr std::size_t kRegionAlignment = 256;

/// First fit over free pieces of all segments; neighbours that are free are joined. Thread-safe:
/// tensors are dropped on any thread.
///
/// After a failure a peer may still write to any region that was taken before: such regions are
/// held back when they are released, until `free_held` says that nobody does.
class Arena {
 public:
  void add(const fabric::Segment& segment);
  /// Nothing when no free piece is large enough. Zero bytes take one unit, so that every region
  /// has an address of its own.
  std::optional<Region> allocate(std::size_t bytes);
  void release(const Region& region);

  /// A call has failed: regions that are taken now are held back from here on.
  void hold_back();
  /// Whether regions are held back.
  bool holds_back() const;
  /// All that wrote to regions of earlier epochs have stopped: those held back are free again.
  void free_held();

  /// Where a pointer lies, if `bytes` from it lie inside one segment.
  std::optional<fabric::Address> find(const void* pointer, std::size_t bytes) const;
  std::size_t total_bytes() const;
  std::size_t used_bytes() const;

 private:
  struct Pool {
    fabric::Segment segment;
    std::map<std::size_t, std::size_t> free;  // offset → bytes
  };
  void free(const Region& region);  // with mutex_ held

  mutable std::mutex mutex_;
  std::vector<Pool> pools_;
  std::uint64_t epoch_ = 0;
  std::uint64_t held_before_ = 0;  // regions of earlier epochs are held back
  std::vector<Region> held_;
  std::size_t used_ = 0;
};

}  // namespace ferry::engine

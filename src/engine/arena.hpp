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
  std::size_t bytes = 0;  ///< rounded up to kRegionAlignment
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
  /// All that wrote to them have stopped: regions that were held back are free again.
  void free_held();

  /// Where a pointer lies, if `bytes` from it lie inside one segment.
  std::optional<fabric::Address> find(const void* pointer, std::size_t bytes) const;
  std::size_t total_bytes() const;
  std::size_t used_bytes() const;

 private:
  struct Pool {
    fabric::Segment segment;
    std::map<std::size_t, std::size_t> free;  // offset → bytes
    std::map<std::size_t, std::size_t> old;   // offset → end: held back when they are released
  };
  // With mutex_ held.
  Pool* pool_of(const Region& region);
  void free(Pool& pool, const Region& region);

  mutable std::mutex mutex_;
  std::vector<Pool> pools_;
  bool holds_back_ = false;
  std::vector<Region> held_;
  std::size_t used_ = 0;
};

}  // namespace ferry::engine

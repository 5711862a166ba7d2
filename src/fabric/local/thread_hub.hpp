// Where ranks of one process find each other's segments.
#pragma once
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "fabric/memory.hpp"
#include "fabric/segment_handle.hpp"

namespace ferry::fabric {

/// Shared by all ranks of a local or sim fabric. Holds a segment from registration until every peer
/// has attached it or its rank left; then those who attached it hold it. Thread-safe.
class ThreadHub {
 public:
  ThreadHub(Wire wire, int ranks, const JobKey& key)
      : wire_(wire), key_(key), offered_(static_cast<std::size_t>(ranks)) {}

  /// Offers a segment; returns its handle.
  std::vector<std::byte> offer(int rank, SegmentId segment, std::size_t bytes,
                               std::shared_ptr<Memory> memory);
  /// The segment for which a peer gave this handle. Throws Error(system) naming the peer.
  std::shared_ptr<Memory> take(int self, int peer, SegmentId segment, std::size_t bytes,
                               std::span<const std::byte> handle);
  void withdraw(int rank, SegmentId segment);
  void withdraw_all(int rank) noexcept;

 private:
  Wire wire_;
  JobKey key_;
  std::mutex mutex_;
  std::vector<std::map<SegmentId, std::shared_ptr<Memory>>> offered_;  // by rank
};

}  // namespace ferry::fabric

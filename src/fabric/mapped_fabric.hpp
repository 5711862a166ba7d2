// What every fabric inside one domain shares: peers' segments are memory of this process.
#pragma once
#include "fabric/fabric.hpp"
#include "fabric/segment_table.hpp"

namespace ferry::fabric {

/// put = copy, publish = release store and wake. Several threads may put, publish and ask for
/// pointers at once, also while one thread registers or attaches.
class MappedFabric : public Fabric {
 public:
  MappedFabric(int rank, int size) : rank_(rank), size_(size), segments_(rank, size) {}

  int rank() const final { return rank_; }
  int size() const final { return size_; }
  std::byte* pointer(int peer, SegmentId segment) const noexcept final;
  std::size_t bytes(int peer, SegmentId segment) const noexcept final {
    return segments_.bytes(peer, segment);
  }
  void put(int peer, Address to, const void* from, std::size_t bytes, std::uint64_t tag) final;
  void publish(int peer, Address flag, std::uint64_t value, std::uint64_t bytes,
               std::uint64_t tag) final;

 protected:
  SegmentTable& segments() { return segments_; }
  const SegmentTable& segments() const { return segments_; }

 private:
  int rank_;
  int size_;
  SegmentTable segments_;
};

}  // namespace ferry::fabric

// How the protocols reach a peer over a fabric: through a pointer inside the domain, by put and
// publish outside.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "fabric/fabric.hpp"
#include "protocol/reach.hpp"

namespace ferry::engine {

class FabricReach {
 public:
  /// `tag_space` keeps the tags of several exchanges on one fabric apart. `segments`: each rank's
  /// number of the one segment that this reach is for, because ranks that grew at other times
  /// number theirs otherwise; empty: the same number everywhere. `live`: [ranks], or null: flags go
  /// to all; else to those where it is not 0.
  explicit FabricReach(fabric::Fabric& fabric, std::uint64_t tag_space = 0,
                       std::vector<fabric::SegmentId> segments = {},
                       const std::uint8_t* live = nullptr)
      : fabric_(&fabric),
        tag_space_(tag_space << 40),
        segments_(std::move(segments)),
        live_(live) {}

  void write(int peer, protocol::Place to, const void* from, std::size_t bytes, std::uint64_t tag) {
    const fabric::SegmentId segment = segment_of(peer, to);
    if (std::byte* base = fabric_->pointer(peer, segment)) {
      protocol::write_bytes(base + to.offset, from, bytes);
    } else {
      fabric_->put(peer, {segment, to.offset}, from, bytes, tag ^ tag_space_);
    }
  }
  /// Beyond the domain alone: pieces that lie one behind the other there.
  void write_pieces(int peer, protocol::Place to, std::span<const fabric::Piece> pieces,
                    std::uint64_t tag) {
    fabric_->put_pieces(peer, {segment_of(peer, to), to.offset}, pieces, tag ^ tag_space_);
  }
  void publish(int peer, const protocol::Signal& signal) {
    if (!has(peer)) return;
    const fabric::SegmentId segment = segment_of(peer, signal.flag);
    if (std::byte* base = fabric_->pointer(peer, segment)) {
      protocol::publish_in_memory(flag(base + signal.flag.offset), signal.value);
    } else {
      fabric_->publish(peer, {segment, signal.flag.offset}, signal.value, signal.bytes,
                       signal.tag ^ tag_space_);
    }
  }
  void notify(int peer, protocol::Place place, std::uint64_t value) {
    if (!has(peer)) return;
    const fabric::SegmentId segment = segment_of(peer, place);
    if (std::byte* base = fabric_->pointer(peer, segment)) {
      protocol::publish_in_memory(flag(base + place.offset), value);
    } else {
      fabric_->publish(peer, {segment, place.offset}, value, 0, kBroadcastTag);
    }
  }

 private:
  static constexpr std::uint64_t kBroadcastTag = ~std::uint64_t{0};
  static protocol::Flag flag(std::byte* word) {
    return protocol::Flag{reinterpret_cast<std::uint64_t*>(word)};
  }
  bool has(int peer) const { return live_ == nullptr || live_[peer] != 0; }
  fabric::SegmentId segment_of(int peer, const protocol::Place& place) const {
    return segments_.empty() ? place.segment : segments_[static_cast<std::size_t>(peer)];
  }

  fabric::Fabric* fabric_;
  std::uint64_t tag_space_;
  std::vector<fabric::SegmentId> segments_;  // [ranks], or empty
  const std::uint8_t* live_;
};

static_assert(protocol::Reach<FabricReach>);

}  // namespace ferry::engine

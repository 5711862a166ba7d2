// How the protocols reach a peer over a fabric: through a pointer inside the domain, by put and
// publish outside.
#pragma once
#include <cstddef>
#include <cstdint>

#include "fabric/fabric.hpp"
#include "protocol/reach.hpp"

namespace ferry::host {

class FabricReach {
 public:
  /// `tag_space` keeps the tags of several exchanges on one fabric apart.
  explicit FabricReach(fabric::Fabric& fabric, std::uint64_t tag_space = 0)
      : fabric_(&fabric), tag_space_(tag_space << 40) {}

  void write(int peer, protocol::Place to, const void* from, std::size_t bytes,
             std::uint64_t tag) {
    if (std::byte* base = fabric_->pointer(peer, to.segment)) {
      protocol::write_bytes(base + to.offset, from, bytes);
    } else {
      fabric_->put(peer, {to.segment, to.offset}, from, bytes, tag ^ tag_space_);
    }
  }
  void publish(int peer, const protocol::Signal& signal) {
    if (std::byte* base = fabric_->pointer(peer, signal.flag.segment)) {
      protocol::publish_in_memory(flag(base + signal.flag.offset), signal.value);
    } else {
      fabric_->publish(peer, {signal.flag.segment, signal.flag.offset}, signal.value, signal.bytes,
                       signal.tag ^ tag_space_);
    }
  }
  void notify(int peer, protocol::Place place, std::uint64_t value) {
    if (std::byte* base = fabric_->pointer(peer, place.segment)) {
      protocol::publish_in_memory(flag(base + place.offset), value);
    } else {
      fabric_->publish(peer, {place.segment, place.offset}, value, 0, kNoticeTag);
    }
  }

 private:
  static constexpr std::uint64_t kNoticeTag = ~std::uint64_t{0};
  static protocol::Flag flag(std::byte* word) {
    return protocol::Flag{reinterpret_cast<std::uint64_t*>(word)};
  }
  fabric::Fabric* fabric_;
  std::uint64_t tag_space_;
};

static_assert(protocol::Reach<FabricReach>);

}  // namespace ferry::host

#include "fabric/mapped_fabric.hpp"

#include <cstring>

#include "protocol/reach.hpp"

namespace ferry::fabric {

std::byte* MappedFabric::pointer(int peer, SegmentId segment) const noexcept {
  const SegmentTable::Entry* entry = segments_.find(peer, segment);
  return entry == nullptr ? nullptr : entry->memory->data();
}

void MappedFabric::put(int peer, Address to, const void* from, std::size_t bytes,
                       std::uint64_t /*tag*/) {
  const auto& entry = segments_.checked(peer, to, bytes, "put");
  if (bytes > 0) std::memcpy(entry.memory->data() + to.offset, from, bytes);
}

void MappedFabric::publish(int peer, Address flag, std::uint64_t value, std::uint64_t /*bytes*/,
                           std::uint64_t /*tag*/) {
  const auto& entry = segments_.checked_flag(peer, flag, "publish");
  // All bytes of the tag were copied by this thread before: the release store orders them.
  auto* word = reinterpret_cast<std::uint64_t*>(entry.memory->data() + flag.offset);
  protocol::publish_in_memory(protocol::Flag{word}, value);
}

}  // namespace ferry::fabric

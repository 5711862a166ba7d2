#include "fabric/local/thread_hub.hpp"

#include <utility>

namespace ferry::fabric {

std::vector<std::byte> ThreadHub::offer(int rank, SegmentId segment, std::size_t bytes,
                                        std::shared_ptr<Memory> memory) {
  const std::lock_guard lock(mutex_);
  offered_[static_cast<std::size_t>(rank)][segment] = std::move(memory);
  return to_bytes({.way = wire_, .rank = rank, .segment = segment, .bytes = bytes, .job = key_});
}

std::shared_ptr<Memory> ThreadHub::take(int self, int peer, SegmentId segment, std::size_t bytes,
                                        std::span<const std::byte> handle) {
  const Attachment attachment{wire_, self, peer, segment, bytes, key_};
  checked_handle(handle, attachment);
  const std::lock_guard lock(mutex_);
  const auto& segments = offered_[static_cast<std::size_t>(peer)];
  const auto it = segments.find(segment);
  if (it == segments.end()) throw_attach(attachment, "it is sealed, or the rank left");
  return it->second;
}

void ThreadHub::withdraw(int rank, SegmentId segment) {
  std::shared_ptr<Memory> dropped;  // unmapped, if this was the last share, outside the lock
  const std::lock_guard lock(mutex_);
  auto node = offered_[static_cast<std::size_t>(rank)].extract(segment);
  if (!node.empty()) dropped = std::move(node.mapped());
}

void ThreadHub::withdraw_all(int rank) noexcept {
  std::map<SegmentId, std::shared_ptr<Memory>> dropped;
  const std::lock_guard lock(mutex_);
  dropped.swap(offered_[static_cast<std::size_t>(rank)]);
}

}  // namespace ferry::fabric

#include "cuda/pinned.hpp"

#include <cstring>

#include "core/layout.hpp"
#include "cuda/runtime.hpp"

namespace ferry::cuda {

std::shared_ptr<PinnedPool> PinnedPool::make(std::size_t slot_bytes, std::size_t slots) {
  std::shared_ptr<PinnedPool> pool(new PinnedPool(round_up(slot_bytes, kLineBytes)));
  pool->add(slots);
  return pool;
}

PinnedPool::~PinnedPool() {
  for (void* slab : slabs_) cudaFreeHost(slab);
}

void PinnedPool::add(std::size_t slots) {
  void* slab = nullptr;
  check(cudaHostAlloc(&slab, slots * slot_bytes_, cudaHostAllocPortable | cudaHostAllocMapped),
        "cudaHostAlloc");
  slabs_.push_back(slab);
  for (std::size_t i = slots; i-- > 0;) {
    free_.push_back(static_cast<std::byte*>(slab) + i * slot_bytes_);
  }
}

std::shared_ptr<std::byte> PinnedPool::take() {
  std::byte* slot = nullptr;
  {
    std::scoped_lock lock(mutex_);
    constexpr std::size_t kMore = 16;
    if (free_.empty()) add(kMore);
    slot = free_.back();
    free_.pop_back();
  }
  std::memset(slot, 0, slot_bytes_);
  return {slot, [pool = shared_from_this()](std::byte* back) {
            std::scoped_lock lock(pool->mutex_);
            pool->free_.push_back(back);
          }};
}

PinnedBuffer::~PinnedBuffer() {
  if (data_ != nullptr) cudaFreeHost(data_);
}

std::byte* PinnedBuffer::take(std::size_t bytes) {
  if (bytes <= bytes_) return data_;
  const std::size_t more = std::max(bytes, 2 * bytes_);
  void* grown = nullptr;
  check(cudaHostAlloc(&grown, more, cudaHostAllocPortable), "cudaHostAlloc");
  if (data_ != nullptr) cudaFreeHost(data_);
  data_ = static_cast<std::byte*>(grown);
  bytes_ = more;
  return data_;
}

}  // namespace ferry::cuda

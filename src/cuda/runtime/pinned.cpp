#include "cuda/runtime/pinned.hpp"

#include <cstring>
#include <ferry/error.hpp>
#include <string>

#include "core/layout.hpp"
#include "cuda/runtime/runtime.hpp"
#include "fabric/cuda/driver.hpp"
#include "fabric/cuda/pinned_memory.hpp"

namespace ferry::cuda {
namespace {

std::shared_ptr<std::byte> pinned(std::size_t bytes) {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaSetDevice(device), "cudaSetDevice");  // a thread may have no context until then
  try {
    return fabric::pinned_memory(bytes);
  } catch (const fabric::CallRefused& refused) {
    const bool memory = refused.result() == CUDA_ERROR_OUT_OF_MEMORY;
    throw Error(memory ? ErrorKind::exhausted : ErrorKind::system,
                std::to_string(bytes) + " bytes of pinned memory: " + refused.what());
  }
}

}  // namespace

std::shared_ptr<PinnedPool> PinnedPool::make(std::size_t slot_bytes, std::size_t slots) {
  std::shared_ptr<PinnedPool> pool(new PinnedPool(round_up(slot_bytes, kLineBytes)));
  pool->add(slots);
  return pool;
}

void PinnedPool::add(std::size_t slots) {
  slabs_.push_back(pinned(slots * slot_bytes_));
  for (std::size_t i = slots; i-- > 0;) {
    free_.push_back(slabs_.back().get() + i * slot_bytes_);
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

std::byte* PinnedBuffer::take(std::size_t bytes) {
  if (bytes > bytes_) {
    const std::size_t more = std::max(bytes, 2 * bytes_);
    data_ = pinned(more);
    bytes_ = more;
  }
  return data_.get();
}

}  // namespace ferry::cuda

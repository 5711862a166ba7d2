#include "cuda/gpu_memory.hpp"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "core/layout.hpp"
#include "ferry/error.hpp"

namespace ferry::cuda {

GpuMemory::GpuMemory(std::unique_ptr<fabric::DeviceMemory> registered)
    : device_(registered->device()),
      events_(std::make_shared<EventPool>(device_)),
      wire_(std::move(registered)),
      context_(std::make_shared<fabric::DeviceContext>(device_)),
      registered_(events_),
      local_(events_) {
  check(cudaStreamCreateWithFlags(&own_.stream, cudaStreamNonBlocking),
        "cudaStreamCreateWithFlags");
  own_.id = id_of(own_.stream);
}

GpuMemory::~GpuMemory() {
  if (context_->usable()) cudaStreamDestroy(own_.stream);
}

Held GpuMemory::hold(StreamArena& arena, const engine::Region& region) {
  return {region, std::shared_ptr<void>(region.data, [memory = shared_from_this(), &arena,
                                                      region](void*) { arena.give_back(region); })};
}

Held GpuMemory::take_registered(std::size_t bytes, const User& user) {
  const auto region = registered_.take(bytes, user);
  return region ? hold(registered_, *region) : Held{};
}

Held GpuMemory::take_local(std::size_t bytes, const User& user) {
  if (const auto region = local_.take(bytes, user)) return hold(local_, *region);
  grow_local(bytes);
  if (const auto region = local_.take(bytes, user)) return hold(local_, *region);
  throw Error(ErrorKind::exhausted,
              "no GPU memory for a result of " + std::to_string(bytes) + " bytes");
}

void GpuMemory::grow_local(std::size_t bytes) {
  constexpr std::size_t kLeast = std::size_t{32} << 20;
  const std::size_t page = context_->granularity();
  const std::size_t needed = round_up(bytes + engine::kRegionAlignment, page);
  const std::size_t wanted = round_up(std::max({needed, kLeast, local_.total_bytes() / 2}), page);
  std::scoped_lock lock(mutex_);
  const std::array<int, 1> users{device_};
  std::string reason;
  for (const std::size_t size : {wanted, needed}) {
    try {
      auto block = context_->abilities().vmm
                       ? fabric::DeviceBlock::make_vmm(context_, size, users, nullptr)
                       : fabric::DeviceBlock::make_classic(context_, size, nullptr);
      // Its own number for each: the arena tells pieces apart by it.
      local_.add({static_cast<fabric::SegmentId>(blocks_.size()), block->data(), size, {}});
      blocks_.push_back(std::move(block));
      return;
    } catch (const fabric::CallRefused& refused) {
      reason = refused.what();
    }
  }
  throw Error(ErrorKind::exhausted, "no GPU memory for results of " + std::to_string(bytes) +
                                        " bytes on cuda:" + std::to_string(device_) + ": " +
                                        reason);
}

void GpuMemory::settle(const Held& held, const GpuEvent& event) {
  registered_.settle(held.region, event);
  local_.settle(held.region, event);
}

bool GpuMemory::record_stream(const void* pointer, cudaStream_t stream) {
  return registered_.record_stream(pointer, stream) || local_.record_stream(pointer, stream);
}

}  // namespace ferry::cuda

#include "cuda/domains/staging.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "cuda/runtime/runtime.hpp"
#include "engine/growth.hpp"

namespace ferry::cuda {
namespace {

/// Half as much again as there was, so that growth is rare.
std::size_t wanted(std::size_t needed, std::size_t before) {
  constexpr std::size_t kLeast = std::size_t{2} << 20;
  return std::max({needed, before + before / 2, kLeast});
}

}  // namespace

void pin_for_gpu(const fabric::Segment& segment, int device) {
  const OnDevice here(device);
  check(cudaHostRegister(segment.data, segment.bytes,
                         cudaHostRegisterPortable | cudaHostRegisterMapped),
        "cudaHostRegister");
  void* seen = nullptr;
  check(cudaHostGetDevicePointer(&seen, segment.data, 0), "cudaHostGetDevicePointer");
  if (seen != segment.data) {
    throw Error(ErrorKind::unsupported,
                "Group: this GPU sees pinned memory at another address than the CPU; expected a "
                "64-bit machine with unified addresses");
  }
}

void unpin(std::byte* data, int device) noexcept {
  try {
    const OnDevice here(device);
    cudaHostUnregister(data);
  } catch (...) {  // the GPU is going away
  }
}

StagingBuffers::StagingBuffers(engine::Channel& channel, std::shared_ptr<engine::Memory> memory,
                               int device)
    : channel_(channel), wire_(std::move(memory)), device_(device) {
  for (auto& sizes : sizes_) sizes.assign(static_cast<std::size_t>(channel.size()), 0);
}

StagingBuffers::~StagingBuffers() {
  for (std::byte* data : pinned_) unpin(data, device_);
}

/// What is given up stays registered until the group ends.
void StagingBuffers::begin_epoch(bool renew) {
  agreed_ = false;
  if (!renew) return;
  for (fabric::Segment& segment : memory_) segment = {};
}

void StagingBuffers::agree(const char* call) {
  if (agreed_) return;
  StepMessage head;
  head.call.kind = CallKind::grow;
  head.need_bytes = memory_[kIn].bytes;
  head.rows = static_cast<std::int64_t>(memory_[kRoutes].bytes);
  channel_.swap(call, head);
  engine::check_same_call(channel_, call, head.call);
  for (const int peer : channel_.ranks()) {
    const auto p = static_cast<std::size_t>(peer);
    sizes_[kIn][p] = channel_.head(peer).need_bytes;
    sizes_[kRoutes][p] = static_cast<std::size_t>(channel_.head(peer).rows);
  }
  agreed_ = true;
}

bool StagingBuffers::has(Area area, const std::vector<std::size_t>& needs) const {
  return std::equal(needs.begin(), needs.end(), sizes_[area].begin(),
                    [](std::size_t need, std::size_t size) { return need <= size; });
}

void StagingBuffers::pin(const fabric::Segment& segment) {
  pin_for_gpu(segment, device_);
  pinned_.push_back(segment.data);
}

void StagingBuffers::grow(const char* call, Area area, const std::vector<std::size_t>& needs) {
  const auto self = static_cast<std::size_t>(channel_.rank());
  const std::size_t mine = needs[self] > sizes_[area][self] ? needs[self] : 0;
  auto added = engine::add_segments(
      channel_, *wire_,
      {call, "rows, columns and routes", mine, mine > 0 ? wanted(mine, sizes_[area][self]) : 0});
  if (added.mine.bytes > 0) {
    if (area == kIn) pin(added.mine);
    memory_[area] = added.mine;
    registered_ += added.mine.bytes;
  }
  for (std::size_t r = 0; r < needs.size(); ++r) {
    if (added.bytes[r] > 0) sizes_[area][r] = added.bytes[r];
  }
}

void StagingBuffers::grow_out(std::size_t bytes) {
  fabric::Segment segment =
      wire_->fabric->register_memory(engine::segment_bytes(wanted(bytes, memory_[kOut].bytes)));
  wire_->fabric->seal(segment.id);  // no peer needs it
  pin(segment);
  registered_ += segment.bytes;
  memory_[kOut] = std::move(segment);
}

}  // namespace ferry::cuda

#include "cuda/runtime/gpu_memory.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <string>
#include <thread>
#include <utility>

#include "core/layout.hpp"
#include "ferry/error.hpp"

namespace ferry::cuda {

GpuMemory::GpuMemory(std::unique_ptr<fabric::DeviceMemory> registered,
                     std::chrono::nanoseconds deadline)
    : device_(registered->device()),
      deadline_(deadline),
      events_(std::make_shared<EventPool>(device_)),
      wire_(std::move(registered)),
      context_(std::make_shared<fabric::DeviceContext>(device_)),
      registered_(events_, deadline),
      local_(events_, deadline) {
  check(cudaStreamCreateWithFlags(&own_.stream, cudaStreamNonBlocking),
        "cudaStreamCreateWithFlags");
  own_.id = id_of(own_.stream);
}

GpuMemory::~GpuMemory() {
  if (!context_->usable()) return;
  try {
    const OnDevice here(device_);
    if (!await_rest()) keep_for_ever();
    cudaStreamDestroy(own_.stream);
  } catch (...) {  // the GPU is going away, and nobody uses the memory
  }
}

bool GpuMemory::await_rest() {
  const auto start = std::chrono::steady_clock::now();
  while (!registered_.at_rest() || !local_.at_rest()) {
    if (std::chrono::steady_clock::now() - start > deadline_) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

/// Unmapping memory under a kernel would take the GPU away from the whole process.
void GpuMemory::keep_for_ever() {
  std::fprintf(stderr,
               "ferry: cuda:%d: work that uses tensors of a destroyed group did not end before the "
               "deadline; %zu bytes stay until the process ends\n",
               device_, registered_.total_bytes() + local_.total_bytes());
  new std::unique_ptr<fabric::DeviceMemory>(std::move(wire_));
  new std::vector<std::shared_ptr<fabric::DeviceBlock>>(std::move(blocks_));
}

Held GpuMemory::hold(StreamArena& arena, const engine::Region& region) {
  return {region, std::shared_ptr<void>(region.data, [memory = shared_from_this(), &arena,
                                                      region](void*) { arena.give_back(region); })};
}

Held GpuMemory::take_registered(std::size_t bytes, const User& user) {
  const auto region = registered_.take(bytes, user);
  return region ? hold(registered_, *region) : Held{};
}

Held GpuMemory::take_idle(std::size_t bytes, const User& user) {
  const auto region = registered_.take_idle(bytes, user);
  return region ? hold(registered_, *region) : Held{};
}

Held GpuMemory::take_local(std::size_t bytes, const User& user) {
  if (const auto region = local_.take(bytes, user)) return hold(local_, *region);
  std::string reason = grow_local(bytes);
  if (reason.empty()) {
    if (const auto region = local_.take(bytes, user)) return hold(local_, *region);
    reason = "other threads took what was added";
  }
  throw Error(ErrorKind::exhausted,
              std::string(user.call) + ": rank " + std::to_string(user.rank) + " has no room for " +
                  std::to_string(bytes) +
                  " bytes beside its registered memory on cuda:" + std::to_string(device_) + " (" +
                  reason + "); drop results and plans, or free GPU memory that others hold",
              {user.rank, user.rank, user.call, 0, 0, 0});
}

/// Says why not, or nothing.
std::string GpuMemory::grow_local(std::size_t bytes) {
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
      return {};
    } catch (const fabric::CallRefused& refused) {
      reason = refused.what();
    }
  }
  return reason.empty() ? "no GPU memory" : reason;
}

void GpuMemory::settle(const Held& held, const GpuEvent& event) {
  registered_.settle(held.region, event);
  local_.settle(held.region, event);
}

bool GpuMemory::record_stream(const void* pointer, cudaStream_t stream) {
  return registered_.record_stream(pointer, stream) || local_.record_stream(pointer, stream);
}

std::shared_ptr<void> GpuMemory::hold(const void* pointer) {
  for (StreamArena* arena : {&registered_, &local_}) {
    if (!arena->hold(pointer)) continue;
    return {const_cast<void*>(pointer),
            [memory = shared_from_this(), arena](void* held) { arena->let_go(held); }};
  }
  return nullptr;
}

void GpuMemory::record_use(const void* pointer, unsigned long long stream,
                           const std::shared_ptr<Use>& use) {
  registered_.record_use(pointer, stream, use);
  local_.record_use(pointer, stream, use);
}

}  // namespace ferry::cuda

#include "cuda/throughput/vault.hpp"

#include <string>

#include "base/process_limits.hpp"
#include "cuda/runtime/event.hpp"
#include "cuda/throughput/engine.hpp"
#include "cuda/throughput/turn.hpp"
#include "engine/vault/staged_copies.hpp"

namespace ferry::cuda {
namespace {

/// Of each of the two buffers.
constexpr std::size_t kPieceBytes = std::size_t{8} << 20;

}  // namespace

VaultOnGpu::VaultOnGpu(CudaEngine& engine)
    : engine_(engine), topology_(Domains::blocks(engine.size(), 0)) {
  const OnDevice here(engine_.device().index);
  for (std::size_t slot = 0; slot < buffers_.size(); ++slot) {
    pieces_[slot] = {buffers_[slot].take(kPieceBytes), kPieceBytes};
  }
  stream_ = make_urgent_stream();
}

VaultOnGpu::~VaultOnGpu() {
  try {
    const OnDevice here(engine_.device().index);
    cudaStreamDestroy(stream_);
  } catch (...) {  // the GPU is going away
  }
}

std::shared_ptr<void> VaultOnGpu::kept() {
  return engine_.shared_from_this();
}
engine::Channel& VaultOnGpu::channel() {
  return engine_.channel_;
}
const std::shared_ptr<engine::Memory>& VaultOnGpu::shared_memory() const {
  return engine_.parts_.cpu;
}
const engine::CurrentView& VaultOnGpu::now() const {
  return engine_.now_;
}
Device VaultOnGpu::device() const {
  return engine_.device();
}

void VaultOnGpu::go_on_from(std::uint64_t step) {
  // It has state now.
  if (channel().joined_at(channel().rank()) != 0) channel().say_joined(0);
  if (engine_.regroup_) engine_.regroup_->forget_joined();
  engine_.now_.commit(step);
}

void VaultOnGpu::free_held() {
  if (engine_.regroup_) engine_.regroup_->free_held();
}

/// When all calls before have ended: then no peer waits for the monitor to map what it offers, and
/// this thread has the fabric of the CPUs for itself.
void VaultOnGpu::in_turn(const char* call, const std::function<void()>& work) {
  const auto turn =
      take_turn(engine_.turn_, engine_.config_.on_wait, [&] { engine_.check_usable(call); });
  engine_.await_calls(call);
  const std::scoped_lock paused(engine_.watching_);
  engine_.check_usable(call);
  channel().all_ranks_threw();
  channel().enter_call({call_named(call), 0});
  try {
    in_words(channel().rank(), call, work);
    channel().check_evicted(call);
  } catch (const Error& error) {
    fail(call, error, error.kind());
    throw;
  } catch (const std::exception& error) {
    fail(call, error, ErrorKind::system);
    throw;
  }
  channel().enter_call({});
}

void VaultOnGpu::fail(const char* call, const std::exception& thrown, ErrorKind kind) {
  if (channel().all_ranks_threw()) return channel().enter_call({});
  channel().fail(call, thrown.what(), kind);
  engine_.words_.raise_abort();
}

/// Copies between the GPU and the buffers.
struct VaultOnGpu::Wire {
  VaultOnGpu& vault;
  std::array<GpuEvent, 2> ends{};

  void copy(std::size_t slot, void* to, const void* from, std::size_t bytes) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, vault.stream_), "cudaMemcpyAsync");
    ends[slot] = vault.engine_.gpu().events()->take();
    check(cudaEventRecord(ends[slot].get(), vault.stream_), "cudaEventRecord");
  }
  void await(std::size_t slot) {
    poll([&] { return is_done(ends[slot]); }, vault.engine_.config().deadline, {});
  }
};

/// Until what is on it now has ended.
void VaultOnGpu::await(const Stream& stream) {
  constexpr const char* kCall = "vault";
  auto* raw = static_cast<cudaStream_t>(stream.native());
  if (capture_of(raw).active) {
    throw Error(ErrorKind::unsupported,
                "rank " + std::to_string(engine_.rank()) +
                    ": vault: the stream is captured into a graph, but copies of a vault have "
                    "ended when the call returns; put and get outside of graphs",
                {engine_.rank(), -1, kCall, 0, 0, 0});
  }
  const GpuEvent reached = engine_.gpu().events()->take();
  check(cudaEventRecord(reached.get(), raw), "cudaEventRecord");
  poll([&] { return is_done(reached); }, kUntilItEnds, engine_.config().on_wait);
}

void VaultOnGpu::copy(std::span<const engine::DeviceCopy> copies, const Stream* stream) {
  const OnDevice here(engine_.device().index);
  if (stream != nullptr) await(*stream);
  Wire wire{*this};
  try {
    engine::StagedCopies(wire, pieces_).run(copies);
  } catch (...) {
    cudaStreamSynchronize(stream_);  // nothing writes to the buffers any more
    throw;
  }
}

}  // namespace ferry::cuda

#include "cuda/throughput/vault.hpp"

#include "cuda/throughput/engine.hpp"
#include "cuda/throughput/turn.hpp"

namespace ferry::cuda {

VaultOnGpu::VaultOnGpu(CudaEngine& engine)
    : engine_(engine), topology_(Domains::blocks(engine.size(), 0)), copies_(engine) {}

std::shared_ptr<void> VaultOnGpu::kept() {
  return engine_.shared_from_this();
}
engine::Channel& VaultOnGpu::channel() {
  return engine_.channel_;
}
const std::shared_ptr<engine::Memory>& VaultOnGpu::shared_memory() const {
  return engine_.parts_.cpu;
}
engine::CurrentView& VaultOnGpu::now() {
  return engine_.now_;
}
engine::Regroup* VaultOnGpu::membership_if_changed() {
  return engine_.regroup_.get();
}
Device VaultOnGpu::device() const {
  return engine_.device();
}

/// When all calls before have ended: then no peer waits for the monitor to map what it offers, and
/// this thread has the fabric of the CPUs for itself.
void VaultOnGpu::in_turn(const char* call, const std::function<void()>& work) {
  const auto turn =
      take_turn(engine_.turn_, engine_.config_.on_wait, [&] { engine_.check_usable(call); });
  engine_.await_calls(call);
  const std::scoped_lock paused(engine_.watching_);
  engine_.check_usable(call);
  try {
    run_call(call, work);
  } catch (...) {
    if (channel().dead()) engine_.words_.raise_abort();
    throw;
  }
}

void VaultOnGpu::copy(std::span<const engine::DeviceCopy> copies, const Stream* stream) {
  copies_.run(copies, stream, engine_.config().on_wait);
}

}  // namespace ferry::cuda

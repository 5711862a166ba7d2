#include "cuda/domains/vault.hpp"

#include <future>

#include "cuda/domains/engine.hpp"

namespace ferry::cuda {

DomainVault::DomainVault(DomainEngine& engine) : engine_(engine), copies_(engine.inside()) {}

std::shared_ptr<void> DomainVault::kept() {
  return engine_.shared_from_this();
}
engine::Channel& DomainVault::channel() {
  return engine_.channel_;
}
const std::shared_ptr<engine::Memory>& DomainVault::shared_memory() const {
  return engine_.parts_.memory;
}
int DomainVault::domains() const {
  return engine_.domains();
}
const Domains& DomainVault::topology() const {
  return engine_.topology_;
}
engine::CurrentView& DomainVault::now() {
  return engine_.now_;
}
engine::Regroup* DomainVault::membership_if_changed() {
  return engine_.regroup_.get();
}
Device DomainVault::device() const {
  return engine_.device();
}

/// On the proxy's thread, which hears of it if the group fails, behind what crosses of the calls
/// before. `work` uses what the caller has: whatever is thrown, it has ended.
void DomainVault::in_turn(const char* call, const std::function<void()>& work) {
  const DomainCall turn(engine_, call, nullptr);
  auto running = std::make_shared<std::promise<void>>();
  const std::future<void> over = running->get_future();  // once the proxy has let go of the step
  try {
    engine_.proxy_->run([this, call, &work, running = std::move(running)] { run_call(call, work); },
                        engine_.config_.on_wait);
  } catch (...) {
    over.wait();
    throw;
  }
}

/// Nobody is asked on the proxy's thread: the caller waits elsewhere.
void DomainVault::copy(std::span<const engine::DeviceCopy> copies, const Stream* stream) {
  copies_.run(copies, stream, {});
}

}  // namespace ferry::cuda

// A vault of a group on GPUs (engine/vault): its ranks' CPUs swap, and versions lie in memory of
// the host that all of them map. So no GPU memory is spent, and what a rank has put outlives its
// process and its GPU's memory.
#pragma once
#include <memory>

#include "core/domains.hpp"
#include "cuda/throughput/vault_copies.hpp"

namespace ferry::cuda {

class VaultOnGpu final : public engine::VaultGroup {
 public:
  /// When no call is under way.
  explicit VaultOnGpu(CudaEngine& engine);

  std::shared_ptr<void> kept() override;
  engine::Channel& channel() override;
  const std::shared_ptr<engine::Memory>& shared_memory() const override;
  int domains() const override { return 1; }
  const Domains& topology() const override { return topology_; }
  engine::CurrentView& now() override;
  engine::Regroup* membership_if_changed() override;
  void in_turn(const char* call, const std::function<void()>& work) override;
  Device device() const override;
  void copy(std::span<const engine::DeviceCopy> copies, const Stream* stream) override;

 private:
  CudaEngine& engine_;
  Domains topology_;
  VaultCopies copies_;
};

}  // namespace ferry::cuda

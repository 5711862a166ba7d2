// A vault of a group on GPUs in several domains (engine/vault): as that of one domain
// (cuda/throughput/vault.hpp), but all ranks swap by the channel between their CPUs, which belongs
// to the proxy's thread.
#pragma once
#include <memory>

#include "cuda/throughput/vault_copies.hpp"

namespace ferry::cuda {

class DomainEngine;

class DomainVault final : public engine::VaultGroup {
 public:
  /// When no call is under way.
  explicit DomainVault(DomainEngine& engine);

  std::shared_ptr<void> kept() override;
  engine::Channel& channel() override;
  const std::shared_ptr<engine::Memory>& shared_memory() const override;
  int domains() const override;
  const Domains& topology() const override;
  engine::CurrentView& now() override;
  engine::Regroup* membership_if_changed() override;
  void in_turn(const char* call, const std::function<void()>& work) override;
  Device device() const override;
  void copy(std::span<const engine::DeviceCopy> copies, const Stream* stream) override;

 private:
  DomainEngine& engine_;
  VaultCopies copies_;
};

}  // namespace ferry::cuda

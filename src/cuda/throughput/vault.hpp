// A vault of a group on GPUs (engine/vault): its ranks' CPUs swap, and versions lie in memory of
// the host that all of them map. So no GPU memory is spent, and what a rank has put outlives its
// process and its GPU's memory.
#pragma once
#include <array>
#include <memory>

#include "core/domains.hpp"
#include "cuda/runtime/pinned.hpp"
#include "cuda/runtime/runtime.hpp"
#include "engine/vault/vault_group.hpp"

namespace ferry::cuda {

class CudaEngine;

class VaultOnGpu final : public engine::VaultGroup {
 public:
  /// When no call is under way: it allocates pinned memory, which may wait for the GPU.
  explicit VaultOnGpu(CudaEngine& engine);
  ~VaultOnGpu() override;
  VaultOnGpu(const VaultOnGpu&) = delete;
  VaultOnGpu& operator=(const VaultOnGpu&) = delete;

  std::shared_ptr<void> kept() override;
  engine::Channel& channel() override;
  const std::shared_ptr<engine::Memory>& shared_memory() const override;
  int domains() const override { return 1; }
  const Domains& topology() const override { return topology_; }
  const engine::CurrentView& now() const override;
  void go_on_from(std::uint64_t step) override;
  void in_turn(const char* call, const std::function<void()>& work) override;
  void free_held() override;
  Device device() const override;
  void copy(std::span<const engine::DeviceCopy> copies, const Stream* stream) override;

 private:
  struct Wire;
  void fail(const char* call, const std::exception& thrown, ErrorKind kind);
  void await(const Stream& stream);

  CudaEngine& engine_;
  Domains topology_;
  cudaStream_t stream_ = nullptr;  // of copies alone
  std::array<PinnedBuffer, 2> buffers_{};
  std::array<std::span<std::byte>, 2> pieces_{};
};

}  // namespace ferry::cuda

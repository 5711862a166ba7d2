// What a vault copies between a GPU and memory of the host, which the GPU need not reach.
#pragma once
#include <array>
#include <span>

#include "cuda/runtime/pinned.hpp"
#include "cuda/runtime/runtime.hpp"
#include "engine/vault/vault_group.hpp"

namespace ferry::cuda {

class CudaEngine;

class VaultCopies {
 public:
  /// To and from this engine's GPU. When no call is under way: it allocates pinned memory, which
  /// may wait for the GPU.
  explicit VaultCopies(CudaEngine& engine);
  ~VaultCopies();
  VaultCopies(const VaultCopies&) = delete;
  VaultCopies& operator=(const VaultCopies&) = delete;

  /// After what is on `stream` now, for which it asks `on_wait`; null: at once. All have ended on
  /// return.
  void run(std::span<const engine::DeviceCopy> copies, const Stream* stream, const OnWait& on_wait);

 private:
  struct Wire;
  void await(const Stream& stream, const OnWait& on_wait) const;

  CudaEngine& engine_;
  cudaStream_t stream_ = nullptr;  // of copies alone
  std::array<PinnedBuffer, 2> buffers_{};
  std::array<std::span<std::byte>, 2> pieces_{};
};

}  // namespace ferry::cuda

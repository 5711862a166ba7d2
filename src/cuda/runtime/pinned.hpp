// Pinned host memory that kernels write to, in slots of one size. Allocating it may wait for all
// GPUs of the process, so there is enough from the beginning (and it is kept:
// fabric/cuda/pinned_memory.hpp).
#pragma once
#include <algorithm>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

namespace ferry::cuda {

/// Thread-safe. A slot comes zeroed and goes back with its last owner; by then no kernel may use
/// it. The memory lives as long as the pool or a slot.
class PinnedPool : public std::enable_shared_from_this<PinnedPool> {
 public:
  /// Throws Error(exhausted).
  static std::shared_ptr<PinnedPool> make(std::size_t slot_bytes, std::size_t slots);
  PinnedPool(const PinnedPool&) = delete;
  PinnedPool& operator=(const PinnedPool&) = delete;

  std::shared_ptr<std::byte> take();

 private:
  explicit PinnedPool(std::size_t slot_bytes) : slot_bytes_(slot_bytes) {}
  void add(std::size_t slots);

  std::size_t slot_bytes_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<std::byte>> slabs_;
  std::vector<std::byte*> free_;
};

/// Pinned memory for copies between the CPU and a stream, one after another.
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;
  /// At least `bytes`; what was there is lost, so earlier copies must have ended. Growing may wait
  /// for the GPU.
  std::byte* take(std::size_t bytes);
  /// For who keeps it longer than this.
  std::shared_ptr<void> memory() const { return data_; }

 private:
  std::shared_ptr<std::byte> data_;
  std::size_t bytes_ = 0;
};

/// Plans whose counts have room at once: those of a model's layers, for two halves of a batch.
inline std::size_t plans_at_once(std::size_t bytes_each) {
  constexpr std::size_t kBytes = std::size_t{1} << 20;  // unless four plans need more
  return std::clamp<std::size_t>(kBytes / bytes_each, 4, 256);
}

}  // namespace ferry::cuda

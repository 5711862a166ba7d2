// Some warps of a block that wait for each other while the rest does something else.
#pragma once
#include "cuda/kernels/latency/launch_sizes.hpp"

namespace ferry::cuda::device {

/// The warps of this block from `first` on. There is one team in a block at a time.
struct Team {
  int first = 0;

  __device__ __forceinline__ bool has_this_warp() const {
    return static_cast<int>(threadIdx.x) >= 32 * first;
  }
  __device__ __forceinline__ int threads() const { return kLatencyThreads - 32 * first; }
  __device__ __forceinline__ int thread() const {
    return static_cast<int>(threadIdx.x) - 32 * first;
  }

  // By the whole team, whose warps come to it as one.
  __device__ __forceinline__ void sync() const {
    __syncwarp();
    asm volatile("barrier.cta.sync.aligned %0, %1;" ::"n"(kBarrier), "r"(threads()) : "memory");
  }
  __device__ __forceinline__ bool any(bool value) const {
    int result;
    __syncwarp();
    asm volatile(
        "{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\n"
        "barrier.cta.red.or.pred.aligned q, %2, %3, p;\nselp.s32 %0, 1, 0, q;\n}"
        : "=r"(result)
        : "r"(static_cast<int>(value)), "n"(kBarrier), "r"(threads())
        : "memory");
    return result != 0;
  }

  /// By the whole team, when what the others of the block want of it is in shared memory.
  __device__ __forceinline__ void tell_others() const {
    if (first == 0) return;
    __syncwarp();
    asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"n"(kTold), "n"(kLatencyThreads)
                 : "memory");
  }
  /// By all others: waits for that.
  __device__ __forceinline__ void hear() const {
    __syncwarp();
    asm volatile("barrier.cta.sync.aligned %0, %1;" ::"n"(kTold), "n"(kLatencyThreads) : "memory");
  }

 private:
  static constexpr int kBarrier = 1, kTold = 2;  // 0 is __syncthreads
};

}  // namespace ferry::cuda::device

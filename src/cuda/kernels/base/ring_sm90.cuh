// A warp's ring of stages in shared memory, filled by TMA.
#pragma once
#include <cstddef>

#include "cuda/kernels/base/bulk_copy_sm90.cuh"
#include "cuda/kernels/base/wait.cuh"

namespace ferry::cuda::device {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

/// One warp's ring: `stages` pieces and a barrier for each.
struct Ring {
  std::byte* data;
  std::uint64_t* barriers;
  int stages;
  std::uint32_t piece_bytes;
  const GroupView* group;  // whose deadline bounds the waits
  std::uint64_t generation;
};

/// This warp's part of the block's dynamic shared memory, of `warps` warps. Before the first pull
/// comes a fence_proxy_async: after the peers' flags, seen by ordinary loads, what TMA reads of
/// them.
__device__ inline Ring ring_of_warp(const GroupView& group, std::uint64_t generation, int warps,
                                    int stages, std::uint32_t piece_bytes) {
  extern __shared__ __align__(128) std::byte ring_memory[];
  const int warp = static_cast<int>(threadIdx.x / 32);
  const std::uint32_t ring_bytes = static_cast<std::uint32_t>(stages) * piece_bytes;
  auto* barriers = reinterpret_cast<std::uint64_t*>(ring_memory +
                                                    static_cast<std::uint32_t>(warps) * ring_bytes);
  const Ring ring{ring_memory + static_cast<std::uint32_t>(warp) * ring_bytes,
                  barriers + warp * stages,
                  stages,
                  piece_bytes,
                  &group,
                  generation};
  if (threadIdx.x % 32 == 0) {
    for (int i = 0; i < stages; ++i) barrier_init(ring.barriers + i, 1);
    barrier_init_fence();
  }
  __syncwarp();
  return ring;
}

/// Whether the bytes of this phase have come; false: the group has failed.
__device__ __forceinline__ bool await_stage(const Ring& ring, int stage, std::uint32_t parity) {
  std::uint64_t* barrier = ring.barriers + stage;
  if (barrier_try_wait(barrier, parity)) return true;
  SpinDeadline spin_deadline;
  for (;;) {
    if (barrier_try_wait(barrier, parity)) return true;
    Reason reason;
    if (spin_deadline.over(*ring.group, reason)) {
      if (reason == Reason::none) return false;
      return fail(*ring.group, ring.generation, reason, Stage::rows, ring.group->rank);
    }
  }
}

#endif

}  // namespace ferry::cuda::device

// Bulk copies by the copy engine of an SM (TMA) and the barriers in shared memory that count their
// bytes: sm_90 and later. One thread issues; addresses and sizes are multiples of 16.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

namespace ferry::cuda::device {

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// A barrier that `arrivals` threads and the bytes that they expect complete.
__device__ __forceinline__ void barrier_init(std::uint64_t* barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}

/// After the last barrier_init, before the copy engine sees the barriers.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// Arrives, and lets the phase wait for `bytes` more.
__device__ __forceinline__ void barrier_expect(std::uint64_t* barrier, std::uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

/// Whether the phase of this parity has ended; sleeps for a while (the hardware says how long)
/// before it says no. The caller bounds how often it asks.
__device__ __forceinline__ bool barrier_try_wait(std::uint64_t* barrier, std::uint32_t parity) {
  std::uint32_t ended;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(ended)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return ended != 0;
}

/// Before a block gives up: nothing may fly into the shared memory of a block that ends. Bounded
/// although memory of this GPU always comes: a block that never ends would be worse.
__device__ __forceinline__ void drain_load(std::uint64_t* barrier, std::uint32_t parity) {
  constexpr int kMostTries = 1 << 16;
  for (int i = 0; i < kMostTries && !barrier_try_wait(barrier, parity); ++i) {
  }
}

/// Global (also a peer's) to shared memory; the barrier gets the bytes.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, std::uint32_t bytes,
                                          std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

/// Shared to global memory (also a peer's), in the thread's open bulk group.
__device__ __forceinline__ void bulk_store(void* global, const void* shared, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                   __cvta_generic_to_global(global)),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}

/// Closes the thread's open bulk group.
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/// Until at most `kPending` groups of this thread still read shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

/// Until at most `kPending` groups of this thread are incomplete: the others' writes are visible
/// to it.
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Between ordinary accesses and those of the copy engine to the same memory, in either order.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async;" ::: "memory");
}
/// The same for shared memory alone: cheaper.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace ferry::cuda::device

#endif

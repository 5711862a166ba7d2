// Ordered accesses to words that other blocks, other GPUs or the CPU touch, fences, the clock, and
// words that carry their generation (message.cuh says why). No wait is here.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace ferry::cuda::device {

// System scope.

__device__ __forceinline__ std::uint64_t load_acquire(const std::uint64_t* word) {
  std::uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ std::uint32_t load_acquire(const std::uint32_t* word) {
  std::uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ void store_release(std::uint32_t* word, std::uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
__device__ __forceinline__ void store_release(std::uint64_t* word, std::uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
__device__ __forceinline__ std::uint64_t load_relaxed(const std::uint64_t* word) {
  std::uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ std::uint32_t load_relaxed(const std::uint32_t* word) {
  std::uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ std::int64_t load_relaxed(const std::int64_t* word) {
  return static_cast<std::int64_t>(load_relaxed(reinterpret_cast<const std::uint64_t*>(word)));
}
__device__ __forceinline__ std::int32_t load_relaxed(const std::int32_t* word) {
  return static_cast<std::int32_t>(load_relaxed(reinterpret_cast<const std::uint32_t*>(word)));
}
__device__ __forceinline__ void store_relaxed(std::uint32_t* word, std::uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
__device__ __forceinline__ void store_relaxed(std::uint64_t* word, std::uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// Device scope: counters of blocks.

__device__ __forceinline__ void count_released(std::uint32_t* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ __forceinline__ void count_relaxed(std::uint32_t* counter) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ __forceinline__ std::uint32_t load_acquire_gpu(const std::uint32_t* counter) {
  std::uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

/// What this thread did and saw comes before what it does next, for everybody.
/// (__threadfence_system also orders all such fences among each other, which costs more.)
__device__ __forceinline__ void fence_system() {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
}
__device__ __forceinline__ void fence_device() {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

/// Nanoseconds of a real clock.
__device__ __forceinline__ std::uint64_t now_ns() {
  std::uint64_t value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value)::"memory");
  return value;
}

// Words that carry their generation.

/// 8 bytes of a message: two tagged words.
struct TaggedPair {
  std::uint64_t low;
  std::uint64_t high;
};

__device__ __forceinline__ std::uint64_t tagged(std::uint32_t data, std::uint64_t generation) {
  return generation << 32 | data;
}
__device__ __forceinline__ void store_pair(std::byte* at, std::uint64_t data,
                                           std::uint64_t generation) {
  const std::uint64_t low = tagged(static_cast<std::uint32_t>(data), generation);
  const std::uint64_t high = tagged(static_cast<std::uint32_t>(data >> 32), generation);
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(at), "l"(low), "l"(high)
               : "memory");
}
/// Acquire: behind the words of a head lies what their sender did before it posted them.
__device__ __forceinline__ TaggedPair load_pair(const std::byte* at) {
  TaggedPair pair;
  asm volatile("ld.acquire.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(pair.low), "=l"(pair.high)
               : "l"(at)
               : "memory");
  return pair;
}
/// The same of what is known to be there, and only read again.
__device__ __forceinline__ TaggedPair load_pair_relaxed(const std::byte* at) {
  const auto* words = reinterpret_cast<const std::uint64_t*>(at);
  return {load_relaxed(words), load_relaxed(words + 1)};
}
__device__ __forceinline__ std::uint64_t data_of(const TaggedPair& pair) {
  return pair.high << 32 | (pair.low & 0xffffffff);
}

}  // namespace ferry::cuda::device

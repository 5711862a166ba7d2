// A block as the team that makes a plan of copies (core/experts/one_team.hpp says what each loop
// promises). Threads of a warp, and warps, may be at different points between two loops: each loop
// begins and ends with a barrier of those that take part.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "core/experts/batch_plan_shape.hpp"

namespace ferry::cuda::device {

inline constexpr unsigned kWholeWarp = ~0u;

class WarpLanes {
 public:
  template <class Fn>
  __device__ __forceinline__ void each(int n, const Fn& fn) const {
    __syncwarp();
#pragma unroll 1
    for (int i = lane(); i < n; i += 32) fn(i);
    __syncwarp();
  }
  template <class Fn>
  __device__ __forceinline__ void one(const Fn& fn) const {
    __syncwarp();
    if (lane() == 0) fn();
    __syncwarp();
  }
  template <class Key>
  __device__ __forceinline__ int best(int n, const Key& key) const {
    unsigned at = ~0u;
    std::int64_t most = INT64_MIN;
#pragma unroll 1
    for (int i = lane(); i < n; i += 32) {
      const std::int64_t found = key(i);
      if (found <= most) continue;
      at = static_cast<unsigned>(i);
      most = found;
    }
    const auto high = static_cast<int>(most >> 32);
    const auto low = static_cast<unsigned>(most);
    const int top = __reduce_max_sync(kWholeWarp, high);
    const unsigned next = __reduce_max_sync(kWholeWarp, high == top ? low : 0u);
    return static_cast<int>(__reduce_min_sync(kWholeWarp, high == top && low == next ? at : ~0u));
  }
  template <class Holds>
  __device__ __forceinline__ int first(int n, const Holds& holds) const {
#pragma unroll 1
    for (int chunk = 0; chunk < n; chunk += 32) {
      const unsigned mask = ballot(chunk, n, holds);
      if (mask != 0) return chunk + __ffs(static_cast<int>(mask)) - 1;
    }
    return -1;
  }
  template <class Value>
  __device__ __forceinline__ std::int32_t sum(int n, const Value& value) const {
    std::int32_t sum = 0;
#pragma unroll 1
    for (int i = lane(); i < n; i += 32) sum += value(i);
    return __reduce_add_sync(kWholeWarp, sum);
  }
  template <class Holds, class Visit>
  __device__ __forceinline__ void visit(int n, const Holds& holds, const Visit& visit) const {
#pragma unroll 1
    for (int chunk = 0; chunk < n; chunk += 32) {
#pragma unroll 1
      for (unsigned mask = ballot(chunk, n, holds); mask != 0; mask &= mask - 1) {
        if (!visit(chunk + __ffs(static_cast<int>(mask)) - 1)) return;
      }
    }
  }
  template <class Left, class Take>
  __device__ __forceinline__ Rows deal(int n, Rows amount, const Left& left,
                                       const Take& take) const {
    __syncwarp();
#pragma unroll 1
    for (int chunk = 0; chunk < n && amount > 0; chunk += 32) {
      const int i = chunk + lane();
      const Rows mine = i < n ? left(i) : 0;
      Rows upto = mine;
#pragma unroll 1
      for (int step = 1; step < 32; step *= 2) {
        const Rows before = __shfl_up_sync(kWholeWarp, upto, static_cast<unsigned>(step));
        if (lane() >= step) upto += before;
      }
      const Rows rest = amount - (upto - mine);
      const Rows tokens = rest < mine ? rest : mine;
      if (tokens > 0) take(i, tokens);
      const Rows sum = __shfl_sync(kWholeWarp, upto, 31);
      amount = sum < amount ? amount - sum : 0;
    }
    __syncwarp();
    return amount;
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  template <class Holds>
  __device__ static unsigned ballot(int chunk, int n, const Holds& holds) {
    const int i = chunk + lane();
    return __ballot_sync(kWholeWarp, i < n && holds(i));
  }
};

/// In shared memory.
struct BlockWords {
  unsigned long long sum;
  int good;
};

class BlockTeam {
 public:
  static constexpr int kWarps = 20;  ///< as many drafts as there are of 8 ranks
  static constexpr int kThreads = 32 * kWarps;

  __device__ BlockTeam(BlockWords& words, int drafters) : words_(words), drafters_(drafters) {}

  __device__ const WarpLanes& lanes() const { return lanes_; }
  __device__ int drafters() const { return drafters_; }
  template <class Fn>
  __device__ __forceinline__ void each(int n, const Fn& fn) const {
    __syncthreads();
#pragma unroll 1
    for (int i = thread(); i < n; i += kThreads) fn(i);
    __syncthreads();
  }
  template <class Fn>
  __device__ __forceinline__ void tasks(int n, const Fn& fn) const {
    __syncthreads();
#pragma unroll 1
    for (int i = warp(); i < n; i += kWarps) fn(i, lanes_, warp());
    __syncthreads();
  }
  template <class Holds>
  __device__ __forceinline__ bool any(int n, const Holds& holds) const {
    bool found = false;
#pragma unroll 1
    for (int i = thread(); i < n && !found; i += kThreads) found = holds(i);
    return __syncthreads_or(found ? 1 : 0) != 0;
  }
  template <class Hash>
  __device__ __forceinline__ std::uint64_t sum_of_hashes(int n, const Hash& hash) const {
    __syncthreads();
    if (thread() == 0) words_.sum = 0;
    __syncthreads();
    unsigned long long sum = 0;
#pragma unroll 1
    for (int i = thread(); i < n; i += kThreads) sum += hash(i);
#pragma unroll 1
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kWholeWarp, sum, step);
    if (thread() % 32 == 0) atomicAdd(&words_.sum, sum);
    __syncthreads();
    return words_.sum;
  }
  template <class Fn>
  __device__ __forceinline__ void lead(const Fn& fn) const {
    __syncthreads();
    if (warp() == 0) fn(lanes_);
    __syncthreads();
  }
  template <class Fn>
  __device__ __forceinline__ void drafts(int n, const Fn& fn) const {
    __syncthreads();
    if (thread() == 0) words_.good = INT32_MAX;
    __syncthreads();
    if (warp() < n) fn(warp(), lanes_);
    __syncthreads();
  }
  __device__ void good(int i) const {
    if (thread() % 32 == 0) atomicMin(&words_.good, i);
  }
  /// One lane looks, for all lanes of a warp go the same way.
  __device__ bool vain(int i) const {
    const int seen = *const_cast<volatile int*>(&words_.good);
    return __shfl_sync(kWholeWarp, seen, 0) < i;
  }
  /// n ≤ kThreads.
  __device__ void sort_descending(Rows* values, int n) const {
    const int i = thread();
    const Rows mine = i < n ? values[i] : 0;
    int before = 0;
#pragma unroll 1
    for (int j = 0; i < n && j < n; ++j) {
      before += values[j] > mine || (values[j] == mine && j < i) ? 1 : 0;
    }
    __syncthreads();
    if (i < n) values[before] = mine;
    __syncthreads();
  }

 private:
  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int warp() { return static_cast<int>(threadIdx.x / 32); }

  WarpLanes lanes_{};
  BlockWords& words_;
  int drafters_;
};

}  // namespace ferry::cuda::device

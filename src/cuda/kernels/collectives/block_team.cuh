// A block as the team that makes a plan of copies (core/experts/one_team.hpp says what each loop
// promises). Threads of a warp, and warps, may be at different points between two loops: each loop
// begins and ends with a barrier of those that take part.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "core/experts/batch_plan_shape.hpp"

namespace ferry::cuda::device {

inline constexpr unsigned kWholeWarp = ~0u;
inline constexpr int kTeamWarps = 20;  // as many drafts as there are of 8 ranks
inline constexpr int kTeamThreads = 32 * kTeamWarps;

/// `kShort`: every n of `best`, `first`, `sum`, `visit` and `deal` is at most 32, so that none of
/// them is a loop.
template <bool kShort>
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
    using Value = decltype(key(0));
    unsigned at = static_cast<unsigned>(lane());
    Value most = lane() < n ? key(lane()) : kNoKey<Value>;
    if constexpr (!kShort) {
#pragma unroll 1
      for (int i = lane() + 32; i < n; i += 32) {
        const Value found = key(i);
        if (found <= most) continue;
        at = static_cast<unsigned>(i);
        most = found;
      }
    }
    const bool greatest = is_greatest(most);
    // At most one key of each lane: then the first lane has the first.
    if constexpr (kShort) {
      return first_of(__ballot_sync(kWholeWarp, greatest));
    } else {
      return static_cast<int>(__reduce_min_sync(kWholeWarp, greatest ? at : ~0u));
    }
  }
  template <class Holds>
  __device__ __forceinline__ int first(int n, const Holds& holds) const {
    if constexpr (kShort) {
      return first_of(ballot(0, n, holds));
    } else {
#pragma unroll 1
      for (int chunk = 0; chunk < n; chunk += 32) {
        const unsigned mask = ballot(chunk, n, holds);
        if (mask != 0) return chunk + first_of(mask);
      }
      return -1;
    }
  }
  template <class Value>
  __device__ __forceinline__ std::int32_t sum(int n, const Value& value) const {
    std::int32_t sum = lane() < n ? value(lane()) : 0;
    if constexpr (!kShort) {
#pragma unroll 1
      for (int i = lane() + 32; i < n; i += 32) sum += value(i);
    }
    return __reduce_add_sync(kWholeWarp, sum);
  }
  template <class Holds, class Visit>
  __device__ __forceinline__ void visit(int n, const Holds& holds, const Visit& visit) const {
#pragma unroll 1
    for (int chunk = 0; kShort ? chunk == 0 : chunk < n; chunk += 32) {
#pragma unroll 1
      for (unsigned mask = ballot(chunk, n, holds); mask != 0; mask &= mask - 1) {
        if (!visit(chunk + first_of(mask))) return;
      }
    }
  }
  template <class Left, class Take>
  __device__ __forceinline__ Rows deal(int n, Rows amount, const Left& left,
                                       const Take& take) const {
    __syncwarp();
#pragma unroll 1
    for (int chunk = 0; (kShort ? chunk == 0 : chunk < n) && amount > 0; chunk += 32) {
      const int i = chunk + lane(), lanes = n - chunk < 32 ? n - chunk : 32;
      const Rows mine = i < n ? left(i) : 0;
      Rows upto = mine;
#pragma unroll 1
      for (int step = 1; step < lanes; step *= 2) {
        const Rows before = __shfl_up_sync(kWholeWarp, upto, static_cast<unsigned>(step));
        if (lane() >= step) upto += before;
      }
      const Rows rest = amount - (upto - mine);
      const Rows tokens = rest < mine ? rest : mine;
      if (tokens > 0) take(i, tokens);
      const Rows sum = __shfl_sync(kWholeWarp, upto, lanes - 1);
      amount = sum < amount ? amount - sum : 0;
    }
    __syncwarp();
    return amount;
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  __device__ static int first_of(unsigned mask) { return __ffs(static_cast<int>(mask)) - 1; }
  /// Of all lanes; not if it is kNoKey.
  __device__ static bool is_greatest(std::int32_t key) {
    return key == __reduce_max_sync(kWholeWarp, key) && key != kNoKey<std::int32_t>;
  }
  __device__ static bool is_greatest(std::int64_t key) {
    const auto high = static_cast<int>(key >> 32);
    const auto low = static_cast<unsigned>(key);
    const bool top = high == __reduce_max_sync(kWholeWarp, high);
    const bool next = low == __reduce_max_sync(kWholeWarp, top ? low : 0u);
    return top && next && key != kNoKey<std::int64_t>;
  }
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

template <bool kShort>
class BlockTeam {
 public:
  static constexpr int kWarps = kTeamWarps;
  static constexpr int kThreads = kTeamThreads;

  __device__ BlockTeam(BlockWords& words, int drafters) : words_(words), drafters_(drafters) {}

  __device__ const WarpLanes<kShort>& lanes() const { return lanes_; }
  __device__ WarpLanes<false> lanes_for_many() const { return {}; }
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
#pragma unroll 4  // what they read is on its way at the same time
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
  __device__ void mark(PlanStage) const {}
  __device__ void good(int i) const {
    if (thread() % 32 == 0) atomicMin(&words_.good, i);
  }
  /// One lane looks, for all lanes of a warp go the same way.
  __device__ bool vain(int i) const {
    const int seen = *const_cast<volatile int*>(&words_.good);
    return __shfl_sync(kWholeWarp, seen, 0) < i;
  }

 private:
  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int warp() { return static_cast<int>(threadIdx.x / 32); }

  WarpLanes<kShort> lanes_{};
  BlockWords& words_;
  int drafters_;
};

}  // namespace ferry::cuda::device

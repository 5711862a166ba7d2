// Reading the routes of one rank, by one block: ids kept, slots counted, and for each token a mask
// of the ranks that it goes to.
#pragma once
#include "cuda/kernels/throughput/plan_routes.cuh"

namespace ferry::cuda::plan {

inline constexpr std::int32_t kBadId = -2;

/// Whole block: the ids that this thread reads first, on their way to the cache.
template <int kWords, class Id>
__device__ void ask_for_routes(const PlanParameters& p, int width) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int bits = 31 - __clz(width), slot = lane & (width - 1);
  if (slot >= p.plan.topk) return;
#pragma unroll
  for (int u = 0; u < Round<kWords>::kUnroll; ++u) {
    const std::int64_t token = (u * kWarps + warp) * (32 >> bits) + (lane >> bits);
    if (token >= p.plan.tokens) break;
    const auto* place =
        static_cast<const Id*>(p.topk_idx) + token * p.token_stride + slot * p.slot_stride;
    asm volatile("prefetch.global.L1 [%0];" ::"l"(place));
  }
}

/// Which tokens of a round a lane reads: `at`, `at` + step, ... below `count`, in the slots slot0,
/// slot0 + 32, ...
struct LaneTokens {
  std::int64_t first;  ///< token of the round
  int at;
  int step;
  int count;
  int slot0;
};

/// One lane: the first of its ids that is none, if there is any. Rare: it reads them again.
template <class Id>
__device__ __forceinline__ void blame(const PlanParameters& p, const LaneTokens& mine,
                                      unsigned long long* bad) {
#pragma unroll 1
  for (int at = mine.at; at < mine.count; at += mine.step) {
#pragma unroll 1
    for (int slot = mine.slot0; slot < p.plan.topk; slot += 32) {
      const std::int64_t token = mine.first + at;
      const std::int64_t given =
          static_cast<const Id*>(p.topk_idx)[token * p.token_stride + slot * p.slot_stride];
      if (given >= -1 && given < p.plan.placement.experts) continue;
      atomicMin(bad, static_cast<unsigned long long>(token * 64 + slot));
      return;
    }
  }
}

/// One warp: `kBatch` tokens of each lane. One SM reads all routes, so instructions are what it
/// costs: addresses go in steps, and the rare case is told by one minimum: the lowest id, which is
/// given back. kShared: slots are counted in shared memory.
template <int kWords, int kBatch, bool kShared, class Id>
__device__ __forceinline__ std::int32_t read_batch(const PlanParameters& p, const PlanShape& shape,
                                                   const Workplace& work, const LaneTokens& mine) {
  const int topk = p.plan.topk, at = mine.at, step = mine.step;
  const auto experts = static_cast<std::uint64_t>(p.plan.placement.experts);
  auto* kept = reinterpret_cast<std::int32_t*>(p.plan.data + p.plan.layout.ids);
  const std::int64_t from_step = step * p.token_stride, token = mine.first + at;
  std::uint32_t mask[kBatch][kWords] = {};
  std::int32_t lowest = -1;
#pragma unroll 1
  for (int slot = mine.slot0; slot - mine.slot0 < topk; slot += 32) {
    const int end = slot < topk ? mine.count : 0;
    const auto* from =
        static_cast<const Id*>(p.topk_idx) + token * p.token_stride + slot * p.slot_stride;
    std::int32_t* to = kept + token * topk + slot;
    Id given[kBatch];
#pragma unroll
    for (int u = 0; u < kBatch; ++u, from += from_step) {
      given[u] = at + u * step < end ? *from : Id{-1};
    }
#pragma unroll
    for (int u = 0; u < kBatch; ++u, to += step * topk) {
      const std::int64_t wide = given[u];
      const std::int32_t id = static_cast<std::uint64_t>(wide) + 1 <= experts
                                  ? static_cast<std::int32_t>(wide)
                                  : kBadId;
      lowest = min(lowest, id);
      if (at + u * step < end) *to = max(id, -1);
      if (id < 0) continue;
      std::uint32_t rank;
      if constexpr (kShared) {
        atomicAdd(work.slots + id, 1);
        rank = work.rank_of[id];
      } else {
        atomicAdd(work.scratch + id, 1);
        rank = find_rank(shape, static_cast<std::uint32_t>(id));
      }
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        mask[u][w] |= kWords == 1 || static_cast<int>(rank / 32) == w ? 1u << rank % 32 : 0u;
      }
    }
  }
#pragma unroll 1
  for (int lanes = shape.width / 2; lanes > 0; lanes /= 2) {
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) mask[u][w] |= __shfl_xor_sync(~0u, mask[u][w], lanes);
    }
  }
#pragma unroll
  for (int u = 0; u < kBatch; ++u) {
    if (mine.slot0 != 0 || at + u * step >= mine.count) continue;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      work.masks[w * Round<kWords>::kTokens + at + u * step] = mask[u][w];
    }
  }
  return lowest;
}

template <int kWords, bool kShared, class Id>
__device__ __forceinline__ void read_ids(const PlanParameters& p, const PlanShape& shape,
                                         const Workplace& work, std::int64_t first, int count,
                                         unsigned long long* bad) {
  constexpr int kUnroll = Round<kWords>::kUnroll;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int bits = 31 - __clz(shape.width), side_by_side = 32 >> bits;
  LaneTokens mine{first, 0, kWarps * side_by_side, count, lane & (shape.width - 1)};
  std::int32_t lowest = -1;
#pragma unroll 1
  for (int base = warp * side_by_side; base < count;) {
    mine.at = base + (lane >> bits);
    if (kShared && count - base > 2 * mine.step) {
      lowest = min(lowest, read_batch<kWords, kUnroll, kShared, Id>(p, shape, work, mine));
      base += mine.step * kUnroll;
    } else {  // what is rare, or left over
      lowest = min(lowest, read_batch<kWords, 1, kShared, Id>(p, shape, work, mine));
      base += mine.step;
    }
  }
  mine.at = warp * side_by_side + (lane >> bits);
  if (lowest == kBadId) blame<Id>(p, mine, bad);
}

/// Whole block: the masks of `count` tokens from `first` on, to shared memory. `width` lanes read
/// one token side by side; neighbouring warps read neighbouring tokens, so that few tokens are
/// spread over all warps.
template <int kWords, class Id>
__device__ void read_routes(const PlanParameters& p, const PlanShape& shape, const Workplace& work,
                            std::int64_t first, int count, unsigned long long* bad) {
  if (work.slots != nullptr) {
    read_ids<kWords, true, Id>(p, shape, work, first, count, bad);
  } else {
    read_ids<kWords, false, Id>(p, shape, work, first, count, bad);
  }
}

}  // namespace ferry::cuda::plan

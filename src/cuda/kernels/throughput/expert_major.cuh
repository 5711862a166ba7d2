// Expert-major rows: where every slot of the received rows goes. Each warp of the grid owns a
// contiguous range of received rows; slots of one expert lie in the order of (row, slot), which is
// the order of warps. So a count for each (warp, expert), summed over the warps before, tells where
// a warp's first slot of each expert goes, and no atomic decides about an order.
#pragma once
#include <cstdint>

#include "cuda/kernels/base/entry.cuh"
#include "cuda/kernels/throughput/kernels.hpp"
#include "cuda/kernels/throughput/plan_view.cuh"
#include "cuda/kernels/throughput/progress.cuh"

namespace ferry::cuda::device {

inline constexpr int kFanOutWarps = 8;  ///< of a block
/// Counters of a block that fit beside the stages of the copies; larger ones stay in the scratch.
inline constexpr int kFanOutSharedCounters = 4096;

struct FanOutLaunch {
  FanOutParameters p{};
  int experts = 0;                 ///< local ones
  std::int32_t* counts = nullptr;  ///< [blocks, kFanOutWarps, experts]
  std::int32_t* totals = nullptr;  ///< [blocks, experts]
  std::int32_t* pads = nullptr;    ///< [blocks, experts, 2]: padding rows begin, end; all alike
  unsigned long long* ticket = nullptr;  ///< next part of the padding
  std::uint32_t group_rows = 1;          ///< beside a dispatch: that a warp takes at a time
  bool beside = false;
  std::uint32_t piece_bytes = 0;
  int stages = 1;
};

/// A contiguous range of the received rows, or of others.
struct RowRange {
  std::int64_t begin;
  std::int64_t end;
};

/// This warp's share of `count` rows, in the block's place among the grid's blocks of rows.
__device__ inline RowRange share_of_warp(std::int64_t count, int block) {
  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * kFanOutWarps;
  const std::int64_t warp = static_cast<std::int64_t>(block) * kFanOutWarps + threadIdx.x / 32;
  return {count * warp / warps, count * (warp + 1) / warps};
}
__device__ inline RowRange share_of_warp(std::int64_t count) {
  return share_of_warp(count, static_cast<int>(blockIdx.x));
}

/// Received rows, as the plan says; 0 when nothing has come.
__device__ inline std::int64_t received_rows(const FanOutParameters& p) {
  const auto* offsets =
      reinterpret_cast<const std::int64_t*>(p.plan.data + p.plan.layout.recv_offset);
  return min(offsets[p.group.ranks], p.capacity);
}

/// Of the call whose rows these are.
__device__ inline std::uint64_t generation_of_rows(const FanOutLaunch& launch) {
  const LocalWords* words = local_words(launch.p.group);
  return load_relaxed(launch.beside ? &words->moving : &words->generation);
}

/// Whole grid alike: whether there is anything to fan out.
__device__ inline bool has_rows(const FanOutParameters& p) {
  return (p.after_dispatch ? last_call_moved(p.group) : !has_failed(p.group)) &&
         holds(p.group, p.plan);
}

/// Where this block counts: in shared memory if all of it fits there.
__device__ inline std::int32_t* block_counters(const FanOutLaunch& launch, std::int32_t* shared,
                                               int block) {
  if (launch.experts * kFanOutWarps <= kFanOutSharedCounters) return shared;
  return launch.counts + static_cast<std::int64_t>(block) * kFanOutWarps * launch.experts;
}

/// One thread: who sent this row.
__device__ inline int source_of(const FanOutParameters& p, std::int64_t row) {
  const auto* offsets =
      reinterpret_cast<const std::int64_t*>(p.plan.data + p.plan.layout.recv_offset);
  int source = 0;
  while (source + 1 < p.group.ranks && row >= offsets[source + 1]) ++source;
  return source;
}

/// Whole block: the exclusive prefix sum of one value a thread; `sum` is that of the block.
__device__ inline std::int64_t block_prefix(std::int64_t value, std::int64_t& sum) {
  __shared__ std::int64_t of_warp[32];
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  std::int64_t upto = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const std::int64_t lower = __shfl_up_sync(0xffffffffu, upto, step);
    if (lane >= step) upto += lower;
  }
  if (lane == 31) of_warp[warp] = upto;
  __syncthreads();
  std::int64_t before = 0;
  sum = 0;
  for (int w = 0; w < static_cast<int>(blockDim.x / 32); ++w) {
    if (w < warp) before += of_warp[w];
    sum += of_warp[w];
  }
  __syncthreads();
  return before + upto - value;
}

/// What the slots of one row are, two a lane: output rows, or −1.
struct SlotRows {
  std::int64_t low;   // slot `lane`
  std::int64_t high;  // slot 32 + `lane`
};

/// Whole warp: gives the next rows of their experts to up to 32 slots, in ascending lane.
/// `counters`: this warp's, of every expert.
__device__ inline std::int64_t place_slots(int id, int experts, std::int32_t* counters) {
  const bool there = id >= 0 && id < experts;
  const std::uint32_t lane = threadIdx.x % 32;
  // Lanes that have no slot match nobody.
  const std::uint32_t same =
      __match_any_sync(0xffffffffu, there ? id : -1 - static_cast<int>(lane));
  std::int64_t row = -1;
  if (there) row = counters[id] + __popc(same & ((1u << lane) - 1u));
  __syncwarp();
  if (there && __ffs(same) - 1 == static_cast<int>(lane)) counters[id] += __popc(same);
  __syncwarp();
  return row;
}

/// One warp stores zeros to rows [begin, end) of `out`, and their scales.
__device__ inline void zero_rows(const FanOutParameters& p, std::int64_t begin, std::int64_t end) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t vectors = p.row_bytes / 16;
  if (end <= begin) return;
  auto* rows = reinterpret_cast<uint4*>(p.out + begin * p.row_bytes);
  for (std::int64_t i = lane; i < (end - begin) * vectors; i += 32) rows[i] = {0, 0, 0, 0};
  if (p.out_scales == nullptr) return;
  float* scales = p.out_scales + begin * p.scale_columns;
  for (std::int64_t i = lane; i < (end - begin) * p.scale_columns; i += 32) scales[i] = 0.0f;
}

/// Whole warp: a row's scales, to each of its slots.
__device__ inline void copy_scales(const FanOutParameters& p, std::int64_t row, std::int64_t slot) {
  if (p.out_scales == nullptr) return;
  const auto lane = static_cast<std::int64_t>(threadIdx.x % 32);
  for (std::uint32_t left = __ballot_sync(0xffffffffu, slot >= 0); left != 0; left &= left - 1) {
    const std::int64_t to = __shfl_sync(0xffffffffu, slot, __ffs(left) - 1);
    for (std::int64_t c = lane; c < p.scale_columns; c += 32) {
      p.out_scales[to * p.scale_columns + c] = p.scales[row * p.scale_columns + c];
    }
  }
}

}  // namespace ferry::cuda::device

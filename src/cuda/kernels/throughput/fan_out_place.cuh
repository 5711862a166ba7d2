// Where the slots of received rows go: counted by blocks of rows, then placed. The grid has as many
// blocks of rows as blocks; which block takes which is the caller's matter.
#pragma once
#include "cuda/kernels/throughput/expert_major.cuh"

namespace ferry::cuda::device {

inline constexpr int kFanOutThreads = kFanOutWarps * 32;

/// Whole block: slots of one block's rows for each expert, by warp and in all. A peer's routes are
/// looked at here for the first time.
__device__ inline void count_slots(const FanOutLaunch& launch, int block, std::int32_t* counters) {
  const FanOutParameters& p = launch.p;
  const int experts = launch.experts, all = experts * kFanOutWarps;
  for (int i = static_cast<int>(threadIdx.x); i < all; i += kFanOutThreads) counters[i] = 0;
  __syncthreads();
  const RowRange rows = share_of_warp(received_rows(p), block);
  std::int32_t* own = counters + static_cast<std::int64_t>(threadIdx.x / 32) * experts;
  const std::int64_t end = rows.end * p.plan.topk;
  for (std::int64_t i = rows.begin * p.plan.topk + threadIdx.x % 32; i < end; i += 32) {
    const std::int32_t id = p.ids[i];
    if (id >= 0 && id < experts) atomicAdd(own + id, 1);
    if (id < -1 || id >= experts) {
      fail(p.group, generation_of_rows(launch), Reason::violation, Stage::rows,
           source_of(p, i / p.plan.topk), {0, 0, id});
    }
  }
  __syncthreads();
  std::int32_t* counts = launch.counts + static_cast<std::int64_t>(block) * all;
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += kFanOutThreads) {
    std::int32_t total = 0;
    for (int w = 0; w < kFanOutWarps; ++w) {
      const std::int32_t count = counters[w * experts + e];
      counts[w * experts + e] = count;
      total += count;
    }
    launch.totals[static_cast<std::int64_t>(block) * experts + e] = total;
  }
}

/// Slots of one expert in all, as the plan's counts have it.
__device__ inline std::int64_t planned_slots(const FanOutParameters& p, int experts, int expert) {
  const auto* slots =
      reinterpret_cast<const std::int32_t*>(p.plan.data + p.plan.layout.expert_slots);
  std::int64_t sum = 0;
  for (int s = 0; s < p.group.ranks; ++s)
    sum += slots[static_cast<std::int64_t>(s) * experts + expert];
  return sum;
}

/// This block's table of padding: where each expert's begins and ends.
__device__ inline std::int32_t* pads_of_block(const FanOutLaunch& launch, int block) {
  return launch.pads + static_cast<std::int64_t>(block) * 2 * launch.experts;
}

/// Whole block: a block's counters become the next row of each (warp, expert). Returns the
/// end of the last expert's block of rows. One block tells the caller, and compares with the plan;
/// each block keeps the padding for `zero_padding`.
__device__ inline std::int64_t find_places(const FanOutLaunch& launch, int block,
                                           std::int32_t* counters) {
  const FanOutParameters& p = launch.p;
  const int experts = launch.experts, blocks = static_cast<int>(gridDim.x);
  const std::int32_t* counts =
      launch.counts + static_cast<std::int64_t>(block) * kFanOutWarps * experts;
  std::int32_t* pads = pads_of_block(launch, block);
  std::int64_t begin_of_tile = 0;
  for (int first = 0; first < experts; first += kFanOutThreads) {
    const int e = first + static_cast<int>(threadIdx.x);
    std::int64_t total = 0, before = 0;
#pragma unroll 16  // so many loads in flight
    for (int b = 0; b < (e < experts ? blocks : 0); ++b) {
      if (b == block) before = total;
      total += launch.totals[static_cast<std::int64_t>(b) * experts + e];
    }
    const std::int64_t padded = (total + p.alignment - 1) / p.alignment * p.alignment;
    std::int64_t sum;
    const std::int64_t begin = begin_of_tile + block_prefix(padded, sum);
    begin_of_tile += sum;
    if (e >= experts) continue;
    auto next = static_cast<std::int32_t>(begin + before);
    for (int w = 0; w < kFanOutWarps; ++w) {
      const std::int32_t count = counts[w * experts + e];
      counters[w * experts + e] = next;
      next += count;
    }
    pads[2 * e] = static_cast<std::int32_t>(min(begin + total, p.out_capacity));
    pads[2 * e + 1] = static_cast<std::int32_t>(min(begin + padded, p.out_capacity));
    if (block != 0) continue;
    p.expert_offsets[e] = begin;
    if (total != planned_slots(p, experts, e)) {
      fail(p.group, generation_of_rows(launch), Reason::violation, Stage::rows, -1, {0, 0, e});
    }
  }
  if (block == 0 && threadIdx.x == 0) p.expert_offsets[experts] = begin_of_tile;
  __syncthreads();
  return begin_of_tile;
}

/// Slots of rows that have not come: a block's share of them.
__device__ inline void fill_absent(const FanOutParameters& p, std::int64_t received, int block) {
  const RowRange slots = share_of_warp((p.capacity - received) * p.plan.topk, block);
  std::int64_t* absent = p.slot_rows + received * p.plan.topk;
  for (std::int64_t i = slots.begin + threadIdx.x % 32; i < slots.end; i += 32) absent[i] = -1;
}

}  // namespace ferry::cuda::device

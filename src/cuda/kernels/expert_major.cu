// Expert-major output: count the slots of each warp's rows, then place and copy them.
#include <algorithm>

#include "cuda/kernels/expert_major.cuh"
#include "cuda/kernels/fan_out_copy.cuh"
#include "cuda/kernels/fan_out_step.cuh"
#include "cuda/kernels/load.hpp"
#include "cuda/kernels/sum_shape.hpp"

namespace ferry::cuda {
namespace {

using namespace device;

constexpr int kThreads = kFanOutWarps * 32;

/// Slots of this block's rows for each expert, by warp and in all. A peer's routes are looked at
/// here for the first time.
__global__ void __launch_bounds__(kThreads)
    fan_out_count_kernel(const __grid_constant__ FanOutLaunch launch) {
  __shared__ std::int32_t shared[kFanOutSharedCounters];
  const FanOutParameters& p = launch.p;
  if (__syncthreads_and(has_rows(p)) == 0) return;
  const int experts = launch.experts;
  if (blockIdx.x == 0 && threadIdx.x == 0) *launch.ticket = 0;
  std::int32_t* counters = block_counters(launch, shared);
  const int all = experts * kFanOutWarps;
  for (int i = static_cast<int>(threadIdx.x); i < all; i += kThreads) counters[i] = 0;
  __syncthreads();
  const RowRange rows = share_of_warp(received_rows(p));
  std::int32_t* own = counters + static_cast<std::int64_t>(threadIdx.x / 32) * experts;
  const std::int64_t end = rows.end * p.plan.topk;
  for (std::int64_t i = rows.begin * p.plan.topk + threadIdx.x % 32; i < end; i += 32) {
    const std::int32_t id = p.ids[i];
    if (id >= 0 && id < experts) atomicAdd(own + id, 1);
    if (id < -1 || id >= experts) {
      fail(p.group, generation_of_rows(p), Reason::distrust, Stage::rows,
           source_of(p, i / p.plan.topk), {0, 0, id});
    }
  }
  __syncthreads();
  std::int32_t* counts = launch.counts + static_cast<std::int64_t>(blockIdx.x) * all;
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += kThreads) {
    std::int32_t total = 0;
    for (int w = 0; w < kFanOutWarps; ++w) {
      const std::int32_t count = counters[w * experts + e];
      counts[w * experts + e] = count;
      total += count;
    }
    launch.totals[static_cast<std::int64_t>(blockIdx.x) * experts + e] = total;
  }
}

/// Slots of one expert in all, as the plan's counts have it.
__device__ std::int64_t planned_slots(const FanOutParameters& p, int experts, int expert) {
  const auto* slots =
      reinterpret_cast<const std::int32_t*>(p.plan.data + p.plan.layout.expert_slots);
  std::int64_t sum = 0;
  for (int s = 0; s < p.group.ranks; ++s)
    sum += slots[static_cast<std::int64_t>(s) * experts + expert];
  return sum;
}

/// This block's table of padding: where each expert's begins and ends.
__device__ std::int32_t* pads_of_block(const FanOutLaunch& launch) {
  return launch.pads + static_cast<std::int64_t>(blockIdx.x) * 2 * launch.experts;
}

/// Whole block: this block's counters become the next row of each (warp, expert). Returns the
/// end of the last expert's block of rows. One block tells the caller, and compares with the plan;
/// each block keeps the padding for `zero_padding`.
__device__ std::int64_t find_places(const FanOutLaunch& launch, std::int32_t* counters) {
  const FanOutParameters& p = launch.p;
  const int experts = launch.experts, blocks = static_cast<int>(gridDim.x);
  const int block = static_cast<int>(blockIdx.x);
  const std::int32_t* counts =
      launch.counts + static_cast<std::int64_t>(block) * kFanOutWarps * experts;
  std::int32_t* pads = pads_of_block(launch);
  std::int64_t begin_of_tile = 0;
  for (int first = 0; first < experts; first += kThreads) {
    const int e = first + static_cast<int>(threadIdx.x);
    std::int64_t total = 0, before = 0;
#pragma unroll 16  // so many loads in flight
    for (int b = 0; b < (e < experts ? blocks : 0); ++b) {
      if (b == block) before = total;
      total += __ldg(launch.totals + static_cast<std::int64_t>(b) * experts + e);
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
      fail(p.group, generation_of_rows(p), Reason::distrust, Stage::rows, -1, {0, 0, e});
    }
  }
  if (block == 0 && threadIdx.x == 0) p.expert_offsets[experts] = begin_of_tile;
  __syncthreads();
  return begin_of_tile;
}

/// Whole warp: padding, a few rows at a time, to whichever warp has no rows to copy any more.
__device__ void zero_pads(const FanOutLaunch& launch) {
  const FanOutParameters& p = launch.p;
  const std::int32_t* pads = pads_of_block(launch);
  // Padding of an expert; `out` has no more rows than that.
  const auto most = static_cast<std::uint32_t>(min(p.alignment - 1, std::int64_t{0x7fffffff}));
  if (most == 0) return;
  // At most 64 parts; a power of two, so that nothing is divided.
  const std::uint32_t rows = max((most + 63) / 64, 4u);
  const int shift = 32 - __clz(static_cast<int>((most + rows - 1) / rows) - 1);
  const std::int64_t tickets = static_cast<std::int64_t>(launch.experts) << shift;
  for (;;) {
    unsigned long long mine = 0;
    if (threadIdx.x % 32 == 0) mine = atomicAdd(launch.ticket, 1ull);
    const auto ticket = static_cast<std::int64_t>(__shfl_sync(0xffffffffu, mine, 0));
    if (ticket >= tickets) return;
    const std::int32_t* pad = pads + 2 * (ticket >> shift);
    const std::int64_t begin = pad[0] + (ticket & ((std::int64_t{1} << shift) - 1)) * rows;
    zero_rows(p, begin, min(begin + rows, static_cast<std::int64_t>(pad[1])));
  }
}

/// Padding of the experts; then rows behind the last expert, and slots of rows that have not come.
__device__ void zero_padding(const FanOutLaunch& launch, std::int64_t received, std::int64_t end) {
  const FanOutParameters& p = launch.p;
  zero_pads(launch);
  const std::int64_t tail = max(p.out_capacity - end, std::int64_t{0});
  const RowRange rows = share_of_warp(tail);
  zero_rows(p, end + rows.begin, end + rows.end);
  const RowRange slots = share_of_warp((p.capacity - received) * p.plan.topk);
  std::int64_t* absent = p.slot_rows + received * p.plan.topk;
  for (std::int64_t i = slots.begin + threadIdx.x % 32; i < slots.end; i += 32) absent[i] = -1;
}

__global__ void __launch_bounds__(kThreads, 1)
    fan_out_kernel(const __grid_constant__ FanOutLaunch launch) {
  __shared__ std::int32_t shared[kFanOutSharedCounters];
  const FanOutParameters& p = launch.p;
  if (__syncthreads_and(has_rows(p)) == 0) return;
  std::int32_t* counters = block_counters(launch, shared);
  const std::int64_t end = find_places(launch, counters);
  const std::int64_t received = received_rows(p);
  SlotPlacer placer(launch, counters + static_cast<std::int64_t>(threadIdx.x / 32) * launch.experts,
                    share_of_warp(received));
#if __CUDA_ARCH__ >= 900
  const std::uint64_t generation = load_relaxed(&local_words(p.group)->generation);
  if (!copy_rows(
          launch, placer,
          ring_of_warp(p.group, generation, kFanOutWarps, launch.stages, launch.piece_bytes))) {
    return;
  }
#else
  copy_rows_by_loads(launch, placer);
#endif
  zero_padding(launch, received, end);
}

/// All of fan_out_kernel but the copies.
__global__ void __launch_bounds__(kThreads)
    fan_out_place_kernel(const __grid_constant__ FanOutLaunch launch) {
  __shared__ std::int32_t shared[kFanOutSharedCounters];
  const FanOutParameters& p = launch.p;
  if (__syncthreads_and(has_rows(p)) == 0) return;
  std::int32_t* counters = block_counters(launch, shared);
  const std::int64_t end = find_places(launch, counters);
  const std::int64_t received = received_rows(p);
  SlotPlacer placer(launch, counters + static_cast<std::int64_t>(threadIdx.x / 32) * launch.experts,
                    share_of_warp(received));
  for (std::int64_t row = placer.rows.begin; row < placer.rows.end; ++row) placer.place(row);
  zero_padding(launch, received, end);
}

__global__ void __launch_bounds__(kThreads, 1)
    fan_out_step_kernel(const __grid_constant__ FanOutLaunch launch, int step) {
  __shared__ StepRows rows;
  const FanOutParameters& p = launch.p;
  const bool last = step == p.steps.count - 1;
  const bool come = last ? still_moves(p, 1) && last_call_moved(p.group)
                         : still_moves(p, static_cast<std::uint32_t>(step + 2));
  if (__syncthreads_and(come) == 0) return;
  find_step_rows(p, step, rows);
#if __CUDA_ARCH__ >= 900
  copy_step(launch, rows,
            ring_of_warp(p.group, generation_of_rows(p), kFanOutWarps, launch.stages,
                         launch.piece_bytes));
#else
  copy_step_by_loads(launch, rows);
#endif
}

/// Blocks that may fan out, so that the tables of counts stay small however many experts there are.
int most_blocks(std::int64_t experts) {
  constexpr std::int64_t kMost = 256, kEntries = std::int64_t{1} << 20;
  if (experts <= 0) return kMost;
  return static_cast<int>(std::clamp(kEntries / experts, std::int64_t{1}, kMost));
}

cudaError_t cut(const FanOutTuning& tuning, FanOutLaunch& launch, int& shared_bytes) {
  KernelLimits limits;
  if (const cudaError_t error = kernel_limits(limits); error != cudaSuccess) return error;
  const std::int64_t wish = tuning.piece_bytes > 0 ? tuning.piece_bytes : 4096;
  launch.piece_bytes = static_cast<std::uint32_t>(std::min(launch.p.row_bytes, wish));
  shared_bytes = 0;
  if (!limits.bulk_copies) return cudaSuccess;
  const int room = (limits.shared_bytes - kOwnShared - kFanOutSharedCounters * 4) / kFanOutWarps;
  if (tuning.piece_bytes == 0 && room / static_cast<int>(launch.piece_bytes + 8) < 4) {
    launch.piece_bytes = std::min(launch.piece_bytes, 2048u);
  }
  // Barriers stand behind the stages of all warps, which are multiples of 16.
  const int most = room / static_cast<int>(launch.piece_bytes + 8);
  launch.stages = std::min({most, tuning.stages > 0 ? tuning.stages : 16, 64});
  if (launch.stages < 3) return cudaErrorInvalidConfiguration;
  shared_bytes = launch.stages * static_cast<int>(launch.piece_bytes + 8) * kFanOutWarps;
  return cudaSuccess;
}

}  // namespace

std::size_t fan_out_scratch_bytes(std::int64_t, std::int64_t local_experts) {
  const auto experts = static_cast<std::size_t>(std::max<std::int64_t>(local_experts, 0));
  const auto blocks = static_cast<std::size_t>(most_blocks(local_experts));
  return sizeof(std::uint64_t) + blocks * (kFanOutWarps + 1 + 2) * experts * sizeof(std::int32_t);
}

namespace {

/// How the work is cut, for kernels of one fan-out alike.
cudaError_t prepare(const FanOutParameters& parameters, const FanOutTuning& tuning,
                    FanOutLaunch& launch, int& blocks, int& shared_bytes) {
  constexpr std::int64_t kMostRows = 0x7fffffff;
  const std::int64_t experts = parameters.plan.placement.local_experts(parameters.group.rank);
  if (parameters.sms < 1 || parameters.row_bytes <= 0 || parameters.row_bytes % 16 != 0 ||
      parameters.out_capacity > kMostRows || experts > kMostRows / kFanOutWarps ||
      parameters.alignment < 1) {
    return cudaErrorInvalidValue;
  }
  launch.p = parameters;
  launch.experts = static_cast<int>(experts);
  blocks = std::min(parameters.sms, most_blocks(experts));
  launch.ticket = reinterpret_cast<unsigned long long*>(parameters.scratch);
  launch.counts = parameters.scratch + 2;
  launch.totals = launch.counts + static_cast<std::int64_t>(blocks) * kFanOutWarps * experts;
  launch.pads = launch.totals + static_cast<std::int64_t>(blocks) * experts;
  return cut(tuning, launch, shared_bytes);
}

}  // namespace

cudaError_t launch_fan_out(const FanOutParameters& parameters, cudaStream_t stream,
                           const FanOutTuning& tuning) {
  FanOutLaunch launch;
  int blocks = 0, shared_bytes = 0;
  cudaError_t error = prepare(parameters, tuning, launch, blocks, shared_bytes);
  if (error != cudaSuccess) return error;
  fan_out_count_kernel<<<blocks, kThreads, 0, stream>>>(launch);
  if (error = cudaGetLastError(); error != cudaSuccess) return error;
  fan_out_kernel<<<blocks, kThreads, shared_bytes, stream>>>(launch);
  return cudaGetLastError();
}

cudaError_t launch_fan_out(const FanOutParameters& parameters, cudaStream_t stream) {
  return launch_fan_out(parameters, stream, FanOutTuning{});
}

cudaError_t launch_fan_out_places(const FanOutParameters& parameters, cudaStream_t stream) {
  FanOutLaunch launch;
  int blocks = 0, shared_bytes = 0;
  cudaError_t error = prepare(parameters, {}, launch, blocks, shared_bytes);
  if (error != cudaSuccess) return error;
  fan_out_count_kernel<<<blocks, kThreads, 0, stream>>>(launch);
  if (error = cudaGetLastError(); error != cudaSuccess) return error;
  fan_out_place_kernel<<<blocks, kThreads, 0, stream>>>(launch);
  return cudaGetLastError();
}

cudaError_t launch_fan_out_step(const FanOutParameters& parameters, int step, cudaStream_t stream,
                                const FanOutTuning& tuning) {
  FanOutLaunch launch;
  int blocks = 0, shared_bytes = 0;
  const cudaError_t error = prepare(parameters, tuning, launch, blocks, shared_bytes);
  if (error != cudaSuccess) return error;
  if (step < 0 || step >= parameters.steps.count) return cudaErrorInvalidValue;
  fan_out_step_kernel<<<blocks, kThreads, shared_bytes, stream>>>(launch, step);
  return cudaGetLastError();
}

cudaError_t launch_fan_out_step(const FanOutParameters& parameters, int step, cudaStream_t stream) {
  return launch_fan_out_step(parameters, step, stream, FanOutTuning{});
}

cudaError_t load_expert_major_kernels() {
  KernelLimits limits;
  cudaError_t error = kernel_limits(limits);
  if (error != cudaSuccess) return error;
  const int shared = limits.shared_bytes - kOwnShared - kFanOutSharedCounters * 4;
  error = load_kernel(reinterpret_cast<const void*>(fan_out_count_kernel), 0);
  if (error != cudaSuccess) return error;
  error = load_kernel(reinterpret_cast<const void*>(fan_out_place_kernel), 0);
  if (error != cudaSuccess) return error;
  error = load_kernel(reinterpret_cast<const void*>(fan_out_step_kernel), shared);
  if (error != cudaSuccess) return error;
  error = load_kernel(reinterpret_cast<const void*>(fan_out_kernel), shared);
  return error != cudaSuccess ? error : load_sum_slots_kernels();
}

}  // namespace ferry::cuda

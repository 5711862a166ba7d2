// Expert-major output: count the slots of each warp's rows, then place and copy them.
#include <algorithm>

#include "cuda/kernels/base/launch.hpp"
#include "cuda/kernels/base/load.hpp"
#include "cuda/kernels/throughput/expert_major.cuh"
#include "cuda/kernels/throughput/fan_out_beside.cuh"
#include "cuda/kernels/throughput/fan_out_copy.cuh"
#include "cuda/kernels/throughput/sum_shape.hpp"

namespace ferry::cuda {
namespace {

using namespace device;

__global__ void __launch_bounds__(kFanOutThreads)
    fan_out_count_kernel(const __grid_constant__ FanOutLaunch launch) {
  __shared__ std::int32_t shared[kFanOutSharedCounters];
  const FanOutParameters& p = launch.p;
  const bool moved = __syncthreads_and(has_rows(p)) != 0;
  const int block = static_cast<int>(blockIdx.x);
  if (block == 0 && threadIdx.x == 0) {
    *launch.ticket = 0;
    if (p.made != nullptr) *p.made = moved ? 1 : 0;  // for calls after the next kernel
  }
  if (moved) count_slots(launch, block, block_counters(launch, shared, block));
}

/// Whole warp: padding, a few rows at a time, to whichever warp has no rows to copy any more.
__device__ void zero_pads(const FanOutLaunch& launch) {
  const FanOutParameters& p = launch.p;
  const std::int32_t* pads = pads_of_block(launch, static_cast<int>(blockIdx.x));
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
  fill_absent(p, received, static_cast<int>(blockIdx.x));
}

__global__ void __launch_bounds__(kFanOutThreads, 1)
    fan_out_kernel(const __grid_constant__ FanOutLaunch launch) {
  __shared__ std::int32_t shared[kFanOutSharedCounters];
  const FanOutParameters& p = launch.p;
  if (__syncthreads_and(has_rows(p)) == 0) return;
  const int block = static_cast<int>(blockIdx.x);
  std::int32_t* counters = block_counters(launch, shared, block);
  const std::int64_t end = find_places(launch, block, counters);
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

/// Beside the dispatch directly before it in the stream.
__global__ void __launch_bounds__(kFanOutThreads, 1)
    fan_out_beside_kernel(const __grid_constant__ FanOutLaunch launch) {
#if __CUDA_ARCH__ >= 900
  __shared__ std::int32_t shared[kFanOutSharedCounters];
  __shared__ CopyOrder order;
  const GroupView& group = launch.p.group;
  std::uint64_t generation;
  if (call_moves(group, generation)) {
    fan_out_beside(launch, generation, shared, order);
  } else if (!launch.p.may_be_made && launch.p.made != nullptr && threadIdx.x == 0) {
    *launch.p.made = 0;
  }
  leave(group);
  await_kernel_before();  // whoever comes next in the stream finds the dispatch ended, too
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
  if (parameters.num_sms < 1 || parameters.row_bytes <= 0 || parameters.row_bytes % 16 != 0 ||
      parameters.out_capacity > kMostRows || experts > kMostRows / kFanOutWarps ||
      parameters.alignment < 1) {
    return cudaErrorInvalidValue;
  }
  launch.p = parameters;
  const std::int64_t wish = tuning.group_bytes > 0 ? tuning.group_bytes : 32768;
  launch.group_rows =
      static_cast<std::uint32_t>(std::clamp<std::int64_t>(wish / parameters.row_bytes, 1, 64));
  launch.experts = static_cast<int>(experts);
  blocks = std::min(parameters.num_sms, most_blocks(experts));
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
  fan_out_count_kernel<<<blocks, kFanOutThreads, 0, stream>>>(launch);
  if (error = cudaGetLastError(); error != cudaSuccess) return error;
  fan_out_kernel<<<blocks, kFanOutThreads, shared_bytes, stream>>>(launch);
  return cudaGetLastError();
}

cudaError_t launch_fan_out(const FanOutParameters& parameters, cudaStream_t stream) {
  return launch_fan_out(parameters, stream, FanOutTuning{});
}

cudaError_t launch_fan_out_beside(const FanOutParameters& parameters, cudaStream_t stream,
                                  const FanOutTuning& tuning) {
  FanOutLaunch launch;
  int blocks = 0, shared_bytes = 0;
  const cudaError_t error = prepare(parameters, tuning, launch, blocks, shared_bytes);
  if (error != cudaSuccess) return error;
  if (shared_bytes == 0 || parameters.group.ranks > kMaxDomain) return cudaErrorNotSupported;
  launch.beside = true;
  void* arguments[] = {&launch};
  return ferry::cuda::launch(
      reinterpret_cast<const void*>(fan_out_beside_kernel),
      {static_cast<unsigned>(blocks), kFanOutThreads, static_cast<std::size_t>(shared_bytes)},
      arguments, stream, true);
}

cudaError_t launch_fan_out_beside(const FanOutParameters& parameters, cudaStream_t stream) {
  return launch_fan_out_beside(parameters, stream, FanOutTuning{});
}

cudaError_t load_expert_major_kernels() {
  KernelLimits limits;
  cudaError_t error = kernel_limits(limits);
  if (error != cudaSuccess) return error;
  const int shared = limits.shared_bytes - kOwnShared - kFanOutSharedCounters * 4;
  error = load_kernel(reinterpret_cast<const void*>(fan_out_count_kernel), 0);
  if (error != cudaSuccess) return error;
  error = load_kernel(reinterpret_cast<const void*>(fan_out_beside_kernel), shared);
  if (error != cudaSuccess) return error;
  error = load_kernel(reinterpret_cast<const void*>(fan_out_kernel), shared);
  return error != cudaSuccess ? error : load_sum_slots_kernels();
}

}  // namespace ferry::cuda

// Dispatch: entry swap with grants, every row to its final place, delivery.
#include <algorithm>

#include "cuda/kernels/dispatch_sm80.cuh"
#include "cuda/kernels/dispatch_sm90.cuh"
#include "cuda/kernels/entry.cuh"
#include "cuda/kernels/launch.hpp"
#include "cuda/kernels/load.hpp"
#include "cuda/kernels/push.hpp"
#include "cuda/kernels/second_grant.cuh"
#include "cuda/kernels/throughput.hpp"

namespace ferry::cuda {

namespace {

using namespace device;

constexpr int kMaxRowWarps = 16;
constexpr int kBulkRowWarps = 7;  ///< of a piece that is not short: more warps gain nothing
constexpr int kSideWarps = 4;
constexpr int kMaxThreads = (kMaxRowWarps + kSideWarps) * 32;
constexpr std::int64_t kMaxPiece = 8192;
constexpr std::uint32_t kShortStage = 2048;
constexpr std::int64_t kMaxRidingScales = 4096;
constexpr std::int64_t kMaxRows = 0x7fffffff;

/// Whole block: rows of the expert-major output; 0 when they need not be known.
__device__ std::int64_t count_out_rows(const DispatchParameters& p, const PushShape& shape,
                                       bool holds_counts) {
  __shared__ unsigned long long rows;
  if (p.out_capacity == 0 || !holds_counts) return 0;
  if (threadIdx.x == 0) rows = 0;
  __syncthreads();
  const auto* slots =
      reinterpret_cast<const std::int32_t*>(p.plan.data + p.plan.layout.expert_slots);
  const int experts = shape.local_experts(p.group.rank);
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += static_cast<int>(blockDim.x)) {
    std::int64_t total = 0;
    for (int s = 0; s < p.group.ranks; ++s) total += slots[std::int64_t{s} * experts + e];
    const std::int64_t padded = (total + p.out_alignment - 1) / p.out_alignment * p.out_alignment;
    atomicAdd(&rows, static_cast<unsigned long long>(padded));
  }
  __syncthreads();
  return static_cast<std::int64_t>(rows);
}

__device__ void fill_head(const DispatchParameters& p, bool holds_counts, std::int64_t out_rows,
                          DeviceHead& head) {
  head.status = p.status;
  head.segment = p.segment;
  head.offset = p.offset;
  head.side_segment = p.side_segment;
  head.side_offset = p.side_offset;
  head.refused = holds_counts ? Reason::none : Reason::bad_plan;
  head.rows = p.capacity;
  head.detail = p.need_bytes;
  if (p.status == StepStatus::ok && p.second != nullptr) head.status = StepStatus::guessed;
  if (p.status == StepStatus::ok && out_rows > p.out_capacity) {
    head.status = StepStatus::too_many;
    head.detail = out_rows;
  }
}

/// What a peer granted.
struct Grant {
  std::uint32_t segment, side_segment;
  std::uint64_t offset, side_offset;
  std::int64_t rows;
};

/// Sixteen lanes, each with its word of the peer's head.
__device__ Grant grant_of(std::uint64_t word) {
  const unsigned lanes = 0xffffu << (threadIdx.x & 16);
  const auto get = [&](int i) { return __shfl_sync(lanes, word, i, kHeadLanes); };
  Grant grant;
  grant.segment = static_cast<std::uint32_t>(get(kStatusWord) >> 32);
  grant.offset = get(kOffsetWord);
  grant.side_segment = static_cast<std::uint32_t>(get(kSideWord));
  grant.side_offset = get(kSideOffsetWord);
  grant.rows = static_cast<std::int64_t>(get(kRowsWord));
  return grant;
}

/// Where this rank's rows go at `peer`, the first of them at row `mine`, if what it granted lies
/// inside its segments.
__device__ bool find_target(const DispatchParameters& p, int peer, const Grant& grant,
                            std::int64_t mine, PushTarget& target) {
  if (grant.rows < 0 || grant.rows > kMaxRows) return false;
  const int topk = p.plan.topk;
  const ReceiveLayout receive =
      make_receive_layout(grant.rows, static_cast<std::size_t>(p.row_bytes), p.scale_columns);
  const SideLayout side =
      make_side_layout(grant.rows, topk, p.carries_routes, p.weights != nullptr);
  // An empty region may lie nowhere. Both places are looked up before either is judged.
  const PeerSegment rows_in = segment_of(p.group, peer, grant.segment);
  const PeerSegment side_in = segment_of(p.group, peer, grant.side_segment);
  std::byte* to = place_in(rows_in, grant.offset, receive.bytes);
  std::byte* beside = place_in(side_in, grant.side_offset, side.bytes);
  if (to == nullptr && receive.bytes > 0) return false;
  if (beside == nullptr && side.bytes > 0) return false;
  target.rows = to + receive.rows + mine * p.row_bytes;
  target.scales = reinterpret_cast<float*>(to + receive.scales) + mine * p.scale_columns;
  target.source_token = reinterpret_cast<std::int32_t*>(beside + side.source_token) + mine;
  target.ids = reinterpret_cast<std::int32_t*>(beside + side.topk_idx) + mine * topk;
  target.weights = reinterpret_cast<float*>(beside + side.weights) + mine * topk;
  return true;
}

/// Whole grid: waits for the heads; true when this rank may push to `targets`. Sixteen threads look
/// at one peer, and one barrier tells the block that all is well; the order in which complaints
/// count is sorted out only when there is one.
__device__ bool agree(const DispatchParameters& p, const PushShape& shape, std::uint64_t generation,
                      PushTarget* targets) {
  const auto* needed = reinterpret_cast<const std::int64_t*>(p.plan.data + p.plan.layout.peer_rows);
  const auto* before = reinterpret_cast<const std::int64_t*>(p.plan.data + p.plan.layout.peer_row);
  std::uint32_t found = kNoComplaint << 16;
  int liar = -1;
  std::int64_t lie = 0;
  bool there = true;
  for (int peer = static_cast<int>(threadIdx.x / kHeadLanes); peer < p.group.ranks;
       peer += static_cast<int>(blockDim.x / kHeadLanes)) {
    const std::int64_t rows = needed[peer], mine = before[peer];
    there = await_flag(p.group, p.group.layout.entered, peer, generation, Stage::grants);
    if (__all_sync(0xffffu << (threadIdx.x & 16), there) == 0) {
      there = false;
      break;
    }
    std::uint64_t word = load_head_word(p.group, peer, generation);
    if (!take_second(p, peer, generation, rows, word)) {
      there = false;
      break;
    }
    const std::uint32_t what = complaint(word, p.call, rows);
    if (what != kNoComplaint) found = min(found, what << 16 | static_cast<std::uint32_t>(peer));
    const Grant grant = grant_of(word);
    PushTarget target{};
    if (!find_target(p, peer, grant, mine, target)) liar = peer, lie = grant.rows;
    target.first_expert = shape.first_expert(peer);
    target.local_experts = shape.local_experts(peer);
    if (threadIdx.x % kHeadLanes == 0) targets[peer] = target;
  }
  if (__syncthreads_and(there && found >> 16 == kNoComplaint && liar < 0) != 0) return true;
  if (__syncthreads_and(there) == 0) return false;
  const Verdict verdict = worst_of(found);
  if (verdict.reason != Reason::none) {
    refuse_call(p.group, generation, verdict, Stage::grants, needed, p.failure);
  } else if (liar >= 0) {
    fail(p.group, generation, Reason::distrust, Stage::grants, liar, {0, 0, lie});
  }
  return false;
}

/// Whole block 0: whether more rows arrive than this rank has guessed.
__device__ __forceinline__ bool guessed_too_few(const DispatchParameters& p, bool holds_counts) {
  if (p.second == nullptr || p.status != StepStatus::ok || !holds_counts) return false;
  const auto* arriving =
      reinterpret_cast<const std::int64_t*>(p.plan.data + p.plan.layout.peer_rows);
  return arriving[p.group.rank] > p.capacity;
}

/// Whole grid, after a barrier behind all pushes of the block: when all blocks have pushed, every
/// peer learns it; block 0 stays until all rows that come to this rank are here. One warp does it:
/// the barrier orders what the other threads did before what it does. `control`: of peer `lane`.
__device__ void deliver(const GroupView& group, std::uint64_t generation, std::byte* control) {
  if (threadIdx.x >= 32) return;
  const int lane = static_cast<int>(threadIdx.x);
  const bool counted = lane == 0 && count_block(group, 0);
  if (__any_sync(~0u, counted) != 0) {
    if (lane == 0) local_words(group)->arrived[kTokenCounter] = 0;  // nobody asks any more
    __syncwarp();  // what lane 0 has seen comes before what the other lanes release
    for (int peer = lane; peer < group.ranks; peer += 32) {
      if (peer != lane) control = control_of(group, peer);
      store_release(flag_at(control, group.layout.delivered, group.rank), generation);
    }
  }
  if (blockIdx.x != 0) return;
  bool there = true;
  for (int peer = lane; peer < group.ranks && there; peer += 32) {
    there = await_flag(group, group.layout.delivered, peer, generation, Stage::rows);
  }
  if (__all_sync(~0u, there) != 0 && lane == 0) end_call(group, generation);
}

__global__ void __launch_bounds__(kMaxThreads, 1)
    dispatch_kernel(const __grid_constant__ DispatchParameters p,
                    const __grid_constant__ PushShape shape) {
  extern __shared__ __align__(128) std::byte shared[];
  await_kernel_before();
  // All that is known to be needed is asked for at once: one trip to the memory.
  const std::uint64_t plan_state =
      *reinterpret_cast<const std::uint64_t*>(p.plan.data + p.plan.layout.state);
  const bool row_warp = static_cast<int>(threadIdx.x / 32) < shape.row_warps;
  LaneWords lanes{};
  if (row_warp) lanes = first_lanes(p, shape);
  std::byte* control = static_cast<int>(threadIdx.x) < min(p.group.ranks, 32)
                           ? control_of(p.group, static_cast<int>(threadIdx.x))
                           : nullptr;
  std::uint64_t generation;
  if (!begin_call(p.group, generation)) return;
  if (row_warp) begin_rows(p, shape, shared);
  bool granted = true;
  if (blockIdx.x == 0) {
    const bool holds_counts = plan_state == 1;
    const std::int64_t out_rows = count_out_rows(p, shape, holds_counts);
    post_entry(p.group, generation, p.call,
               [&](DeviceHead& head) { fill_head(p, holds_counts, out_rows, head); });
    if (guessed_too_few(p, holds_counts)) granted = grant_again(p, generation);
  }
  auto* targets = reinterpret_cast<PushTarget*>(shared);
  if (!granted || !agree(p, shape, generation, targets)) {
    if (row_warp) drop_rows(p, shape, generation, shared);
    return;
  }
  bool good = true;
  if (row_warp) {
    good = push_rows(p, shape, targets, generation, shared, lanes);
  } else {
    push_side(p, shape, targets);
  }
  let_next_kernel_come();
  if (__syncthreads_and(good) == 0) return;
  deliver(p.group, generation, control);
}

/// Scales ride with the rows when their places suit the copy engine.
bool scales_ride(const DispatchParameters& p) {
  return p.scale_column_stride == 1 && p.scale_columns % 4 == 0 && p.scale_token_stride % 4 == 0 &&
         p.scale_columns * 4 <= kMaxRidingScales &&
         reinterpret_cast<std::uintptr_t>(p.scales) % 16 == 0;
}

PushShape make_shape(const DispatchParameters& p, const KernelLimits& limits) {
  PushShape shape;
  const bool scales = p.scales != nullptr && p.scale_columns > 0;
  const bool ride = limits.bulk_copies && scales && scales_ride(p);
  shape.side_scales = scales && !ride;
  shape.side_warps = p.carries_routes || p.weights != nullptr || shape.side_scales ? kSideWarps : 0;
  while (shape.width < p.plan.topk && shape.width < 32) shape.width *= 2;
  shape.block = static_cast<std::int32_t>(p.plan.placement.experts / p.group.ranks);
  shape.larger = static_cast<std::int32_t>(p.plan.placement.experts % p.group.ranks);
  shape.row_warps = kMaxRowWarps;
  if (!limits.bulk_copies) {
    shape.shared_bytes = make_push_shared(p.group.ranks, 0, 0, 0).bytes;
    return shape;
  }
  const std::int64_t pieces = std::max<std::int64_t>(1, (p.row_bytes + kMaxPiece - 1) / kMaxPiece);
  const std::int64_t piece = (p.row_bytes + pieces - 1) / pieces;
  shape.piece = static_cast<std::uint32_t>(round_up(static_cast<std::size_t>(piece), 16));
  shape.pieces = static_cast<int>((p.row_bytes + shape.piece - 1) / shape.piece);
  shape.scale_bytes = ride ? static_cast<std::uint32_t>(p.scale_columns * 4) : 0;
  shape.stage_bytes = static_cast<std::uint32_t>(round_up(shape.piece + shape.scale_bytes, 128));
  const bool brief = shape.stage_bytes <= kShortStage;
  shape.stages = brief ? 4 : 3;
  if (!brief) shape.row_warps = kBulkRowWarps;
  while (shape.row_warps > 1 &&
         make_push_shared(p.group.ranks, shape.row_warps, shape.stages, shape.stage_bytes).bytes >
             static_cast<std::size_t>(limits.shared_bytes)) {
    --shape.row_warps;
  }
  shape.shared_bytes =
      make_push_shared(p.group.ranks, shape.row_warps, shape.stages, shape.stage_bytes).bytes;
  return shape;
}

/// Dynamic shared memory that a block may take beside what the kernel declares.
cudaError_t dispatch_limits(KernelLimits& limits) {
  const cudaError_t error = kernel_limits(limits);
  limits.shared_bytes -= 1024;
  return error;
}

}  // namespace

cudaError_t launch_dispatch(const DispatchParameters& parameters, cudaStream_t stream) {
  KernelLimits limits;
  const cudaError_t error = dispatch_limits(limits);
  if (error != cudaSuccess) return error;
  const bool aligned = parameters.row_bytes > 0 && parameters.row_bytes % 16 == 0 &&
                       reinterpret_cast<std::uintptr_t>(parameters.x) % 16 == 0;
  if (!aligned || parameters.sms < 1 || parameters.group.ranks > kMaxDomain) {
    return cudaErrorInvalidValue;
  }
  DispatchParameters copy = parameters;
  PushShape shape = make_shape(parameters, limits);
  void* arguments[] = {&copy, &shape};
  const auto threads = static_cast<unsigned>((shape.row_warps + shape.side_warps) * 32);
  return launch(reinterpret_cast<const void*>(&dispatch_kernel),
                {static_cast<unsigned>(parameters.sms), threads, shape.shared_bytes}, arguments,
                stream, limits.bulk_copies);
}

cudaError_t load_dispatch_kernels() {
  KernelLimits limits;
  const cudaError_t error = dispatch_limits(limits);
  if (error != cudaSuccess) return error;
  return load_kernel(reinterpret_cast<const void*>(&dispatch_kernel),
                     limits.bulk_copies ? limits.shared_bytes : 0);
}

}  // namespace ferry::cuda

// Dispatch: entry swap with grants, every row to its final place, delivery.
#include <algorithm>
#include <type_traits>

#include "cuda/kernels/dispatch_sm80.cuh"
#include "cuda/kernels/dispatch_sm90.cuh"
#include "cuda/kernels/entry.cuh"
#include "cuda/kernels/launch.hpp"
#include "cuda/kernels/load.hpp"
#include "cuda/kernels/progress.cuh"
#include "cuda/kernels/push.hpp"
#include "cuda/kernels/throughput.hpp"

namespace ferry::cuda {

namespace {

using namespace device;

constexpr int kMaxRowWarps = 16;
constexpr int kBulkRowWarps = 7;  ///< of a piece that is not short: more warps gain nothing
constexpr int kQuantizeRowWarps = 10;
constexpr int kSideWarps = 4;  ///< with the one that watches, if any: registers are for so many
constexpr int kMaxThreads = (kMaxRowWarps + kSideWarps) * 32;
constexpr int kQuantizeThreads = (kQuantizeRowWarps + kSideWarps) * 32;
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
  head.blocks = gridDim.x;
  if (p.status == StepStatus::ok && out_rows > p.out_capacity) {
    head.status = StepStatus::too_many;
    head.detail = out_rows;
  }
}

/// What the plan says of a peer: rows that arrive there, and the first of mine.
struct PeerRows {
  std::int64_t all;
  std::int64_t mine;
};
__device__ PeerRows rows_at(const PlanView& plan, int peer) {
  if (peer >= plan.placement.ranks) return {};
  return {reinterpret_cast<const std::int64_t*>(plan.data + plan.layout.peer_rows)[peer],
          reinterpret_cast<const std::int64_t*>(plan.data + plan.layout.peer_row)[peer]};
}

/// What a peer granted.
struct Grant {
  std::uint32_t segment, side_segment;
  std::uint64_t offset, side_offset;
  std::int64_t rows;
  std::uint32_t blocks;
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
  grant.blocks = static_cast<std::uint32_t>(get(kBlocksWord));
  return grant;
}

/// Where this rank's rows go at `peer`, the first of them at row `mine`, if what it granted lies
/// inside its segments.
__device__ bool find_target(const DispatchParameters& p, int peer, const Grant& grant,
                            std::int64_t mine, PushTarget& target) {
  if (grant.rows < 0 || grant.rows > kMaxRows || grant.blocks > kMaxBlocks) return false;
  const int topk = p.plan.topk;
  const ReceiveLayout receive =
      make_receive_layout(grant.rows, static_cast<std::size_t>(p.row_bytes), p.scale_columns);
  const WideSideLayout side =
      make_wide_side_layout(grant.rows, topk, p.carries_routes, p.weights != nullptr);
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
  target.wide_ids = reinterpret_cast<std::int64_t*>(beside + side.wide_ids) + mine * topk;
  target.weights = reinterpret_cast<float*>(beside + side.weights) + mine * topk;
  target.blocks = static_cast<std::int32_t>(grant.blocks);
  return true;
}

/// Whole grid: waits for the heads; true when this rank may push to `targets`. Sixteen threads look
/// at one peer, and one barrier tells the block that all is well; the order in which complaints
/// count is sorted out only when there is one. Whether the plan holds counts every rank knows
/// alike, and an early head cannot say it.
__device__ bool agree(const DispatchParameters& p, const PushShape& shape, std::uint64_t generation,
                      bool holds_counts, const PeerRows& first, PushTarget* targets) {
  const auto* needed = reinterpret_cast<const std::int64_t*>(p.plan.data + p.plan.layout.peer_rows);
  constexpr std::uint32_t kBadPlan = 2;
  std::uint32_t found = (holds_counts ? kNoComplaint : kBadPlan) << 16;
  int liar = -1;
  std::int64_t lie = 0;
  bool there = true;
  for (int peer = static_cast<int>(threadIdx.x / kHeadLanes); peer < p.group.ranks;
       peer += static_cast<int>(blockDim.x / kHeadLanes)) {
    const bool is_first = peer == static_cast<int>(threadIdx.x / kHeadLanes);
    const auto [rows, mine] = is_first ? first : rows_at(p.plan, peer);
    std::uint64_t word;
    there = await_head(p.group, peer, generation, Stage::grants, word);
    if (!there) break;
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

/// Whole grid, after a barrier behind all pushes of the block: one warp tells every peer that this
/// block has delivered. The barrier orders what the other threads did before what it tells.
/// `control`: of peer `lane`.
__device__ void tell_delivered(const GroupView& group, std::uint64_t generation,
                               std::byte* control) {
  if (threadIdx.x >= 32) return;
  const int block = static_cast<int>(blockIdx.x);
  for (int peer = static_cast<int>(threadIdx.x); peer < group.ranks; peer += 32) {
    if (peer >= 32) control = control_of(group, peer);
    store_release(delivered_flag(group, control, group.rank, block), generation);
  }
}

/// Whole block 0: waits until all blocks of all ranks, this one's too, have delivered; then the
/// call has ended.
__device__ void await_delivered(const DispatchParameters& p, const PushTarget* targets,
                                std::uint64_t generation) {
  const int lane = static_cast<int>(threadIdx.x % 32), warps = static_cast<int>(blockDim.x / 32);
  bool there = true;
  for (int s = static_cast<int>(threadIdx.x / 32); s < p.group.ranks && there; s += warps) {
    for (int block = lane; block < targets[s].blocks && there; block += 32) {
      const auto* flag = delivered_flag(p.group, p.group.control, s, block);
      there = await_flag(p.group, flag, s, generation, Stage::rows);
    }
  }
  if (__syncthreads_and(there) == 0 || threadIdx.x != 0) return;
  local_words(p.group)->arrived[kTokenCounter] = 0;  // nobody asks any more
  if (p.came != nullptr) *p.came = 1;
  end_call(p.group, generation);
}

/// Whole block 0, before anything that ran before this kernel is known to have ended: posts the
/// head while the plan, which comes directly before in the group's calls, still swaps its counts.
/// What the head grants has had no user since. Gives the generation; 0: the group has failed.
__device__ std::uint64_t post_early(const DispatchParameters& p) {
  const std::uint64_t generation = load_acquire(&local_words(p.group)->planning) + 1;
  const bool failed = has_failed(p.group);
  fence_system();
  if (__syncthreads_or(failed) != 0) return 0;
  post_entry(p.group, generation, p.call, [&](DeviceHead& head) { fill_head(p, true, 0, head); });
  return generation;
}

/// Whole block: until the plan, whose kernel runs and bounds its own waits, has ended as a call.
/// False: the group has failed.
__device__ bool await_plan(const GroupView& group) {
  bool there = true;
  if (threadIdx.x == 0) {
    const LocalWords* words = local_words(group);
    const std::uint64_t planning = load_acquire(&words->planning);
    while (there && load_acquire(&words->generation) < planning) there = !has_failed(group);
  }
  if (__syncthreads_and(there) == 0) return false;
#if __CUDA_ARCH__ >= 900
  fence_proxy_async();  // the rows, which TMA reads, were written before the plan
#endif
  return true;
}

/// Whole block: true when the rows of this call have moved. `kFollowed`: rows are told of, or
/// waited for, on the way.
template <bool kQuantizes, bool kFollowed>
__device__ bool run_dispatch(const DispatchParameters& p, const PushShape& shape) {
  extern __shared__ __align__(128) std::byte shared[];
  const std::uint64_t posted = p.early && blockIdx.x == 0 ? post_early(p) : 0;
  if (p.glued) {
    if (!await_plan(p.group)) return false;
  } else {
    await_kernel_before();
  }
  // All that is known to be needed is asked for at once: one trip to the memory.
  const bool holds_counts =
      *reinterpret_cast<const std::uint64_t*>(p.plan.data + p.plan.layout.state) == 1;
  const bool row_warp = static_cast<int>(threadIdx.x / 32) < shape.row_warps;
  LaneWords lanes{};
  if (row_warp) lanes = first_lanes(p, shape);
  const PeerRows first = rows_at(p.plan, static_cast<int>(threadIdx.x / kHeadLanes));
  std::byte* control = static_cast<int>(threadIdx.x) < min(p.group.ranks, 32)
                           ? control_of(p.group, static_cast<int>(threadIdx.x))
                           : nullptr;
  std::uint64_t generation;
  if (!begin_call(p.group, generation)) return false;
  if (row_warp) begin_rows(p, shape, shared);
  if (blockIdx.x == 0) {
    if (threadIdx.x == 0 && p.came != nullptr) *p.came = 0;
    if (posted == 0) {
      const std::int64_t out_rows = count_out_rows(p, shape, holds_counts);
      post_entry(p.group, generation, p.call,
                 [&](DeviceHead& head) { fill_head(p, holds_counts, out_rows, head); });
    }
  }
  auto* targets = reinterpret_cast<PushTarget*>(shared);
  if (!agree(p, shape, generation, holds_counts, first, targets)) {
    if (row_warp) drop_rows(p, shape, generation, shared);
    return false;
  }
  bool good = true;
  if (row_warp) {
    good = push_rows<kQuantizes, kFollowed>(p, shape, targets, generation, shared, lanes);
  } else if (!kFollowed ||
             static_cast<int>(threadIdx.x / 32) < shape.row_warps + shape.side_warps) {
    push_side(p, shape, targets);
    if (kFollowed) tell_routes(p, shape, generation);
  } else if (blockIdx.x == 0) {
    good = watch_rows(p, targets, generation);
  }
  let_next_kernel_come();
  if (__syncthreads_and(good) == 0) return false;
  tell_delivered(p.group, generation, control);
  if (blockIdx.x != 0) return true;
  await_delivered(p, targets, generation);
  if (p.glued) await_kernel_before();  // the kernels after this one are after the plan's, too
  return true;
}

template <bool kQuantizes, bool kFollowed>
__global__ void __launch_bounds__(kQuantizes ? kQuantizeThreads : kMaxThreads, 1)
    dispatch_kernel(const __grid_constant__ DispatchParameters p,
                    const __grid_constant__ PushShape shape) {
  if (run_dispatch<kQuantizes, kFollowed>(p, shape) || !kFollowed) return;
  if (blockIdx.x == 0 && threadIdx.x == 0) abandon_gate(p);
}

const void* dispatch_kernel_for(bool quantize, bool followed) {
  const auto kernel = [&](auto follow) {
    constexpr bool kFollowed = decltype(follow)::value;
    return quantize ? reinterpret_cast<const void*>(&dispatch_kernel<true, kFollowed>)
                    : reinterpret_cast<const void*>(&dispatch_kernel<false, kFollowed>);
  };
  return followed ? kernel(std::true_type{}) : kernel(std::false_type{});
}

/// Scales ride with the rows when their places suit the copy engine.
bool scales_ride(const DispatchParameters& p) {
  return p.scale_column_stride == 1 && p.scale_columns % 4 == 0 && p.scale_token_stride % 4 == 0 &&
         p.scale_columns * 4 <= kMaxRidingScales &&
         reinterpret_cast<std::uintptr_t>(p.scales) % 16 == 0;
}

/// What goes through the stages of row warps. `ride`: the scales do.
void cut_rows(const DispatchParameters& p, bool ride, PushShape& shape) {
  const std::size_t element = p.quantize ? size_of(p.x_dtype) : 1;
  shape.x_row_bytes = p.row_bytes * static_cast<std::int64_t>(element);
  const std::int64_t pieces =
      std::max<std::int64_t>(1, (shape.x_row_bytes + kMaxPiece - 1) / kMaxPiece);
  const auto piece = static_cast<std::size_t>((shape.x_row_bytes + pieces - 1) / pieces);
  // Whole steps, so that the scales of a piece begin at 16 bytes, too.
  shape.piece =
      static_cast<std::uint32_t>(round_up(piece, p.quantize ? element * kStepChannels : 16));
  shape.pieces = static_cast<int>((shape.x_row_bytes + shape.piece - 1) / shape.piece);
  shape.scale_bytes = ride ? static_cast<std::uint32_t>(p.scale_columns * 4) : 0;
  const std::size_t made = p.quantize ? shape.piece / element / kScaleBlock * sizeof(float) : 0;
  shape.stage_bytes =
      static_cast<std::uint32_t>(round_up(shape.piece + shape.scale_bytes + made, 128));
  const bool brief = shape.stage_bytes <= kShortStage && !p.quantize;
  shape.stages = brief ? 4 : 3;
  if (!brief && !p.quantize) shape.row_warps = kBulkRowWarps;
}

PushShape make_shape(const DispatchParameters& p, const KernelLimits& limits) {
  PushShape shape;
  const bool scales = p.scales != nullptr && p.scale_columns > 0;
  const bool ride = limits.bulk_copies && scales && scales_ride(p);
  shape.side_scales = scales && !ride;
  shape.watch_warps = p.steps.count > 0 ? 1 : 0;
  const bool beside = p.carries_routes || p.weights != nullptr || shape.side_scales;
  shape.side_warps = beside ? kSideWarps - shape.watch_warps : 0;
  while (shape.width < p.plan.topk && shape.width < 32) shape.width *= 2;
  shape.block = static_cast<std::int32_t>(p.plan.placement.experts / p.group.ranks);
  shape.larger = static_cast<std::int32_t>(p.plan.placement.experts % p.group.ranks);
  shape.row_warps = p.quantize ? kQuantizeRowWarps : kMaxRowWarps;
  if (!limits.bulk_copies) {
    shape.shared_bytes = make_push_shared(p.group.ranks, 0, 0, 0).bytes;
    return shape;
  }
  cut_rows(p, ride, shape);
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
  if (!aligned || parameters.sms < 1 || parameters.group.ranks > kMaxDomain ||
      parameters.sms > kMaxBlocks || (parameters.early && parameters.out_capacity > 0)) {
    return cudaErrorInvalidValue;
  }
  DispatchParameters copy = parameters;
  PushShape shape = make_shape(parameters, limits);
  // Scales of the side warps come at any time.
  if (shape.side_scales) copy.tells_progress = false;
  void* arguments[] = {&copy, &shape};
  const bool followed = copy.tells_progress || copy.steps.count > 0;
  const auto threads =
      static_cast<unsigned>((shape.row_warps + shape.side_warps + shape.watch_warps) * 32);
  return launch(dispatch_kernel_for(parameters.quantize, followed),
                {static_cast<unsigned>(parameters.sms), threads, shape.shared_bytes}, arguments,
                stream, limits.bulk_copies);
}

cudaError_t load_dispatch_kernels() {
  KernelLimits limits;
  const cudaError_t error = dispatch_limits(limits);
  if (error != cudaSuccess) return error;
  for (const bool quantize : {false, true}) {
    for (const bool followed : {false, true}) {
      const cudaError_t loaded = load_kernel(dispatch_kernel_for(quantize, followed),
                                             limits.bulk_copies ? limits.shared_bytes : 0);
      if (loaded != cudaSuccess) return loaded;
    }
  }
  return cudaSuccess;
}

}  // namespace ferry::cuda

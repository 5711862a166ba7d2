// Dispatch: entry swap with grants, every row to its final place, delivery.
#include <algorithm>
#include <type_traits>

// First: the order in which functions stand decides what the compiler inlines.
#include "cuda/kernels/throughput/dispatch_sm80.cuh"
#include "cuda/kernels/throughput/dispatch_sm90.cuh"

#include "cuda/kernels/base/entry.cuh"
#include "cuda/kernels/base/launch.hpp"
#include "cuda/kernels/base/load.hpp"
#include "cuda/kernels/throughput/grants.cuh"
#include "cuda/kernels/throughput/kernels.hpp"
#include "cuda/kernels/throughput/plan_view.cuh"
#include "cuda/kernels/throughput/progress.cuh"
#include "cuda/kernels/throughput/push.hpp"

namespace ferry::cuda {

namespace {

using namespace device;

constexpr int kMaxRowWarps = 16;
constexpr int kBulkRowWarps = 7;  ///< of a piece that is not short: more warps gain nothing
constexpr int kQuantizeRowWarps = 10;
constexpr int kSideWarps = 4;
constexpr int kMaxThreads = (kMaxRowWarps + kSideWarps) * 32;
constexpr int kQuantizeThreads = (kQuantizeRowWarps + kSideWarps) * 32;
constexpr std::int64_t kMaxPiece = 8192;
constexpr std::uint32_t kShortStage = 2048;
constexpr std::int64_t kMaxRidingScales = 4096;

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
  // Or the plan's end would come after this call's.
  bool there = threadIdx.x != 0 || await_plan_end(p);
  for (int s = static_cast<int>(threadIdx.x / 32); s < p.group.ranks && there; s += warps) {
    for (int block = lane; block < targets[s].blocks && there; block += 32) {
      const auto* flag = delivered_flag(p.group, p.group.control, s, block);
      there = await_flag(p.group, flag, s, generation, Stage::rows);
    }
  }
  if (__syncthreads_and(there) == 0 || threadIdx.x != 0) return;
  local_words(p.group)->arrived[kTokenCounter] = 0;  // nobody asks any more
  if (p.came != nullptr) *p.came = generation;
  if (p.followed) fence_system();  // the fan-out beside takes this end for the arrival of all rows
  end_call(p.group, generation);
}

/// Whole block, behind await_kernel_before: what this call needs to know of others, and its head.
/// `begun`: row warps have. False: the group has failed, or a second grant has not come.
__device__ __forceinline__ bool begin_dispatch(const DispatchParameters& p, const PushShape& shape,
                                               std::byte* shared, bool posted, std::byte* control,
                                               FirstPeer& first, std::uint64_t& generation,
                                               bool& holds_counts, bool& begun) {
  // All that is known to be needed is asked for at once: one trip to the memory.
  holds_counts = holds(p.group, p.plan);
  first.rows = rows_at(p.plan, first_peer());
  if (!begin_call(p.group, generation)) return false;
  begun = true;
  if (static_cast<int>(threadIdx.x / 32) < shape.row_warps) begin_rows(p, shape, shared);
  if (blockIdx.x != 0 || posted) return true;
  if (!await_free(p)) return false;
  const std::int64_t out_rows = count_out_rows(p, shape, holds_counts);
  post_entry(p.group, control, generation, p.call,
             [&](DeviceHead& head) { fill_head(p, holds_counts, out_rows, head); });
  return true;
}

/// The same directly behind the plan's kernel, which may still run: the kernels before that one
/// have ended, so what is pushed can be read.
__device__ __forceinline__ bool begin_glued(const DispatchParameters& p, const PushShape& shape,
                                            std::byte* shared, FirstPeer& first,
                                            DestinationWords& destinations,
                                            std::uint64_t& generation, bool& holds_counts,
                                            bool& begun) {
#if __CUDA_ARCH__ >= 900
  fence_proxy_async();
#endif
  begun = true;
  const bool row_warp = static_cast<int>(threadIdx.x / 32) < shape.row_warps;
  if (row_warp) begin_rows(p, shape, shared);
  generation = load_acquire(&local_words(p.group)->planning) + 1;
  // Behind that word the destinations can be read; they come while the heads do.
  if (row_warp) destinations = ask_first_destinations(p, shape);
  const bool usable = !has_failed(p.group);  // else the plan did nothing, and this is not its word
  return __syncthreads_and(usable && await_plan(p, generation, first, holds_counts)) != 0;
}

/// Whole block, once the call moves its rows: the fan-out may come, which then finds its
/// generation.
__device__ void let_fan_out_come(const DispatchParameters& p, std::uint64_t generation) {
  if (!p.followed) return;
  if (blockIdx.x == 0) {
    if (threadIdx.x == 0 && await_plan_end(p)) {
      store_release(&local_words(p.group)->moving, generation);
      fence_device();
    }
    __syncthreads();
  }
  let_next_kernel_come();
}

/// `kTells`: rows are told of on the way, or a fan-out comes beside.
template <bool kQuantizes, bool kTells>
__device__ void run_dispatch(const DispatchParameters& p, const PushShape& shape) {
  extern __shared__ __align__(128) std::byte shared[];
  if (kTells) begin_progress();
  // The table of segments is the CPU's, which only adds to it.
  FirstPeer first;
  first.segment = first_segment(p.group);
  std::byte* first_to = blockIdx.x == 0 ? first_control(p.group) : nullptr;
  std::byte* control = static_cast<int>(threadIdx.x) < min(p.group.ranks, 32)
                           ? control_of(p.group, static_cast<int>(threadIdx.x))
                           : nullptr;
  const bool row_warp = static_cast<int>(threadIdx.x / 32) < shape.row_warps;
  std::uint64_t generation = p.early && blockIdx.x == 0 ? post_early(p, first_to) : 0;
  bool holds_counts = false, begun = false, good = true;
  DestinationWords destinations{};
  if (p.glued) {
    good = begin_glued(p, shape, shared, first, destinations, generation, holds_counts, begun);
  } else {
    await_kernel_before();
    if (row_warp) destinations = ask_first_destinations(p, shape);
    good = begin_dispatch(p, shape, shared, generation != 0, first_to, first, generation,
                          holds_counts, begun);
  }
  if (good && blockIdx.x == 0) {
    if (threadIdx.x == 0 && p.came != nullptr) *p.came = 0;
    if (guessed_too_few(p, holds_counts)) good = grant_again(p, generation);
  }
  auto* targets = reinterpret_cast<PushTarget*>(shared);
  if (!good || !agree(p, shape, generation, holds_counts, first, targets)) {
    if (row_warp && begun) drop_rows(p, shape, generation, shared);
    return;
  }
  if (kTells) let_fan_out_come(p, generation);
  if (row_warp) {
    good = push_rows<kQuantizes, kTells>(p, shape, targets, generation, shared, destinations);
  } else {
    push_side(p, shape, targets);
    if (kTells) tell_routes(p, shape, generation);
  }
  let_next_kernel_come();
  if (__syncthreads_and(good) == 0) return;
  tell_delivered(p.group, generation, control);
  if (blockIdx.x != 0) return;
  await_delivered(p, targets, generation);
}

template <bool kQuantizes, bool kTells>
__global__ void __launch_bounds__(kQuantizes ? kQuantizeThreads : kMaxThreads, 1)
    dispatch_kernel(const __grid_constant__ DispatchParameters p,
                    const __grid_constant__ PushShape shape) {
  run_dispatch<kQuantizes, kTells>(p, shape);
  // The kernels after this one are after the plan's, too.
  if (p.glued && blockIdx.x == 0) await_kernel_before();
}

const void* dispatch_kernel_for(bool quantize, bool tells) {
  const auto kernel = [&](auto telling) {
    constexpr bool kTells = decltype(telling)::value;
    return quantize ? reinterpret_cast<const void*>(&dispatch_kernel<true, kTells>)
                    : reinterpret_cast<const void*>(&dispatch_kernel<false, kTells>);
  };
  return tells ? kernel(std::true_type{}) : kernel(std::false_type{});
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
  const bool beside = p.carries_routes || p.has_weights || shape.side_scales;
  shape.side_warps = beside ? kSideWarps : 0;
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
  if (!aligned || parameters.num_sms < 1 || parameters.group.ranks > kMaxDomain ||
      parameters.num_sms > kMaxBlocks || parameters.parts > kProgressParts ||
      (parameters.early && parameters.out_capacity > 0) ||
      (parameters.glued && !parameters.early)) {
    return cudaErrorInvalidValue;
  }
  DispatchParameters copy = parameters;
  PushShape shape = make_shape(parameters, limits);
  // Scales of the side warps come at any time.
  if (shape.side_scales) copy.parts = 0;
  void* arguments[] = {&copy, &shape};
  const auto threads = static_cast<unsigned>((shape.row_warps + shape.side_warps) * 32);
  return launch(dispatch_kernel_for(parameters.quantize, copy.parts > 0 || copy.followed),
                {static_cast<unsigned>(parameters.num_sms), threads, shape.shared_bytes}, arguments,
                stream, limits.bulk_copies);
}

cudaError_t load_dispatch_kernels() {
  KernelLimits limits;
  const cudaError_t error = dispatch_limits(limits);
  if (error != cudaSuccess) return error;
  for (const bool quantize : {false, true}) {
    for (const bool tells : {false, true}) {
      const cudaError_t loaded = load_kernel(dispatch_kernel_for(quantize, tells),
                                             limits.bulk_copies ? limits.shared_bytes : 0);
      if (loaded != cudaSuccess) return loaded;
    }
  }
  return cudaSuccess;
}

}  // namespace ferry::cuda

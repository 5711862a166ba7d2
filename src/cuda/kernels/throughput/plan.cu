// Count, swap, place: one block reads the routes, gives every rank its counts, and knows then where
// every row goes.
#include "cuda/kernels/base/entry.cuh"
#include "cuda/kernels/base/launch.hpp"
#include "cuda/kernels/base/load.hpp"
#include "cuda/kernels/throughput/kernels.hpp"
#include "cuda/kernels/throughput/plan_counts.cuh"
#include "cuda/kernels/throughput/plan_read.cuh"
#include "cuda/kernels/throughput/plan_routes.cuh"
#include "cuda/kernels/throughput/plan_view.cuh"

namespace ferry::cuda {

namespace {

using namespace device;
using namespace plan;

__device__ void set_state(const PlanParameters& p, std::uint64_t state) {
  *reinterpret_cast<std::uint64_t*>(p.plan.data + p.plan.layout.state) = state;
}

/// One thread: the counts, or the reason why there are none, are in the CPU's memory.
__device__ void tell_host(const PlanParameters& p, std::uint64_t generation) {
  if (p.counts != nullptr) store_release(&p.counts->done, generation);
}

/// Whole block: the counts to the CPU, behind all that a GPU waits for.
__device__ void tell_counts(const PlanParameters& p, const PlanShape& shape,
                            std::uint64_t generation) {
  if (p.count_words != nullptr) {
    const int ranks = p.group.ranks, tokens = ranks * ranks;
    const auto* rank_tokens =
        reinterpret_cast<const std::int32_t*>(p.plan.data + p.plan.layout.rank_tokens);
    const auto* slots =
        reinterpret_cast<const std::int32_t*>(p.plan.data + p.plan.layout.expert_slots);
    const int all = tokens + ranks * shape.local_experts(p.group.rank);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < all; i += kThreads) {
      p.count_words[i] = i < tokens ? rank_tokens[i] : slots[i - tokens];
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) tell_host(p, generation);
}

/// Whole block: waits for everybody's counts and keeps them, a warp for each source, and one
/// barrier says that all is well. What a refused plan keeps is worth nothing: its state stays 0,
/// and the CPU is given the reason. True: go on.
__device__ bool swap_counts(const PlanParameters& p, const PlanShape& shape,
                            std::uint64_t generation, std::int32_t* matrix) {
  Findings mine;
  const int warp = static_cast<int>(threadIdx.x / 32);
#pragma unroll 1
  for (int s = warp; s < p.group.ranks; s += kWarps) {
    if (holes_of_block()[s]) collect_none(p, shape, s, matrix);
  }
  for (int s = warp; s < p.group.ranks; s += kWarps) {
    if (holes_of_block()[s]) continue;
    mine.there = collect(p, shape, generation, s, matrix, mine);
    if (!mine.there) break;
  }
  const bool good = mine.there && mine.found >> 16 == kNoComplaint && mine.offender < 0;
  if (__syncthreads_and(good) != 0) return true;
  if (__syncthreads_and(mine.there) == 0) return false;
  const Verdict verdict = worst_of(mine.found);
  if (verdict.reason != Reason::none) {
    Failure* failure = p.counts != nullptr ? &p.counts->failure : nullptr;
    refuse_call(p.group, generation, verdict, Stage::counts, nullptr, failure);
    __syncthreads();
    if (threadIdx.x == 0) tell_host(p, generation);
  } else if (mine.offender >= 0) {
    fail(p.group, generation, Reason::violation, Stage::counts, mine.offender, {0, 0, mine.claim});
  }
  return false;
}

/// Whole block: where every row goes.
__device__ void place_ranks(const PlanParameters& p, std::uint64_t generation,
                            const std::int32_t* matrix) {
  const int ranks = p.group.ranks, me = p.group.rank;
  auto* peer_row = reinterpret_cast<std::int64_t*>(p.plan.data + p.plan.layout.peer_row);
  auto* peer_rows = reinterpret_cast<std::int64_t*>(p.plan.data + p.plan.layout.peer_rows);
  auto* recv_offset = reinterpret_cast<std::int64_t*>(p.plan.data + p.plan.layout.recv_offset);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i <= ranks; i += kThreads) {
    std::int64_t before = 0, all = 0, received = 0;
#pragma unroll 1
    for (int s = 0; s < ranks; ++s) {
      if (s == me) before = all;
      if (i < ranks) all += matrix[s * ranks + i];
      if (s < i) received += matrix[s * ranks + me];
    }
    recv_offset[i] = received;
    if (i == ranks) continue;
    // In words that say whose they are, for a dispatch that waits for nothing else.
    const auto most = static_cast<std::uint32_t>(min(all, std::int64_t{UINT32_MAX}));
    store_pair(placed_at(p.plan, i), std::uint64_t{most} << 32 | static_cast<std::uint32_t>(before),
               generation);
    peer_row[i] = before, peer_rows[i] = all;
  }
}

template <int kWords, class Id>
__device__ void count_and_place(const PlanParameters& p, const PlanShape& shape,
                                const Workplace& work, unsigned long long* bad) {
  using R = Round<kWords>;
#pragma unroll 1
  for (std::int64_t first = 0; first < p.plan.tokens; first += R::kTokens) {
    const std::int64_t left = p.plan.tokens - first;
    const int count = left < R::kTokens ? static_cast<int>(left) : R::kTokens;
    read_routes<kWords, Id>(p, shape, work, first, count, bad);
    __syncthreads();
    place_round<kWords>(p, work, first, count, (count + kThreads - 1) / kThreads);
  }
}

template <int kWords, class Id>  // one kernel for each kind of id: less code to fetch
__global__ void __launch_bounds__(kThreads)
    plan_kernel(const __grid_constant__ PlanParameters p, const __grid_constant__ PlanShape shape) {
  extern __shared__ __align__(16) std::byte shared[];
  __shared__ unsigned long long bad;
  __shared__ std::byte* control_of_warp[kWarps];  // registers are short
  std::byte* control = first_control(p.group);
  note_holes(p.group);
  await_kernel_before();
  ask_for_routes<kWords, Id>(p, shape.width);
  // As begin_call, with the first work under the way of these two words.
  const std::uint64_t generation = load_relaxed(&local_words(p.group)->generation) + 1;
  const bool failed = has_failed(p.group);
  const SharedLayout at = make_shared_layout(p.group.ranks, p.plan.placement.experts, kWords);
  const bool fits = p.plan.placement.experts <= kSharedExperts;
  const Workplace work{reinterpret_cast<std::int32_t*>(shared + at.counts),
                       reinterpret_cast<std::int32_t*>(shared + at.totals),
                       reinterpret_cast<std::uint32_t*>(shared + at.masks),
                       fits ? reinterpret_cast<std::int32_t*>(shared + at.slots) : nullptr,
                       fits ? reinterpret_cast<std::uint8_t*>(shared + at.rank_of) : nullptr,
                       p.scratch};
  if (threadIdx.x == 0) bad = ~0ull;
  prepare(p, shape, work);
  if (threadIdx.x % 32 == 0) control_of_warp[threadIdx.x / 32] = control;
  if (__syncthreads_or(failed) != 0) return;
  if (threadIdx.x == 0) set_state(p, 0);
  // Whatever lay here before could be taken for words of this generation.
  if (static_cast<int>(threadIdx.x) < p.group.ranks) {
    store_pair(placed_at(p.plan, static_cast<int>(threadIdx.x)), 0, generation - 1);
  }
  const bool last = threadIdx.x == kThreads - 1;  // of a warp that posts nothing
  count_and_place<kWords, Id>(p, shape, work, &bad);
  blame_lost(p.group, work, &bad);
  __syncthreads();
  post_entry(
      p.group, control_of_warp[threadIdx.x / 32], generation, p.call,
      [&](DeviceHead& head) {
        if (bad == ~0ull) return;
        head.refused = Reason::bad_route;
        head.detail = static_cast<std::int64_t>(bad);
      },
      CountBody{work.totals, work.slots_anywhere(), shape, p.group.ranks});
  if (last) {
    // A dispatch that comes now looks at `planning` and then at the destinations. One thread is
    // enough to let it come, and the first.
    fence_device();
    store_relaxed(&local_words(p.group)->planning, generation);
    let_next_kernel_come();
  }
  auto* matrix = reinterpret_cast<std::int32_t*>(work.masks);
  if (!swap_counts(p, shape, generation, matrix)) return;
  place_ranks(p, generation, matrix);
  __syncthreads();
  if (threadIdx.x == 0) {
    set_state(p, generation);
    fence_device();  // for a dispatch that waits for the word, not for the end of this kernel
    end_call(p.group, generation);
  }
  tell_counts(p, shape, generation);
}

std::uint64_t magic_of(std::int32_t divisor) {
  return divisor <= 1 ? 0 : ~std::uint64_t{0} / static_cast<std::uint32_t>(divisor) + 1;
}

int mask_words(int ranks) {
  return ranks <= 32 ? 1 : 3;
}

const void* plan_kernel_for(int words, bool wide) {
  if (words == 1) {
    return wide ? reinterpret_cast<const void*>(&plan_kernel<1, std::int64_t>)
                : reinterpret_cast<const void*>(&plan_kernel<1, std::int32_t>);
  }
  return wide ? reinterpret_cast<const void*>(&plan_kernel<3, std::int64_t>)
              : reinterpret_cast<const void*>(&plan_kernel<3, std::int32_t>);
}

}  // namespace

std::size_t plan_scratch_bytes(std::int64_t experts) {
  return experts <= kSharedExperts ? 0 : static_cast<std::size_t>(experts) * 4;
}

cudaError_t launch_plan(const PlanParameters& parameters, cudaStream_t stream) {
  const int ranks = parameters.group.ranks;
  const Placement& placement = parameters.plan.placement;
  const std::size_t body =
      (static_cast<std::size_t>(ranks) + static_cast<std::size_t>(placement.local_experts(0))) * 4;
  if (ranks > kMaxDomain || placement.experts > INT32_MAX ||
      2 * (sizeof(DeviceHead) + body) > parameters.group.layout.message_bytes ||
      (plan_scratch_bytes(placement.experts) > 0 && parameters.scratch == nullptr)) {
    return cudaErrorInvalidValue;
  }
  KernelLimits limits;
  const cudaError_t error = kernel_limits(limits);
  if (error != cudaSuccess) return error;
  PlanParameters copy = parameters;
  PlanShape shape;
  while (shape.width < parameters.plan.topk && shape.width < 32) shape.width *= 2;
  shape.block = static_cast<std::int32_t>(placement.experts / ranks);
  shape.larger = static_cast<std::int32_t>(placement.experts % ranks);
  shape.block_magic = magic_of(shape.block);
  shape.large_magic = magic_of(shape.block + 1);
  void* arguments[] = {&copy, &shape};
  const int words = mask_words(ranks);
  const void* kernel = plan_kernel_for(words, parameters.wide);
  return launch(kernel, {1, kThreads, make_shared_layout(ranks, placement.experts, words).bytes},
                arguments, stream, limits.bulk_copies);
}

cudaError_t load_plan_kernels() {
  const auto bytes = [](int ranks, int words) {
    return static_cast<int>(make_shared_layout(ranks, kSharedExperts, words).bytes);
  };
  for (const bool wide : {false, true}) {
    cudaError_t error = load_kernel(plan_kernel_for(1, wide), bytes(32, 1));
    if (error == cudaSuccess) error = load_kernel(plan_kernel_for(3, wide), bytes(kMaxDomain, 3));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ferry::cuda

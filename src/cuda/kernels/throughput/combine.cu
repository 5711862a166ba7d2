// Combine: ranks say where their rows lie, owners pull and sum them, then tell that they have read.
//
// These two includes stay first: the compiler inlines by the order of functions.
#include "cuda/kernels/throughput/combine_sm80.cuh"
#include "cuda/kernels/throughput/combine_sm90.cuh"

#include "cuda/kernels/base/entry.cuh"
#include "cuda/kernels/base/launch.hpp"
#include "cuda/kernels/base/load.hpp"
#include "cuda/kernels/throughput/combine_source.cuh"
#include "cuda/kernels/throughput/kernels.hpp"
#include "cuda/kernels/throughput/plan_view.cuh"
#include "cuda/kernels/throughput/sum_shape.hpp"

namespace ferry::cuda {
namespace {

using namespace device;

/// Whole block 0: tells all ranks where this rank's rows are.
__device__ void post_head(const CombineParameters& p, std::byte* control,
                          std::uint64_t generation) {
  post_entry(p.group, control, generation, p.call, [&](DeviceHead& head) {
    const bool known = holds(p.group, p.plan);
    head.status = p.status;
    head.refused = known ? Reason::none : Reason::bad_plan;
    head.segment = p.segment;
    head.offset = p.offset;
    head.side_segment = p.side_segment;
    head.side_offset = p.side_offset;
    head.rows = p.rows;
    head.blocks = p.after_sums ? 1 : 0;
    head.detail = p.need_bytes;
  });
}

template <int kVectors>
__device__ SumWork work_of_warp(const CombineLaunch& launch) {
  const SumShape& shape = launch.shape;
  SumWork work;
  work.out = launch.p.out;
  work.row_bytes = launch.row_bytes;
  work.rows = static_cast<std::uint32_t>(launch.p.plan.tokens);
  work.pieces = shape.pieces;
  work.piece_bytes = kVectors * 512;
  work.first = first_item(shape.spread, static_cast<std::uint32_t>(shape.warps));
  work.stride = gridDim.x * static_cast<std::uint32_t>(shape.warps);
  return work;
}

/// Whole block: counts this block; true in every thread of the last one. What a block has read is
/// in its registers; nobody but the own stream waits for what it has stored, so this need not (as
/// arrive_last does).
__device__ bool last_to_read(const GroupView& group) {
  __syncthreads();
  int last = 0;
  if (threadIdx.x == 0) {
    std::uint32_t* word = &local_words(group)->arrived[0];
    std::uint32_t before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(word)
                 : "memory");
    last = before == gridDim.x - 1;
    if (last) *word = 0;
  }
  return __syncthreads_or(last) != 0;
}

/// Whole block: the readers are through; waits until all peers have read this rank's rows.
__device__ void finish(const GroupView& group, std::uint64_t generation) {
  if (last_to_read(group)) raise_all(group, group.layout.done, generation);
  if (blockIdx.x != 0) return;
  // The own flag is among them: all blocks of this grid are through, and know the generation.
  if (!await_all(group, group.layout.done, generation, Stage::loans)) return;
  if (threadIdx.x == 0) end_call(group, generation);
}

/// Warps of a block beside those that sum rows: they sum weights, the last watches the peers' sums.
int warps_beside(const CombineParameters& p) {
  return (p.has_weights ? kWeightWarps : 0) + 1;
}

/// By the warps beside.
__device__ void work_beside(const CombineParameters& p, const CombineSource& source, int warp,
                            SummedRows& summed) {
  if (!p.has_weights || warp == kWeightWarps) {
    watch_sums(
        p.group, source.generation,
        plan_part<std::int32_t>(p.plan, p.plan.layout.rank_tokens) + p.group.rank * p.group.ranks,
        plan_part<std::int64_t>(p.plan, p.plan.layout.peer_rows), summed);
  } else if (p.plan.topk % 4 == 0) {
    sum_weights<float4>(p, source, warp);
  } else {
    sum_weights<float>(p, source, warp);
  }
}

/// False: a failure or a refusal, of which the host knows.
template <class T, int kVectors>
__device__ __forceinline__ bool combine(const CombineLaunch& launch, std::byte* control) {
  __shared__ Bases bases;
  __shared__ SummedRows summed;
  __shared__ HeadPlace places[kMaxDomain];
  const CombineParameters& p = launch.p;
  std::uint64_t generation;
  if (!begin_call(p.group, generation)) return false;
  if (blockIdx.x == 0) post_head(p, control, generation);
  // What the plan says is fetched, and the ring made, while the heads are on their way.
  const CombineSource source{&p.group,
                             generation,
                             &summed,
                             plan_part<DeviceDestination>(p.plan, p.plan.layout.destinations),
                             launch.destination_count,
                             launch.entry_count,
                             launch.group_bits,
                             &bases,
                             launch.biases,
                             launch.row_bytes};
  const SumWork work = work_of_warp<kVectors>(launch);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const bool sums = warp < launch.shape.warps;
  PeerRows plan{};
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < p.group.ranks) plan = peer_rows_of(p.plan, thread, p.segment, p.group);
#if __CUDA_ARCH__ >= 900
  Ring ring{};
  if (sums) {
    ring =
        ring_of_warp(p.group, generation, launch.shape.warps, launch.shape.stages, kVectors * 512);
  }
  const SumStart<CombineSource> start(source, work);
#endif
  const auto* needed = plan_part<std::int64_t>(p.plan, p.plan.layout.peer_rows);
  Verdict verdict;
  const auto poll = [&](int peer, std::uint64_t word) {
    const HeadPlace place = place_of(word);
    if (threadIdx.x % kHeadLanes == 0) places[peer] = place;
  };
  if (!await_entry(p.group, generation, Stage::descriptors, p.call, needed, verdict, poll)) {
    return false;
  }
  if (verdict.reason != Reason::none) {
    refuse_call(p.group, generation, verdict, Stage::descriptors, needed, p.failure);
    return false;
  }
  if (!find_bases(launch, generation, plan, places, bases, summed)) return false;
  bool summed_all = true;
  NoCount count;
  if (!sums) {
    work_beside(p, source, warp - launch.shape.warps, summed);
  } else {
#if __CUDA_ARCH__ >= 900
    summed_all = sum_rows<T, kVectors, false>(start, ring, count);
#else
    summed_all = sum_rows_by_loads<T, kVectors, false>(source, work, count);
#endif
  }
  let_next_kernel_come();
  if (__syncthreads_and(summed_all) == 0) return false;
  finish(p.group, generation);
  return true;
}

template <class T, int kVectors>
__global__ void __launch_bounds__(most_warps(kVectors) * 32, 1)
    combine_kernel(const __grid_constant__ CombineLaunch launch) {
  std::byte* control = first_control(launch.p.group);
  // The sums before it let it come only when all kernels before them had ended; what those wrote
  // has only to be looked for anew.
  if (launch.p.after_sums) {
    fence_device();
  } else {
    await_kernel_before();
  }
  combine<T, kVectors>(launch, control);
  // Whoever comes next in the stream finds the sums ended, too.
  await_kernel_before();
}

using CombineKernel = void (*)(CombineLaunch);

template <class T>
CombineKernel kernel_for(int vectors) {
  switch (vectors) {
    case 1: return combine_kernel<T, 1>;
    case 2: return combine_kernel<T, 2>;
    case 4: return combine_kernel<T, 4>;
    case 7: return combine_kernel<T, 7>;
    case 8: return combine_kernel<T, 8>;
    default: return nullptr;
  }
}

CombineKernel kernel_for(Dtype dtype, int vectors) {
  switch (dtype) {
    case Dtype::f32: return kernel_for<float>(vectors);
    case Dtype::bf16: return kernel_for<Bf16>(vectors);
    case Dtype::f16: return kernel_for<Fp16>(vectors);
    default: return nullptr;
  }
}

bool is_aligned(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0;
}

}  // namespace

cudaError_t launch_combine(const CombineParameters& parameters, cudaStream_t stream,
                           const SumTuning& tuning) {
  CombineLaunch launch;
  launch.p = parameters;
  launch.row_bytes = parameters.columns * static_cast<std::int64_t>(size_of(parameters.dtype));
  for (const std::byte* bias : {parameters.bias0, parameters.bias1}) {
    if (bias != nullptr) launch.biases[launch.bias_count++] = bias;
    if (!is_aligned(bias)) return cudaErrorMisalignedAddress;
  }
  if (!is_aligned(parameters.out)) return cudaErrorMisalignedAddress;
  if (parameters.num_sms < 1 || parameters.group.ranks > kMaxDomain) return cudaErrorInvalidValue;
  launch.destination_count = destinations_of(parameters.plan.topk, parameters.group.ranks);
  launch.entry_count = launch.destination_count + launch.bias_count;
  launch.group_bits = CombineSource::group_bits_for(parameters.plan.tokens);
  const int beside = warps_beside(parameters);
  KernelLimits limits;
  cudaError_t error = kernel_limits(limits);
  if (error == cudaSuccess) {
    const SumTask task{launch.row_bytes, parameters.plan.tokens, parameters.num_sms, beside,
                       combine_pulls(parameters.num_sms)};
    error = make_sum_shape(tuning, task, launch.shape);
  }
  if (error != cudaSuccess) return error;
  const CombineKernel kernel = kernel_for(parameters.dtype, launch.shape.vectors);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  void* arguments[] = {&launch};
  return ferry::cuda::launch(reinterpret_cast<const void*>(kernel),
                             {static_cast<unsigned>(parameters.num_sms),
                              static_cast<unsigned>((launch.shape.warps + beside) * 32),
                              static_cast<std::size_t>(launch.shape.shared_bytes)},
                             arguments, stream, limits.bulk_copies);
}

cudaError_t launch_combine(const CombineParameters& parameters, cudaStream_t stream) {
  return launch_combine(parameters, stream, SumTuning{});
}

cudaError_t load_combine_kernels() {
  KernelLimits limits;
  if (const cudaError_t error = kernel_limits(limits); error != cudaSuccess) return error;
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
    for (const int vectors : kPieceVectors) {
      const auto* kernel = reinterpret_cast<const void*>(kernel_for(dtype, vectors));
      const cudaError_t error = load_kernel(kernel, limits.shared_bytes - kOwnShared);
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace ferry::cuda

// Combine: ranks say where their rows lie, owners pull and sum them, then tell that they have read.
#include "cuda/kernels/combine_sm80.cuh"
#include "cuda/kernels/combine_sm90.cuh"
#include "cuda/kernels/combine_source.cuh"
#include "cuda/kernels/entry.cuh"
#include "cuda/kernels/load.hpp"
#include "cuda/kernels/sum_shape.hpp"
#include "cuda/kernels/throughput.hpp"

namespace ferry::cuda {
namespace {

using namespace device;

/// Whole block 0: tells all ranks where this rank's rows are.
__device__ void post_head(const CombineParameters& p, std::uint64_t generation) {
  post_entry(p.group, generation, p.call, [&](DeviceHead& head) {
    const bool known = *plan_part<std::uint64_t>(p.plan, p.plan.layout.state) == 1;
    head.status = p.status;
    head.refused = known ? Reason::none : Reason::bad_plan;
    head.segment = p.segment;
    head.offset = p.offset;
    head.side_segment = p.side_segment;
    head.side_offset = p.side_offset;
    head.rows = p.rows;
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

template <class T, int kVectors>
__global__ void __launch_bounds__(most_warps(kVectors) * 32, 1)
    combine_kernel(const __grid_constant__ CombineLaunch launch) {
  __shared__ Bases bases;
  const CombineParameters& p = launch.p;
  std::uint64_t generation;
  if (!begin_call(p.group, generation)) return;
  if (blockIdx.x == 0) post_head(p, generation);
  // What the plan says is fetched, and the ring made, while the heads are on their way.
  const int lane_count = lanes_of(p.plan.topk, p.group.ranks);
  const CombineSource source{plan_part<DeviceLane>(p.plan, p.plan.layout.lanes),
                             lane_count,
                             lane_count + launch.bias_count,
                             p.group.ranks,
                             &bases,
                             launch.biases,
                             launch.row_bytes};
  const SumWork work = work_of_warp<kVectors>(launch);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const bool sums = warp < launch.shape.warps;  // the others sum weights
  PeerRows plan{};
  if (threadIdx.x < static_cast<unsigned>(p.group.ranks)) {
    plan = peer_rows_of(p.plan, static_cast<int>(threadIdx.x));
  }
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
  if (!await_entry(p.group, generation, Stage::descriptors, p.call, needed, verdict)) return;
  if (verdict.reason != Reason::none) {
    refuse_call(p.group, generation, verdict, Stage::descriptors, needed, p.failure);
    return;
  }
  if (!find_bases(launch, generation, plan, bases)) return;
  bool summed = true;
  if (!sums) {
    sum_weights(p, source, warp - launch.shape.warps);
  } else {
#if __CUDA_ARCH__ >= 900
    summed = sum_rows<T, kVectors, false>(start, ring);
#else
    sum_rows_by_loads<T, kVectors, false>(source, work);
#endif
  }
  if (__syncthreads_and(summed) == 0) return;
  finish(p.group, generation);
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
  const int beside = parameters.has_weights ? kWeightWarps : 0;
  if (const cudaError_t error = make_sum_shape(tuning, launch.row_bytes, beside, launch.shape);
      error != cudaSuccess) {
    return error;
  }
  const CombineKernel kernel = kernel_for(parameters.dtype, launch.shape.vectors);
  if (kernel == nullptr || parameters.sms < 1 || parameters.group.ranks > kMaxDomain) {
    return cudaErrorInvalidValue;
  }
  const int threads = (launch.shape.warps + beside) * 32;
  kernel<<<parameters.sms, threads, launch.shape.shared_bytes, stream>>>(launch);
  return cudaGetLastError();
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

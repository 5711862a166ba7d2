// The slots of each received row summed, on the rank that has them: what crosses the wire in a
// combine from expert-major rows.

// First: the order in which functions stand decides what the compiler inlines.
#include "cuda/kernels/throughput/combine_sm80.cuh"
#include "cuda/kernels/throughput/combine_sm90.cuh"

#include "cuda/kernels/base/entry.cuh"
#include "cuda/kernels/base/launch.hpp"
#include "cuda/kernels/base/load.hpp"
#include "cuda/kernels/throughput/kernels.hpp"
#include "cuda/kernels/throughput/plan_view.cuh"
#include "cuda/kernels/throughput/sum_shape.hpp"
#include "cuda/kernels/throughput/sum_slices.cuh"

namespace ferry::cuda {
namespace {

using namespace device;

struct SumSlotsLaunch {
  SumSlotsParameters p{};
  SumShape shape{};
  std::int64_t row_bytes = 0;
};

/// Entry j of a received row: its slot j, or the row itself. Rows come in the order of their
/// slices.
struct SlotSource {
  const SumSlotsParameters* p;
  const SumOrder* order;
  int ranges;
  std::int64_t row_bytes;

  struct Raw {
    std::int64_t row;
    float weight;
  };
  static constexpr bool kWaits = false;
  __device__ std::uint32_t row_of(std::uint32_t token) const {
    return order->row_at(token, ranges);
  }
  __device__ int entries() const { return p->slot_rows == nullptr ? 1 : p->plan.topk; }
  __device__ Raw load(std::uint32_t token, int j) const {
    if (p->slot_rows == nullptr) return {row_of(token), 0.0f};
    const std::int64_t at = static_cast<std::int64_t>(row_of(token)) * p->plan.topk + j;
    return {__ldg(p->slot_rows + at), p->weights == nullptr ? 0.0f : __ldg(p->weights + at)};
  }
  __device__ Entry resolve(const Raw& raw, std::uint32_t, int) const {
    if (raw.row < 0 || raw.row >= p->input_rows) return {nullptr, 0.0f};
    return {p->rows + raw.row * row_bytes, raw.weight};
  }
};

template <class T, int kVectors, bool kWeighted>
__global__ void __launch_bounds__(most_warps(kVectors) * 32, 1)
    sum_slots_kernel(const __grid_constant__ SumSlotsLaunch launch) {
  __shared__ SumOrder order;
  const SumSlotsParameters& p = launch.p;
  const PlanLayout& layout = p.plan.layout;
  await_kernel_before();
  const bool counted = holds(p.group, p.plan);
  std::uint64_t generation;
  const bool usable = begin_call(p.group, generation);
  // From here on the combine may come, and end its call: the generation has been read.
  let_next_kernel_come();
  if (!usable || __syncthreads_and(counted) == 0) return;
  const auto* recv_offset = reinterpret_cast<const std::int64_t*>(p.plan.data + layout.recv_offset);
  const int ranks = p.group.ranks;
  const int bits = slice_bits(static_cast<std::uint32_t>(recv_offset[ranks]), ranks);
  make_order(recv_offset, ranks, p.capacity, bits, order);
  SumWork work;
  work.out = p.out;
  work.row_bytes = launch.row_bytes;
  work.rows = order.begin[ranks << bits];
  work.pieces = launch.shape.pieces;
  work.piece_bytes = kVectors * 512;
  const auto warps = static_cast<std::uint32_t>(launch.shape.warps);
  work.first = first_item(launch.shape.spread, warps);
  work.stride = gridDim.x * warps;
  const SlotSource source{&p, &order, ranks << bits, launch.row_bytes};
  SliceCount done{p.group, generation, order, 1 << bits, work.stride};
#if __CUDA_ARCH__ >= 900
  const SumStart<SlotSource> start(source, work);
  sum_rows<T, kVectors, kWeighted>(
      start,
      ring_of_warp(p.group, generation, launch.shape.warps, launch.shape.stages, kVectors * 512),
      done);
#else
  sum_rows_by_loads<T, kVectors, kWeighted>(source, work, done);
#endif
}

using SumSlotsKernel = void (*)(SumSlotsLaunch);

template <class T, bool kWeighted>
SumSlotsKernel kernel_for(int vectors) {
  switch (vectors) {
    case 1: return sum_slots_kernel<T, 1, kWeighted>;
    case 2: return sum_slots_kernel<T, 2, kWeighted>;
    case 4: return sum_slots_kernel<T, 4, kWeighted>;
    case 7: return sum_slots_kernel<T, 7, kWeighted>;
    case 8: return sum_slots_kernel<T, 8, kWeighted>;
    default: return nullptr;
  }
}

template <class T>
SumSlotsKernel kernel_for(int vectors, bool weighted) {
  return weighted ? kernel_for<T, true>(vectors) : kernel_for<T, false>(vectors);
}

SumSlotsKernel kernel_for(Dtype dtype, int vectors, bool weighted) {
  switch (dtype) {
    case Dtype::f32: return kernel_for<float>(vectors, weighted);
    case Dtype::bf16: return kernel_for<Bf16>(vectors, weighted);
    case Dtype::f16: return kernel_for<Fp16>(vectors, weighted);
    default: return nullptr;
  }
}

}  // namespace

cudaError_t launch_sum_slots(const SumSlotsParameters& parameters, cudaStream_t stream,
                             const SumTuning& tuning) {
  SumSlotsLaunch launch;
  launch.p = parameters;
  launch.row_bytes = parameters.columns * static_cast<std::int64_t>(size_of(parameters.dtype));
  KernelLimits limits;
  cudaError_t error = kernel_limits(limits);
  if (error == cudaSuccess) {
    const SumTask task{launch.row_bytes, parameters.capacity, parameters.num_sms, 0, kMostPulls};
    error = make_sum_shape(tuning, task, launch.shape);
  }
  if (error != cudaSuccess) return error;
  const SumSlotsKernel kernel =
      kernel_for(parameters.dtype, launch.shape.vectors, parameters.weights != nullptr);
  if (kernel == nullptr || parameters.num_sms < 1 || parameters.group.ranks > kMaxDomain) {
    return cudaErrorInvalidValue;
  }
  void* arguments[] = {&launch};
  return ferry::cuda::launch(
      reinterpret_cast<const void*>(kernel),
      {static_cast<unsigned>(parameters.num_sms), static_cast<unsigned>(launch.shape.warps * 32),
       static_cast<std::size_t>(launch.shape.shared_bytes)},
      arguments, stream, limits.bulk_copies);
}

cudaError_t launch_sum_slots(const SumSlotsParameters& parameters, cudaStream_t stream) {
  return launch_sum_slots(parameters, stream, SumTuning{});
}

cudaError_t load_sum_slots_kernels() {
  KernelLimits limits;
  if (const cudaError_t error = kernel_limits(limits); error != cudaSuccess) return error;
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
    for (const int vectors : kPieceVectors) {
      for (const bool weighted : {false, true}) {
        const auto* kernel = reinterpret_cast<const void*>(kernel_for(dtype, vectors, weighted));
        const cudaError_t error = load_kernel(kernel, limits.shared_bytes - kOwnShared);
        if (error != cudaSuccess) return error;
      }
    }
  }
  return cudaSuccess;
}

}  // namespace ferry::cuda

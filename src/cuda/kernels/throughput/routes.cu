// A caller may want more rows of a plan's routes than the plan's first dispatch brought, or weights
// of slots as those of expert-major rows, and back: these kernels give them.
#include <algorithm>

#include "cuda/kernels/base/entry.cuh"
#include "cuda/kernels/base/load.hpp"
#include "cuda/kernels/throughput/kernels.hpp"
#include "cuda/kernels/throughput/plan_view.cuh"

namespace ferry::cuda {

namespace {

using namespace device;

constexpr int kThreads = 512;

/// An id as a peer wrote it, which nobody may have looked at before.
__device__ std::int64_t checked_id(const RoutesParameters& p, std::int64_t i) {
  const std::int32_t id = p.ids[i];
  if (id >= -1 && id < p.plan.placement.local_experts(p.group.rank)) return id;
  const auto* recv_offset =
      reinterpret_cast<const std::int64_t*>(p.plan.data + p.plan.layout.recv_offset);
  int source = 0;
  while (source + 1 < p.group.ranks && i / p.plan.topk >= recv_offset[source + 1]) ++source;
  fail(p.group, load_relaxed(&local_words(p.group)->generation), Reason::violation, Stage::rows,
       source, {0, 0, id});
  return -1;
}

/// Rows that have come, whatever became of the call before this kernel: they are the plan's.
__device__ std::int64_t known_rows(const RoutesParameters& p) {
  if (!holds(p.group, p.plan)) return 0;
  const auto* recv_offset =
      reinterpret_cast<const std::int64_t*>(p.plan.data + p.plan.layout.recv_offset);
  return min(recv_offset[p.group.ranks], min(p.brought, p.capacity));
}

__global__ void __launch_bounds__(kThreads)
    routes_kernel(const __grid_constant__ RoutesParameters p) {
  if (has_failed(p.group)) return;
  const std::int64_t rows = known_rows(p), topk = p.plan.topk;
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  const std::int64_t thread = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (std::int64_t i = thread; i < p.capacity * topk; i += stride) {
    p.topk_idx[i] = i < rows * topk ? checked_id(p, i) : -1;
  }
  for (std::int64_t row = thread; row < p.capacity; row += stride) {
    p.source_token[row] = row < rows ? p.tokens[row] : -1;
  }
}

/// What slot_rows holds of a dispatch that was refused is not known: no row is touched that there
/// is not.
template <bool kToRows>
__global__ void __launch_bounds__(kThreads)
    weights_kernel(const __grid_constant__ WeightsParameters p) {
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < p.slots;
       i += stride) {
    const std::int64_t row = p.slot_rows[i];
    const bool is_there = row >= 0 && row < p.rows;
    if constexpr (kToRows) {
      if (is_there) p.to[row] = p.from[i];
    } else {
      p.to[i] = is_there ? p.from[row] : 0.0f;
    }
  }
}

cudaError_t launch_weights(const void* kernel, const WeightsParameters& parameters,
                           cudaStream_t stream) {
  if (parameters.slots <= 0) return cudaSuccess;
  WeightsParameters copy = parameters;
  void* arguments[] = {&copy};
  const auto blocks = std::clamp<std::int64_t>((parameters.slots + kThreads - 1) / kThreads, 1,
                                               std::max(parameters.num_sms, 1));
  return cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), arguments, 0,
                          stream);
}

}  // namespace

cudaError_t launch_row_weights(const WeightsParameters& parameters, cudaStream_t stream) {
  if (parameters.rows <= 0) return cudaSuccess;
  const auto bytes = static_cast<std::size_t>(parameters.rows) * sizeof(float);
  const cudaError_t error = cudaMemsetAsync(parameters.to, 0, bytes, stream);
  if (error != cudaSuccess) return error;
  return launch_weights(reinterpret_cast<const void*>(&weights_kernel<true>), parameters, stream);
}

cudaError_t launch_slot_weights(const WeightsParameters& parameters, cudaStream_t stream) {
  return launch_weights(reinterpret_cast<const void*>(&weights_kernel<false>), parameters, stream);
}

cudaError_t launch_routes(const RoutesParameters& parameters, cudaStream_t stream) {
  RoutesParameters copy = parameters;
  void* arguments[] = {&copy};
  const int blocks = parameters.num_sms > 0 ? parameters.num_sms : 1;
  return cudaLaunchKernel(reinterpret_cast<const void*>(&routes_kernel),
                          dim3(static_cast<unsigned>(blocks)), dim3(kThreads), arguments, 0,
                          stream);
}

cudaError_t load_routes_kernels() {
  for (const void* kernel : {reinterpret_cast<const void*>(&routes_kernel),
                             reinterpret_cast<const void*>(&weights_kernel<true>),
                             reinterpret_cast<const void*>(&weights_kernel<false>)}) {
    if (const cudaError_t error = load_kernel(kernel, 0); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ferry::cuda

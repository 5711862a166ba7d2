// A caller may want more rows of a plan's routes than the plan's first dispatch brought: these
// kernels give them.
#include "cuda/kernels/base/entry.cuh"
#include "cuda/kernels/base/load.hpp"
#include "cuda/kernels/throughput/kernels.hpp"

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
  const auto state = *reinterpret_cast<const std::uint64_t*>(p.plan.data + p.plan.layout.state);
  if (state != 1) return 0;
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

}  // namespace

cudaError_t launch_routes(const RoutesParameters& parameters, cudaStream_t stream) {
  RoutesParameters copy = parameters;
  void* arguments[] = {&copy};
  const int blocks = parameters.num_sms > 0 ? parameters.num_sms : 1;
  return cudaLaunchKernel(reinterpret_cast<const void*>(&routes_kernel),
                          dim3(static_cast<unsigned>(blocks)), dim3(kThreads), arguments, 0,
                          stream);
}

cudaError_t load_routes_kernels() {
  return load_kernel(reinterpret_cast<const void*>(&routes_kernel), 0);
}

}  // namespace ferry::cuda

// What the caller gets of the routes that a dispatch brought: wide ids, and tails that say nothing.
#include "cuda/kernels/entry.cuh"
#include "cuda/kernels/load.hpp"
#include "cuda/kernels/throughput.hpp"

namespace ferry::cuda {

namespace {

using namespace device;

constexpr int kThreads = 512;

__device__ int source_of_row(const std::int64_t* recv_offset, int ranks, std::int64_t row) {
  int source = 0;
  while (source + 1 < ranks && recv_offset[source + 1] <= row) ++source;
  return source;
}

__global__ void __launch_bounds__(kThreads)
    routes_kernel(const __grid_constant__ RoutesParameters p) {
  if (has_failed(p.group)) return;
  const int ranks = p.group.ranks, topk = p.plan.topk;
  const auto* recv_offset =
      reinterpret_cast<const std::int64_t*>(p.plan.data + p.plan.layout.recv_offset);
  // After a dispatch that moved nothing the side region holds nothing.
  const bool moved = last_call_moved(p.group);
  const std::int64_t rows = moved ? recv_offset[ranks] : 0;
  const auto local = static_cast<std::int32_t>(p.plan.placement.local_experts(p.group.rank));
  const std::int64_t slots = rows * topk, all = p.capacity * topk;
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  const std::int64_t thread = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (thread == 0 && p.came != nullptr) *p.came = moved ? 1 : 0;
  for (std::int64_t i = thread; i < all; i += stride) {
    std::int32_t id = -1;
    if (i < slots) {
      id = p.side_ids[i];
      if (id < -1 || id >= local) {
        fail(p.group, load_relaxed(&local_words(p.group)->generation), Reason::distrust,
             Stage::rows, source_of_row(recv_offset, ranks, i / topk), {0, 0, id});
        id = -1;
      }
    } else if (p.weights != nullptr) {
      p.weights[i] = 0.0f;
    }
    p.topk_idx[i] = id;
  }
  for (std::int64_t row = rows + thread; row < p.capacity; row += stride) p.source_token[row] = -1;
}

}  // namespace

cudaError_t launch_routes(const RoutesParameters& parameters, cudaStream_t stream) {
  RoutesParameters copy = parameters;
  void* arguments[] = {&copy};
  const int blocks = parameters.sms > 0 ? parameters.sms : 1;
  return cudaLaunchKernel(reinterpret_cast<const void*>(&routes_kernel),
                          dim3(static_cast<unsigned>(blocks)), dim3(kThreads), arguments, 0,
                          stream);
}

cudaError_t load_routes_kernels() {
  return load_kernel(reinterpret_cast<const void*>(&routes_kernel), 0);
}

}  // namespace ferry::cuda

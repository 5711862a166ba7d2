// The making of a latency exchange: a swap of heads, by which every rank learns that all want the
// same, and where the others' memory is.
#include "cuda/kernels/base/entry.cuh"
#include "cuda/kernels/base/load.hpp"
#include "cuda/kernels/latency/kernels.hpp"

namespace ferry::cuda {

namespace {

using namespace device;

__global__ void __launch_bounds__(kOneBlockThreads)
    latency_open_kernel(const __grid_constant__ LatencyOpenParameters p) {
  await_kernel_before();
  std::byte* control = first_control(p.group);
  std::uint64_t generation;
  if (!begin_call(p.group, generation)) return;
  post_entry(p.group, control, generation, p.call, [&](DeviceHead& head) {
    head.status = p.status;
    head.segment = p.place.word;
    head.detail = p.need_bytes;
  });
  Verdict verdict;
  if (!await_entry(p.group, generation, Stage::latency_open, p.call, nullptr, verdict)) return;
  if (verdict.reason != Reason::none) {
    refuse_call(p.group, generation, verdict, Stage::latency_open, nullptr, p.failure);
    return;
  }
  for (int r = static_cast<int>(threadIdx.x); r < p.group.ranks; r += kOneBlockThreads) {
    if (is_hole(p.group, r)) continue;
    const std::uint64_t word = head_word(p.group, r, generation, kStatusWord);
    p.places[r].word = static_cast<std::uint32_t>(word >> 32);
  }
  __syncthreads();
  if (threadIdx.x == 0) end_call(p.group, generation);
}

}  // namespace

cudaError_t launch_latency_open(const LatencyOpenParameters& parameters, cudaStream_t stream) {
  LatencyOpenParameters copy = parameters;
  void* arguments[] = {&copy};
  return cudaLaunchKernel(reinterpret_cast<const void*>(&latency_open_kernel), dim3(1),
                          dim3(kOneBlockThreads), arguments, 0, stream);
}

cudaError_t load_latency_open_kernels() {
  return load_kernel(reinterpret_cast<const void*>(&latency_open_kernel), 0);
}

}  // namespace ferry::cuda

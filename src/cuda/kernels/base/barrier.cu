// The barrier of a group: an entry swap and nothing else.
#include "cuda/kernels/base/barrier.hpp"

#include "cuda/kernels/base/entry.cuh"
#include "cuda/kernels/base/load.hpp"

namespace ferry::cuda {

namespace {

using namespace device;

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads)
    barrier_kernel(const __grid_constant__ BarrierParameters p) {
  std::byte* control = first_control(p.group);
  std::uint64_t generation;
  if (!begin_call(p.group, generation)) return;
  post_entry(p.group, control, generation, p.call, [&](DeviceHead& head) {
    head.status = p.status;
    head.detail = p.need_bytes;
  });
  Verdict verdict;
  if (!await_entry(p.group, generation, p.stage, p.call, nullptr, verdict)) return;
  if (verdict.reason != Reason::none) {
    refuse_call(p.group, generation, verdict, p.stage, nullptr, p.failure);
  } else if (threadIdx.x == 0) {
    end_call(p.group, generation);
  }
}

}  // namespace

cudaError_t launch_barrier(const BarrierParameters& parameters, cudaStream_t stream) {
  BarrierParameters copy = parameters;
  void* arguments[] = {&copy};
  return cudaLaunchKernel(reinterpret_cast<const void*>(&barrier_kernel), dim3(1), dim3(kThreads),
                          arguments, 0, stream);
}

cudaError_t load_barrier_kernels() {
  return load_kernel(reinterpret_cast<const void*>(&barrier_kernel), 0);
}

}  // namespace ferry::cuda

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
    head.rows = p.one_waits ? 1 : 0;
  });
  Verdict verdict;
  bool waits = false;
  const auto hear = [&](int, std::uint64_t word) {
    waits = waits || (threadIdx.x % kHeadLanes == kRowsWord && word != 0);
  };
  if (!await_entry(p.group, generation, p.stage, p.call, nullptr, verdict, hear)) return;
  const bool any_waits = __syncthreads_or(waits) != 0;
  if (verdict.reason != Reason::none) {
    refuse_call(p.group, generation, verdict, p.stage, nullptr, p.failure);
  } else if (threadIdx.x == 0) {
    if (any_waits && p.any_waits != nullptr) store_relaxed(p.any_waits, 1);
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

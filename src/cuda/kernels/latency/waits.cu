// Latency mode: what a call has waited for each source, into the caller's tensor. A kernel of its
// own behind the call, for whom nobody waits: calls that are not asked pay nothing.
#include "cuda/kernels/base/load.hpp"
#include "cuda/kernels/latency/kernels.hpp"

namespace ferry::cuda {

namespace {

__global__ void latency_waits_kernel(LatencyWords* words, std::int64_t* out, int ranks) {
  for (int r = static_cast<int>(threadIdx.x); r < ranks; r += static_cast<int>(blockDim.x)) {
    out[r] += static_cast<std::int64_t>(words->wait_ns[r]);
    words->wait_ns[r] = 0;
  }
}

}  // namespace

cudaError_t launch_latency_waits(LatencyWords* words, std::int64_t* out, int ranks,
                                 cudaStream_t stream) {
  void* arguments[] = {&words, &out, &ranks};
  return cudaLaunchKernel(reinterpret_cast<const void*>(&latency_waits_kernel), dim3(1),
                          dim3(kWaitsThreads), arguments, 0, stream);
}

cudaError_t load_latency_waits_kernels() {
  return load_kernel(reinterpret_cast<const void*>(&latency_waits_kernel), 0);
}

}  // namespace ferry::cuda

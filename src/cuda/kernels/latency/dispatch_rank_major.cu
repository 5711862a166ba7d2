// Latency dispatch with rank-major results.
#include "cuda/kernels/latency/dispatch_call.cuh"

namespace ferry::cuda::device {

DispatchKernel rank_major_kernel(Dtype dtype, LatencyFormat format) {
  return dispatch_kernel<true, false>(dtype, format);
}

}  // namespace ferry::cuda::device

// Latency dispatch of LL128 rows, with rank-major results.
#include "cuda/kernels/latency/dispatch_call.cuh"

namespace ferry::cuda::device {

DispatchKernel ll128_rank_major_kernel(Dtype dtype, LatencyFormat format) {
  return dispatch_kernel<true, true>(dtype, format);
}

}  // namespace ferry::cuda::device

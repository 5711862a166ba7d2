// Latency dispatch of LL128 rows.
#include "cuda/kernels/latency/dispatch_call.cuh"

namespace ferry::cuda::device {

DispatchKernel ll128_kernel(Dtype dtype, LatencyFormat format) {
  return dispatch_kernel<false, true>(dtype, format);
}

}  // namespace ferry::cuda::device

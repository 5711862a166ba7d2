// Latency dispatch of rows in lines.
#include "cuda/kernels/latency/dispatch_call.cuh"

namespace ferry::cuda::device {

DispatchKernel lined_kernel(Dtype dtype, LatencyFormat format) {
  return dispatch_kernel<false, true>(dtype, format);
}

}  // namespace ferry::cuda::device

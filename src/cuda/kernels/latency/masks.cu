// Masks that the host sets and clears: a small kernel of one block, between the calls of an
// exchange.
#include "cuda/kernels/base/load.hpp"
#include "cuda/kernels/latency/kernels.hpp"
#include "cuda/kernels/latency/wait.cuh"

namespace ferry::cuda {

namespace {

using namespace device;

__global__ void __launch_bounds__(kOneBlockThreads)
    latency_mask_kernel(const __grid_constant__ LatencyView v, int rank, bool masked) {
  for (int r = static_cast<int>(threadIdx.x); r < v.group.ranks; r += kOneBlockThreads) {
    if ((rank >= 0 && r != rank) || r == v.group.rank || is_lost(v, r)) continue;
    if (!masked || v.words->masked[r] == 0) v.words->masked[r] = masked ? kMaskedByHost : 0;
    tell_gone(v, r, masked ? Gone::without_us : Gone::no);
    store_relaxed(&v.alarm->ranks[r], masked ? 1 : 0);
  }
  if (masked || load_relaxed(&v.alarm->behind) == 0) return;
  // Evicted no more, if nobody goes on without this rank now.
  bool behind = false;
  for (int r = static_cast<int>(threadIdx.x); r < v.group.ranks; r += kOneBlockThreads) {
    behind |= !is_lost(v, r) && find_gone(v, r) == Gone::without_us;
  }
  if (__syncthreads_or(behind) == 0 && threadIdx.x == 0) store_relaxed(&v.alarm->behind, 0);
}

}  // namespace

cudaError_t launch_latency_mask(const LatencyView& view, int rank, bool masked,
                                cudaStream_t stream) {
  if (view.words == nullptr || view.alarm == nullptr) return cudaErrorInvalidValue;
  LatencyView copy = view;
  void* arguments[] = {&copy, &rank, &masked};
  return cudaLaunchKernel(reinterpret_cast<const void*>(&latency_mask_kernel), dim3(1),
                          dim3(kOneBlockThreads), arguments, 0, stream);
}

cudaError_t load_latency_mask_kernels() {
  return load_kernel(reinterpret_cast<const void*>(&latency_mask_kernel), 0);
}

}  // namespace ferry::cuda

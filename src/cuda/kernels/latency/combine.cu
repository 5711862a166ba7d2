// Latency combine: results to the owners of their tokens, who sum them. One kernel; with a hook,
// two.
#include <algorithm>

#include "cuda/kernels/base/launch.hpp"
#include "cuda/kernels/base/load.hpp"
#include "cuda/kernels/latency/combine_call.cuh"
#include "cuda/kernels/latency/combiner.cuh"

namespace ferry::cuda {

namespace {

using namespace device;

template <class T, bool kPerSlot, bool kTimed, bool kLL>
__global__ void __launch_bounds__(kLatencyThreads, kTimed ? 1 : kLatencyBlocksPerSm)
    latency_combine_kernel(const __grid_constant__ LatencyCombineParameters p,
                           const __grid_constant__ RankFinder ranks) {
  __shared__ LatencyCall call;
  run_combine<Combiner<T, kPerSlot, kTimed, kLL>, kPerSlot, kTimed, kTimed>(p, ranks, call);
}

using Kernel = CombineKernel;

template <class T, bool kTimed>
Kernel kernel_of(bool slots, bool ll) {
  if (slots) return latency_combine_kernel<T, true, kTimed, false>;
  if constexpr (sizeof(T) == 2) {
    if (ll) return latency_combine_kernel<T, false, kTimed, true>;
  }
  return latency_combine_kernel<T, false, kTimed, false>;
}
template <class T>
Kernel kernel_of(bool slots, bool ll, bool timed) {
  return timed ? kernel_of<T, true>(slots, ll) : kernel_of<T, false>(slots, ll);
}

Kernel plain_kernel(Dtype dtype, CombinePath path, bool ll, bool timed) {
  const bool slots = path == CombinePath::per_slot;
  switch (dtype) {
    case Dtype::f32: return kernel_of<float>(slots, ll, timed);
    case Dtype::f16: return kernel_of<Fp16>(slots, ll, timed);
    case Dtype::bf16: return kernel_of<Bf16>(slots, ll, timed);
    default: return nullptr;
  }
}

}  // namespace

cudaError_t launch_latency_combine(const LatencyCombineParameters& parameters,
                                   cudaStream_t stream) {
  KernelLimits limits;
  const cudaError_t error = kernel_limits(limits);
  if (error != cudaSuccess) return error;
  const LatencyView& view = parameters.view;
  const bool encoded = parameters.format != CombineFormat::as_is;
  const bool timed = parameters.wait_ns != nullptr;
  const bool ll = is_ll_of(view, parameters.tokens, size_of(view.dtype));
  const Kernel kernel = encoded ? encoded_kernel(view.dtype, parameters.path, parameters.format)
                                : plain_kernel(view.dtype, parameters.path, ll, timed);
  // The place of a slot's row belongs to whoever holds the slot's expert: a rank that is masked and
  // writes late could spoil what another writes there in a later call.
  const bool spoils = parameters.path == CombinePath::per_slot && parameters.view.alarm != nullptr;
  if (kernel == nullptr || spoils || !fits_latency(parameters.view) || parameters.blocks < 1) {
    return cudaErrorInvalidValue;
  }
  LatencyCombineParameters copy = parameters;
  // Who holds an SM almost alone comes when the kernel before has ended, so that ranks that
  // share a GPU have room for each other.
  const bool alone = encoded ? is_alone(view.dtype, parameters.format) : timed;
  if (alone) copy.blocks = std::min(copy.blocks, limits.num_sms);
  RankFinder ranks(view.placement);
  void* arguments[] = {&copy, &ranks};
  return launch(reinterpret_cast<const void*>(kernel),
                {static_cast<unsigned>(copy.blocks), kLatencyThreads, 0}, arguments, stream,
                limits.bulk_copies && !alone);
}

cudaError_t load_latency_kernels() {
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    for (unsigned choice = 0; choice < 8; ++choice) {
      const auto path = choice / 4 == 0 ? CombinePath::per_slot : CombinePath::per_rank;
      const Kernel kernel = plain_kernel(dtype, path, choice / 2 % 2 == 0, choice % 2 == 0);
      const cudaError_t error = load_kernel(reinterpret_cast<const void*>(kernel), 0);
      if (error != cudaSuccess) return error;
    }
    for (unsigned choice = 0; choice < 4; ++choice) {
      const auto path = choice / 2 == 0 ? CombinePath::per_slot : CombinePath::per_rank;
      const auto format = choice % 2 == 0 ? CombineFormat::e4m3 : CombineFormat::logfmt10;
      const Kernel kernel = encoded_kernel(dtype, path, format);
      const cudaError_t error = load_kernel(reinterpret_cast<const void*>(kernel), 0);
      if (error != cudaSuccess) return error;
    }
  }
  for (const auto load :
       {load_latency_open_kernels, load_latency_mask_kernels, load_latency_rejoin_kernels,
        load_latency_waits_kernels, load_latency_dispatch_kernels}) {
    const cudaError_t error = load();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ferry::cuda

// Latency combine in formats that are not as_is.
#include "cuda/kernels/latency/combine_call.cuh"
#include "cuda/kernels/latency/combine_format_sums.cuh"

namespace ferry::cuda::device {

namespace {

template <class T, class Codes, bool kPerSlot>
__global__ void __launch_bounds__(kLatencyThreads,
                                  is_alone(kDtypeOf<T>, Codes::kFormat) ? 1 : kLatencyBlocksPerSm)
    latency_combine_encoded_kernel(const __grid_constant__ LatencyCombineParameters p,
                                   const __grid_constant__ RankFinder ranks) {
  __shared__ LatencyCall call;
  constexpr bool kAlone = is_alone(kDtypeOf<T>, Codes::kFormat);
  run_combine<EncodedCombiner<T, Codes, kPerSlot>, kPerSlot, true, kAlone>(p, ranks, call);
}

template <class T, class Codes>
CombineKernel kernel_of(bool slots) {
  return slots ? latency_combine_encoded_kernel<T, Codes, true>
               : latency_combine_encoded_kernel<T, Codes, false>;
}
template <class T>
CombineKernel kernel_of(bool slots, CombineFormat format) {
  return format == CombineFormat::e4m3 ? kernel_of<T, E4m3Codes>(slots)
                                       : kernel_of<T, LogfmtCodes>(slots);
}

}  // namespace

CombineKernel encoded_kernel(Dtype dtype, CombinePath path, CombineFormat format) {
  const bool slots = path == CombinePath::per_slot;
  if (format != CombineFormat::e4m3 && format != CombineFormat::logfmt10) return nullptr;
  switch (dtype) {
    case Dtype::f32: return kernel_of<float>(slots, format);
    case Dtype::f16: return kernel_of<Fp16>(slots, format);
    case Dtype::bf16: return kernel_of<Bf16>(slots, format);
    default: return nullptr;
  }
}

}  // namespace ferry::cuda::device

// Elements that cross between domains, to f32 and back.
#include "cuda/kernels/base/launch.hpp"
#include "cuda/kernels/base/load.hpp"
#include "cuda/kernels/collectives/call.cuh"
#include "cuda/kernels/collectives/collective.hpp"

namespace ferry::cuda {
namespace {

using namespace device;

constexpr int kThreads = 256;
constexpr int kWide = 2;  // vectors of f32 for one of narrow elements

struct ConvertParameters {
  const std::byte* from;
  std::byte* to;
  std::int64_t count;
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    widen_kernel(const __grid_constant__ ConvertParameters p) {
  const std::int64_t bytes = p.count * static_cast<std::int64_t>(sizeof(T));
  const Walk at = grid_walk();
  for (std::int64_t v = at.first; v < vectors_of(bytes); v += at.step) {
    float elements[Reducing<T>::kCount];
    Reducing<T>::unpack(load_at(p.from, bytes, v), elements);
#pragma unroll
    for (int half = 0; half < kWide; ++half) {
      store_at(p.to, kWide * bytes, kWide * v + half, round_vector<float>(elements + 4 * half));
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    narrow_kernel(const __grid_constant__ ConvertParameters p) {
  const std::int64_t bytes = p.count * static_cast<std::int64_t>(sizeof(T));
  const Walk at = grid_walk();
  for (std::int64_t v = at.first; v < vectors_of(bytes); v += at.step) {
    float elements[Reducing<T>::kCount];
#pragma unroll
    for (int half = 0; half < kWide; ++half) {
      const uint4 vector = load_at(p.from, kWide * bytes, kWide * v + half);
      Reducing<float>::unpack(vector, elements + 4 * half);
    }
    store_at(p.to, bytes, v, round_vector<T>(elements));
  }
}

using Kernel = void (*)(ConvertParameters);
Kernel kernel_for(Dtype from, Dtype to) {
  if (from == Dtype::bf16 && to == Dtype::f32) return widen_kernel<Bf16>;
  if (from == Dtype::f16 && to == Dtype::f32) return widen_kernel<Fp16>;
  if (from == Dtype::f32 && to == Dtype::bf16) return narrow_kernel<Bf16>;
  if (from == Dtype::f32 && to == Dtype::f16) return narrow_kernel<Fp16>;
  return nullptr;
}

}  // namespace

cudaError_t launch_convert(const Conversion& conversion, int most_blocks, cudaStream_t stream) {
  const Kernel kernel = kernel_for(conversion.from_dtype, conversion.to_dtype);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  const std::int64_t vectors = (conversion.count + 7) / 8;
  const auto blocks = std::min<std::int64_t>(most_blocks, (vectors + kThreads - 1) / kThreads);
  if (blocks == 0) return cudaSuccess;
  ConvertParameters parameters{conversion.from, conversion.to, conversion.count};
  void* arguments[] = {&parameters};
  return launch(reinterpret_cast<const void*>(kernel), {static_cast<unsigned>(blocks), kThreads, 0},
                arguments, stream, false);
}

cudaError_t load_convert_kernels() {
  for (const Dtype narrow : {Dtype::bf16, Dtype::f16}) {
    for (const Kernel kernel : {kernel_for(narrow, Dtype::f32), kernel_for(Dtype::f32, narrow)}) {
      const cudaError_t error = load_kernel(reinterpret_cast<const void*>(kernel), 0);
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace ferry::cuda

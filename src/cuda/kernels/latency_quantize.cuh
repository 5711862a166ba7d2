// Quantisation of a row by a warp: 16 channels a lane, 8 lanes for each scale. The same bits as
// core/number/quantize.hpp.
#pragma once
#include "core/number/quantize.hpp"
#include "cuda/kernels/accumulate.cuh"

namespace ferry::cuda::device {

inline constexpr int kLaneChannels = 16;
inline constexpr int kStepChannels = 32 * kLaneChannels;

/// The values of 16 channels, unpacked.
template <class T>
__device__ __forceinline__ void unpack(const uint4* vectors, float* values) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T)); ++i) {
    const std::uint32_t words[4] = {vectors[i].x, vectors[i].y, vectors[i].z, vectors[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (sizeof(T) == 4) {
        values[4 * i + j] = __uint_as_float(words[j]);
      } else {
        values[8 * i + 2 * j] = Pair<T>::low(words[j]);
        values[8 * i + 2 * j + 1] = Pair<T>::high(words[j]);
      }
    }
  }
}

/// A code by integer arithmetic. Apart, for sixteen of it side by side do not fit into the
/// registers.
__device__ __noinline__ inline std::uint32_t code_of(float value) {
  return from_float<E4m3>(value).bits;
}

/// Two codes, the first in the lower byte.
__device__ __forceinline__ std::uint32_t two_codes(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  std::uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
  return codes;
#else
  return code_of(first) | code_of(second) << 8;
#endif
}

/// Whole warp: the codes of the lane's 16 channels; `scale` of its 8 lanes' block. Channels past
/// the end of the row are given as zeros.
template <class T>
__device__ __forceinline__ uint4 quantize_lane(const uint4* vectors, bool round_scale,
                                               float& scale) {
  float values[kLaneChannels];
  unpack<T>(vectors, values);
  auto largest = static_cast<std::int32_t>(number_detail::bits_of(kMinAmax));
#pragma unroll
  for (const float value : values) largest = max(largest, amax_bits(value));
#pragma unroll
  for (int distance = 4; distance > 0; distance /= 2) {
    largest = max(largest, __shfl_xor_sync(0xffffffff, largest, distance));
  }
  const BlockScale block = block_scale<E4m3>(__int_as_float(largest), round_scale);
  scale = block.scale;
  std::uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* v = values + 4 * i;
    words[i] = two_codes(__fmul_rn(v[0], block.inv), __fmul_rn(v[1], block.inv)) |
               two_codes(__fmul_rn(v[2], block.inv), __fmul_rn(v[3], block.inv)) << 16;
  }
  return {words[0], words[1], words[2], words[3]};
}

}  // namespace ferry::cuda::device

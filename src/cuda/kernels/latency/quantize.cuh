// Quantisation of a row by a warp: 16 channels a lane, 8 lanes for each scale. The same bits as
// core/number/quantize.hpp.
#pragma once
#include "cuda/kernels/base/quantize.cuh"

namespace ferry::cuda::device {

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
    words[i] = e4m3_pair(__fmul_rn(v[0], block.inv), __fmul_rn(v[1], block.inv)) |
               e4m3_pair(__fmul_rn(v[2], block.inv), __fmul_rn(v[3], block.inv)) << 16;
  }
  return {words[0], words[1], words[2], words[3]};
}

}  // namespace ferry::cuda::device

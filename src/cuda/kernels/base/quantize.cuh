// Quantising in the registers of a warp: channels of f32, bf16 or f16 become e4m3 codes and a scale
// for each block of them. The same bits as quantize_block of core/number/quantize.hpp.
#pragma once
#include <cstdint>

#include "core/number/quantize.hpp"
#include "cuda/kernels/base/accumulate.cuh"

namespace ferry::cuda::device {

inline constexpr int kBlockChannels = static_cast<int>(kScaleBlock);
/// Lanes that share a block: each holds 16 channels of it.
inline constexpr int kBlockLanes = 8;
inline constexpr int kLaneChannels = kBlockChannels / kBlockLanes;
/// Channels that a warp holds at a time: four blocks.
inline constexpr int kStepChannels = 32 * kLaneChannels;

/// The largest magnitudes of elements of T, packed in pairs; their signs mean nothing. NaN is left
/// out. 0: none yet.
template <class T>
struct Peak {
  __device__ __forceinline__ static std::uint32_t add(std::uint32_t peak, std::uint32_t word) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
    if constexpr (kDtypeOf<T> == Dtype::bf16) {
      asm("max.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(peak) : "r"(word));
    } else {
      asm("max.xorsign.abs.f16x2 %0, %0, %1;" : "+r"(peak) : "r"(word));
    }
#else
    const std::uint32_t magnitudes = word & 0x7fff7fffu;
    if constexpr (kDtypeOf<T> == Dtype::bf16) {
      asm("max.bf16x2 %0, %0, %1;" : "+r"(peak) : "r"(magnitudes));
    } else {
      asm("max.f16x2 %0, %0, %1;" : "+r"(peak) : "r"(magnitudes));
    }
#endif
    return peak;
  }
  __device__ __forceinline__ static float value(std::uint32_t peak) {
    return fmaxf(fabsf(Pair<T>::low(peak)), fabsf(Pair<T>::high(peak)));
  }
};
template <>
struct Peak<float> {
  __device__ __forceinline__ static std::uint32_t add(std::uint32_t peak, std::uint32_t word) {
    return __float_as_uint(fmaxf(__uint_as_float(peak), fabsf(__uint_as_float(word))));
  }
  __device__ __forceinline__ static float value(std::uint32_t peak) {
    return __uint_as_float(peak);
  }
};

/// A code by integer arithmetic. Apart, for many of it side by side do not fit into the registers.
__device__ __noinline__ inline std::uint32_t code_of(float value) {
  return from_float<E4m3>(value).bits;
}

/// Two codes, the lower first.
__device__ __forceinline__ std::uint32_t e4m3_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  std::uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return code_of(low) | code_of(high) << 8;
#endif
}

/// One lane's channels of a block: vector v holds the block's vector lane + kBlockLanes * v.
template <class T>
struct LanePart {
  static constexpr int kVectors = kLaneChannels / kPerVector<T>;
  static constexpr int kCodeWords = kPerVector<T> / 4;  ///< of one vector
  uint4 vectors[kVectors];
  std::uint32_t codes[kVectors][kCodeWords];
  float scale;

  /// First channel of vector v, of those that the warp holds.
  __device__ __forceinline__ static int channel(int v) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    return lane / kBlockLanes * kBlockChannels +
           (lane % kBlockLanes + kBlockLanes * v) * kPerVector<T>;
  }

  /// Whole warp.
  __device__ __forceinline__ void quantize(bool round_scale) {
    std::uint32_t most = peak();
#pragma unroll
    for (int apart = 1; apart < kBlockLanes; apart *= 2) {
      most = Peak<T>::add(most, __shfl_xor_sync(~0u, most, apart));
    }
    const BlockScale block = scale_of(Peak<T>::value(most), round_scale);
    scale = block.scale;
    encode(block.inv);
  }

  /// Of this lane's channels.
  __device__ __forceinline__ std::uint32_t peak() const {
    std::uint32_t most = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      most = Peak<T>::add(most, vectors[v].x);
      most = Peak<T>::add(most, vectors[v].y);
      most = Peak<T>::add(most, vectors[v].z);
      most = Peak<T>::add(most, vectors[v].w);
    }
    return most;
  }

  /// `peak`: of the whole block.
  __device__ __forceinline__ static BlockScale scale_of(float peak, bool round_scale) {
    constexpr float kLargestFloat = 0x1.fffffep127f;  // infinity counts as this
    return block_scale<E4m3>(fmaxf(fminf(peak, kLargestFloat), kMinAmax), round_scale);
  }

  /// `inv`: of the block's scale.
  __device__ __forceinline__ void encode(float inv) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const std::uint32_t words[4] = {vectors[v].x, vectors[v].y, vectors[v].z, vectors[v].w};
#pragma unroll
      for (int w = 0; w < kCodeWords; ++w) {
        if constexpr (sizeof(T) == 4) {
          codes[v][w] = four(inv, __uint_as_float(words[0]), __uint_as_float(words[1]),
                             __uint_as_float(words[2]), __uint_as_float(words[3]));
        } else {
          codes[v][w] = four(inv, Pair<T>::low(words[2 * w]), Pair<T>::high(words[2 * w]),
                             Pair<T>::low(words[2 * w + 1]), Pair<T>::high(words[2 * w + 1]));
        }
      }
    }
  }

  __device__ __forceinline__ void store(std::byte* to, int v) const {
    if constexpr (kCodeWords == 1) {
      *reinterpret_cast<std::uint32_t*>(to) = codes[v][0];
    } else {
      *reinterpret_cast<uint2*>(to) = {codes[v][0], codes[v][1]};
    }
  }

 private:
  __device__ __forceinline__ static std::uint32_t four(float inv, float a, float b, float c,
                                                       float d) {
    return e4m3_pair(__fmul_rn(a, inv), __fmul_rn(b, inv)) |
           e4m3_pair(__fmul_rn(c, inv), __fmul_rn(d, inv)) << 16;
  }
};

}  // namespace ferry::cuda::device

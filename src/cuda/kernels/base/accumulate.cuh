// 16-byte vectors of f32, bf16 or f16: unpacked and added in fp32, rounded once. The same bits as
// the host engine's loops over to_float and from_float (core/number/formats.hpp).
#pragma once
#include <cstdint>

#include "core/number/formats.hpp"

namespace ferry::cuda::device {

/// Elements of T in one 16-byte vector.
template <class T>
inline constexpr int kPerVector = 16 / static_cast<int>(sizeof(T));

/// `__fadd_rn` and `__fmaf_rn` are never contracted nor split, whatever the flags of the compiler.
template <bool kWeighted>
__device__ __forceinline__ float accumulate(float acc, float x, float weight) {
  if constexpr (kWeighted) {
    return __fmaf_rn(weight, x, acc);
  } else {
    return __fadd_rn(acc, x);
  }
}

/// The two elements of a 32-bit word, the lower first, as floats. Exact.
template <class T>
struct Pair;

template <>
struct Pair<Bf16> {
  __device__ __forceinline__ static float low(std::uint32_t word) {
    return __uint_as_float(word << 16);
  }
  __device__ __forceinline__ static float high(std::uint32_t word) {
    return __uint_as_float(word & 0xffff0000u);
  }
  __device__ __forceinline__ static std::uint32_t round(float low, float high) {
    std::uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
  }
};

template <>
struct Pair<Fp16> {
  __device__ __forceinline__ static float low(std::uint32_t word) {
    float x;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(x) : "r"(word));
    return x;
  }
  __device__ __forceinline__ static float high(std::uint32_t word) {
    float x;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(x) : "r"(word));
    return x;
  }
  __device__ __forceinline__ static std::uint32_t round(float low, float high) {
    std::uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
  }
};

/// acc[i] = acc[i] + x[i], or fma(weight, x[i], acc[i]), for the elements of one vector.
template <class T, bool kWeighted>
__device__ __forceinline__ void add_vector(float* acc, const uint4& vector, float weight) {
  const std::uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      acc[i] = accumulate<kWeighted>(acc[i], __uint_as_float(words[i]), weight);
    } else {
      acc[2 * i] = accumulate<kWeighted>(acc[2 * i], Pair<T>::low(words[i]), weight);
      acc[2 * i + 1] = accumulate<kWeighted>(acc[2 * i + 1], Pair<T>::high(words[i]), weight);
    }
  }
}

/// The one rounding, to nearest even; every NaN of a narrow type becomes the positive quiet one.
template <class T>
__device__ __forceinline__ uint4 round_vector(const float* acc) {
  std::uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      words[i] = __float_as_uint(acc[i]);
    } else {
      words[i] = Pair<T>::round(acc[2 * i], acc[2 * i + 1]);
    }
  }
  return {words[0], words[1], words[2], words[3]};
}

}  // namespace ferry::cuda::device

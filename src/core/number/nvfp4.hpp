// NVFP4: e2m1 values, two a byte, with one e4m3 scale for each 16 channels and one scale g for a
// whole tensor. The first value of a byte is in its low bits.
//
//   type   bits s/e/m  magnitudes                   beyond the largest
//   E2m1   1/2/1       0, 0.5, 1, 1.5, 2, 3, 4, 6   +-6, infinity too; there is no NaN
//
// For each block of 16 channels:
//
//   amax  = largest |x|                     infinity counts as the largest float
//   scale = from_float<E4m3>(g * (amax / 6))
//   inv   = g / scale                       0 where scale is 0
//   q     = from_float<E2m1>(x * inv)       round to nearest even, saturating
//   value = to_float(q) * scale / g
//
// g = 448 * 6 / (largest |x| of the tensor) uses the whole range of the scales; a larger g
// saturates blocks of large values. A NaN makes the scale of its block NaN, and with it the whole
// block, as no code of its own could say it.
//
// With g from 2^-100 to 2^100 inv is normal, and whatever would be a subnormal float on the way is
// far below half of the smallest code: the same bits with and without flushing.
//
// Sources: OCP Microscaling Formats (MX) Specification 1.0, E2M1; PTX ISA, cvt.rn.satfinite.e2m1x2.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/device.hpp"
#include "core/number/formats.hpp"
#include "core/number/quantize.hpp"

namespace ferry {

/// In the lower four bits.
struct E2m1 {
  std::uint8_t bits;
  friend constexpr bool operator==(E2m1, E2m1) = default;
};

namespace number_detail {

template <>
struct Format<E2m1> {
  static constexpr std::int32_t kWidth = 4, kMantissa = 1, kBias = 1;
  static constexpr std::int32_t kCeiling = 0x40c00000;  // 6
  static constexpr std::int32_t kNan = 0x7;             // what PTX gives
  static constexpr std::int32_t kFirstNonFinite = 0x8;  // none
};

}  // namespace number_detail

FERRY_INLINE_FN constexpr float to_float(E2m1 x) {
  return number_detail::widen(x);
}

/// Channels that share one scale.
inline constexpr std::size_t kNvfp4Block = 16;
/// The least and the most that g may be.
inline constexpr float kLeastGlobalScale = 0x1p-100f, kMostGlobalScale = 0x1p100f;

/// The scale of a block of kNvfp4Block values (T: float, Bf16, Fp16).
template <class T>
FERRY_INLINE_FN constexpr E4m3 nvfp4_scale(const T* values, float g) {
  std::int32_t largest = 0;
  for (std::size_t i = 0; i < kNvfp4Block; ++i) {
    const std::int32_t bits = number_detail::magnitude_bits(to_float(values[i]));
    largest = bits > largest ? bits : largest;
  }
  if (largest > number_detail::kInfinityBits) return E4m3{number_detail::Format<E4m3>::kNan};
  const std::int32_t finite = largest < 0x7f7fffff ? largest : 0x7f7fffff;
  return from_float<E4m3>(g * (number_detail::float_of(static_cast<std::uint32_t>(finite)) / 6.0f));
}

/// Quantises a row of `hidden` values, a multiple of kNvfp4Block: writes hidden / 2 bytes of codes
/// and hidden / 16 scales. Nothing overlaps.
template <class T>
FERRY_INLINE_FN constexpr void quantize_nvfp4(const T* FERRY_RESTRICT values, std::size_t hidden,
                                              float g, std::uint8_t* FERRY_RESTRICT codes,
                                              E4m3* FERRY_RESTRICT scales) {
  for (std::size_t at = 0; at < hidden; at += kNvfp4Block) {
    const E4m3 scale = nvfp4_scale(values + at, g);
    scales[at / kNvfp4Block] = scale;
    const float inv = scale.bits == 0 ? 0.0f : g / to_float(scale);
    std::uint8_t block[kNvfp4Block] = {};
    for (std::size_t i = 0; i < kNvfp4Block; ++i) {
      block[i] = number_detail::narrow<E2m1>(to_float(values[at + i]) * inv).bits;
    }
    for (std::size_t i = 0; i < kNvfp4Block; i += 2) {
      codes[(at + i) / 2] = static_cast<std::uint8_t>(block[i] | block[i + 1] << 4);
    }
  }
}

}  // namespace ferry

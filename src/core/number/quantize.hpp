// Block quantisation: rows of fp8 with one fp32 scale for each 128 channels.
//
// For each block of a row (the last may be short: ceil(hidden / 128) scales):
//
//   amax  = max(1e-4, largest |x|)          NaN is left out; infinity counts as the largest float
//   inv   = L / amax                        L: the format's largest finite value, 448 or 57344
//   scale = amax / L                        both by IEEE division
//   q     = from_float<Q>(x * inv)          round to nearest even, saturating
//   value = to_float(q) * scale
//
// With `round_scale`: scale = 2^ceil(log2(amax / L)), exact, and inv = 1 / scale, exact. Such a
// scale fits UE8M0 (number/ue8m0.hpp).
//
// Special values: NaN gives NaN and leaves its neighbours alone. Infinity gives +-L, and as amax is
// then the largest float, its finite neighbours become zero unless they are huge too; it comes
// back as the largest float exactly. With `round_scale`, infinity and whatever rounds to 2^128 come
// back as infinity. A block of zeros gives zeros with scale = 1e-4 / L.
//
// The same bits with and without flushing of subnormals: inv and scale are always normal, and a
// product x * inv that would be subnormal is far below half of the smallest code.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/device.hpp"
#include "core/number/formats.hpp"

namespace ferry {

/// Channels that share one scale.
inline constexpr std::size_t kScaleBlock = 128;
/// The smallest amax: keeps the scale of an empty or tiny block away from zero.
inline constexpr float kMinAmax = 1e-4f;
/// The largest finite value of a quantised format (E4m3, E5m2).
template <class Q>
inline constexpr float kLargest = 0.0f;
template <>
inline constexpr float kLargest<E4m3> = 448.0f;
template <>
inline constexpr float kLargest<E5m2> = 57344.0f;

/// Scales that belong to one row of `hidden` channels.
FERRY_INLINE_FN constexpr std::size_t scale_count(std::size_t hidden) {
  return (hidden + kScaleBlock - 1) / kScaleBlock;
}

/// What one value adds to its block's amax, as the bits of a non-negative float: |x|, the largest
/// float for infinity, 0 for NaN. The maximum of these integers is the amax (before kMinAmax), in
/// whatever order a vector unit or a warp takes it.
FERRY_INLINE_FN constexpr std::int32_t amax_bits(float x) {
  const std::int32_t magnitude = number_detail::magnitude_bits(x);
  const std::int32_t finite = magnitude < 0x7f7fffff ? magnitude : 0x7f7fffff;
  return magnitude > number_detail::kInfinityBits ? 0 : finite;
}

/// amax of `count` values (T: float, Bf16, Fp16), at least kMinAmax, always finite.
template <class T>
FERRY_INLINE_FN constexpr float block_amax(const T* values, std::size_t count) {
  auto largest = static_cast<std::int32_t>(number_detail::bits_of(kMinAmax));
  for (std::size_t i = 0; i < count; ++i) {
    const std::int32_t bits = amax_bits(to_float(values[i]));
    largest = bits > largest ? bits : largest;
  }
  return number_detail::float_of(static_cast<std::uint32_t>(largest));
}

/// A block's scale, with which codes are multiplied, and `inv`, with which values are.
struct BlockScale {
  float scale;
  float inv;
};

/// The scale for an amax that block_amax returned (finite, >= kMinAmax), towards format Q.
template <class Q>
FERRY_INLINE_FN constexpr BlockScale block_scale(float amax, bool round_scale) {
  if (!round_scale) return {amax / kLargest<Q>, kLargest<Q> / amax};
  // L = 1.75 * 2^n: the exponent of amax, one more if its mantissa exceeds 1.75, less n.
  constexpr std::uint32_t kLargestBits = number_detail::bits_of(kLargest<Q>);
  static_assert((kLargestBits & 0x7fffffu) == 0x600000u);
  constexpr std::uint32_t kPower = (kLargestBits >> 23) - 127;
  const std::uint32_t exponent = ((number_detail::bits_of(amax) + 0x1fffffu) >> 23) - kPower;
  return {number_detail::float_of(exponent << 23), number_detail::float_of((254 - exponent) << 23)};
}

/// Quantises one block of `count` (at most kScaleBlock) values; writes `count` codes and returns
/// the scale. T: float, Bf16, Fp16; Q: E4m3, E5m2. `codes` overlaps nothing.
template <class Q, class T>
FERRY_INLINE_FN constexpr float quantize_block(const T* FERRY_RESTRICT values, std::size_t count,
                                               Q* FERRY_RESTRICT codes, bool round_scale = false) {
  const BlockScale block = block_scale<Q>(block_amax(values, count), round_scale);
  for (std::size_t i = 0; i < count; ++i) {
    codes[i] = from_float<Q>(to_float(values[i]) * block.inv);
  }
  return block.scale;
}

/// values[i] = from_float<T>(to_float(codes[i]) * scale): the product is rounded to float, then to
/// T.
template <class Q, class T>
FERRY_INLINE_FN constexpr void dequantize_block(const Q* FERRY_RESTRICT codes, std::size_t count,
                                                float scale, T* FERRY_RESTRICT values) {
  for (std::size_t i = 0; i < count; ++i) values[i] = from_float<T>(to_float(codes[i]) * scale);
}

/// Quantises a row: writes `hidden` codes and scale_count(hidden) scales.
template <class Q, class T>
FERRY_INLINE_FN constexpr void quantize_row(const T* FERRY_RESTRICT values, std::size_t hidden,
                                            Q* FERRY_RESTRICT codes, float* FERRY_RESTRICT scales,
                                            bool round_scale = false) {
  for (std::size_t block = 0, at = 0; at < hidden; ++block, at += kScaleBlock) {
    const std::size_t count = hidden - at < kScaleBlock ? hidden - at : kScaleBlock;
    scales[block] = quantize_block(values + at, count, codes + at, round_scale);
  }
}

/// The inverse of quantize_row, up to its rounding.
template <class Q, class T>
FERRY_INLINE_FN constexpr void dequantize_row(const Q* FERRY_RESTRICT codes,
                                              const float* FERRY_RESTRICT scales,
                                              std::size_t hidden, T* FERRY_RESTRICT values) {
  for (std::size_t block = 0, at = 0; at < hidden; ++block, at += kScaleBlock) {
    const std::size_t count = hidden - at < kScaleBlock ? hidden - at : kScaleBlock;
    dequantize_block(codes + at, count, scales[block], values + at);
  }
}

}  // namespace ferry

// Storage types of the narrow floating-point formats, and their exact conversions.
//
// Widening (`to_float`) is exact for every code. Narrowing (`from_float<T>`) rounds once, to
// nearest, ties to even, subnormals included:
//
//   type   bits s/e/m  largest finite  smallest      beyond the largest        NaN
//   Bf16   1/8/7       3.3895e38       2^-133        infinity (IEEE)           0x7fff
//   Fp16   1/5/10      65504           2^-24         infinity (IEEE)           0x7fff
//   E4m3   1/4/3       448             2^-9          +-448, infinity too       0x7f
//   E5m2   1/5/2       57344           2^-16         +-57344, infinity too     0x7f
//
// Every NaN narrows to the one positive quiet NaN of the last column, so that a result does not
// depend on which operand's payload a processor keeps. Widening keeps sign and payload. Zero keeps
// its sign. E4m3 has no infinity (0x7f and 0xff are NaN); E5m2 has (0x7c, 0xfc): `to_float`
// understands it, `from_float` never makes it.
//
// These are also the bits of PTX `cvt.rn` (with `.satfinite` for fp8), NaN included: compared over
// all 2^32 floats on an H200. A kernel may use the instruction.
//
// Sources: IEEE 754-2019; OCP 8-bit Floating Point Specification (OFP8) 1.0, saturating mode.
#pragma once

#include <cstdint>

#include "core/device.hpp"
#include "ferry/dtype.hpp"

namespace ferry {

/// bfloat16: the high 16 bits of a binary32. `==` of all four types compares bits, not values.
struct Bf16 {
  std::uint16_t bits;
  friend constexpr bool operator==(Bf16, Bf16) = default;
};

/// IEEE 754 binary16.
struct Fp16 {
  std::uint16_t bits;
  friend constexpr bool operator==(Fp16, Fp16) = default;
};

/// OCP FP8 E4M3 ("e4m3fn"): bias 7, no infinity.
struct E4m3 {
  std::uint8_t bits;
  friend constexpr bool operator==(E4m3, E4m3) = default;
};

/// OCP FP8 E5M2: bias 15, IEEE-like.
struct E5m2 {
  std::uint8_t bits;
  friend constexpr bool operator==(E5m2, E5m2) = default;
};

namespace number_detail {

FERRY_INLINE_FN constexpr std::uint32_t bits_of(float x) {
  return __builtin_bit_cast(std::uint32_t, x);
}
FERRY_INLINE_FN constexpr float float_of(std::uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}

inline constexpr std::uint32_t kSignBit = 0x80000000u;
inline constexpr std::int32_t kInfinityBits = 0x7f800000;

// Magnitudes are compared as signed integers: for non-negative floats the order of the bits is
// the order of the values, and signed is what every vector unit compares.
FERRY_INLINE_FN constexpr std::int32_t magnitude_bits(float x) {
  return static_cast<std::int32_t>(bits_of(x) & ~kSignBit);
}

// Describes a format of kWidth bits with kMantissa mantissa bits and exponent bias kBias.
// kCeiling: the magnitude (bits of a float) to which larger ones are cut before rounding.
template <class T>
struct Format;

template <>
struct Format<Fp16> {
  static constexpr std::int32_t kWidth = 16, kMantissa = 10, kBias = 15;
  static constexpr std::int32_t kCeiling = 0x47800000;  // 65536, whose code is infinity's
  static constexpr std::int32_t kNan = 0x7fff;
  static constexpr std::int32_t kFirstNonFinite = 0x7c00;
};
template <>
struct Format<E4m3> {
  static constexpr std::int32_t kWidth = 8, kMantissa = 3, kBias = 7;
  static constexpr std::int32_t kCeiling = 0x43e00000;  // 448
  static constexpr std::int32_t kNan = 0x7f;
  static constexpr std::int32_t kFirstNonFinite = 0x7f;
};
template <>
struct Format<E5m2> {
  static constexpr std::int32_t kWidth = 8, kMantissa = 2, kBias = 15;
  static constexpr std::int32_t kCeiling = 0x47600000;  // 57344
  static constexpr std::int32_t kNan = 0x7f;
  static constexpr std::int32_t kFirstNonFinite = 0x7c;
};

// No branch, no variable shift: loops over these two vectorise. Both ways of rounding are
// computed and one is chosen.
template <class T>
FERRY_INLINE_FN constexpr T narrow(float x) {
  using F = Format<T>;
  constexpr std::int32_t kShift = 23 - F::kMantissa;
  constexpr std::int32_t kRebias = (127 - F::kBias) << F::kMantissa;
  constexpr std::int32_t kSmallestNormal = (128 - F::kBias) << 23;
  // A float whose unit in the last place is the format's smallest subnormal: adding it rounds to
  // a multiple of that, and the low bits of the sum are the code.
  constexpr std::int32_t kMagic = (151 - F::kBias - F::kMantissa) << 23;

  const std::int32_t magnitude = magnitude_bits(x);
  const std::int32_t a = magnitude < F::kCeiling ? magnitude : F::kCeiling;
  const std::int32_t to_even = (a >> kShift) & 1;
  const std::int32_t normal = ((a + ((1 << (kShift - 1)) - 1) + to_even) >> kShift) - kRebias;
  const float sum = float_of(static_cast<std::uint32_t>(a)) + float_of(kMagic);
  const std::int32_t subnormal = static_cast<std::int32_t>(bits_of(sum)) - kMagic;
  const std::int32_t sign = static_cast<std::int32_t>((bits_of(x) & kSignBit) >> (32 - F::kWidth));
  const std::int32_t code = (a < kSmallestNormal ? subnormal : normal) | sign;
  return T{static_cast<decltype(T::bits)>(magnitude > kInfinityBits ? F::kNan : code)};
}

template <class T>
FERRY_INLINE_FN constexpr float widen(T value) {
  using F = Format<T>;
  constexpr std::int32_t kShift = 23 - F::kMantissa;
  constexpr std::int32_t kSignMask = 1 << (F::kWidth - 1);
  constexpr std::int32_t kRebias = (127 - F::kBias) << 23;
  constexpr std::int32_t kSmallestNormal = kRebias + (1 << 23);

  const std::int32_t code = value.bits & (kSignMask - 1);
  const std::int32_t shifted = code << kShift;
  const std::int32_t normal = shifted + kRebias;
  // 2^e (1 + m) - 2^e, both normal and the difference exact: no subnormal float on the way.
  const float difference =
      float_of(static_cast<std::uint32_t>(shifted + kSmallestNormal)) - float_of(kSmallestNormal);
  const std::int32_t subnormal = static_cast<std::int32_t>(bits_of(difference));
  const std::int32_t finite = code < (1 << F::kMantissa) ? subnormal : normal;
  const std::int32_t magnitude = code >= F::kFirstNonFinite ? shifted | kInfinityBits : finite;
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & kSignMask) << (32 - F::kWidth);
  return float_of(static_cast<std::uint32_t>(magnitude) | sign);
}

template <class T>
struct Narrow {
  FERRY_INLINE_FN static constexpr T from(float x) { return narrow<T>(x); }
};
template <>
struct Narrow<Bf16> {
  FERRY_INLINE_FN static constexpr Bf16 from(float x) {
    const std::uint32_t bits = bits_of(x);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const bool nan = magnitude_bits(x) > kInfinityBits;
    return Bf16{static_cast<std::uint16_t>(nan ? 0x7fffu : rounded)};
  }
};
template <>
struct Narrow<float> {
  FERRY_INLINE_FN static constexpr float from(float x) { return x; }
};

}  // namespace number_detail

/// Rounds to T (float, Bf16, Fp16, E4m3 or E5m2) as the table above says. Total: defined for every
/// input.
template <class T>
FERRY_INLINE_FN constexpr T from_float(float x) {
  return number_detail::Narrow<T>::from(x);
}

/// The exact value of a code. NaN keeps its sign and payload.
FERRY_INLINE_FN constexpr float to_float(float x) {
  return x;
}
FERRY_INLINE_FN constexpr float to_float(Bf16 x) {
  return number_detail::float_of(static_cast<std::uint32_t>(x.bits) << 16);
}
FERRY_INLINE_FN constexpr float to_float(Fp16 x) {
  return number_detail::widen(x);
}
FERRY_INLINE_FN constexpr float to_float(E4m3 x) {
  return number_detail::widen(x);
}
FERRY_INLINE_FN constexpr float to_float(E5m2 x) {
  return number_detail::widen(x);
}

/// The Dtype whose elements T stores.
template <class T>
inline constexpr Dtype kDtypeOf = Dtype::u8;
template <>
inline constexpr Dtype kDtypeOf<float> = Dtype::f32;
template <>
inline constexpr Dtype kDtypeOf<Bf16> = Dtype::bf16;
template <>
inline constexpr Dtype kDtypeOf<Fp16> = Dtype::f16;
template <>
inline constexpr Dtype kDtypeOf<E4m3> = Dtype::e4m3;
template <>
inline constexpr Dtype kDtypeOf<E5m2> = Dtype::e5m2;

}  // namespace ferry

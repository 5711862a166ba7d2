// LogFMT-10: 10 bits for each channel, a sign and 9 bits that say where between the smallest and
// the largest magnitude of 128 channels a value lies, on a logarithmic scale.
//
// For each block of a row (the last may be short), of its finite values of magnitude >= 2^-126:
//
//   hi     = the largest magnitude
//   lowest = the smallest, but at least hi * 2^-32 and 2^-126
//   step   = (logarithm of hi / lowest) / 509
//   v(l)   = lowest * E(l * step), l = 0 ... 509        E(p), a power of two: see logfmt_level
//
//   code 0        zero
//   code 1 + l    v(l)                     code 512 + 1 + l    -v(l)
//   code 511      infinity                 code 512 + 511      -infinity
//   code 512      NaN
//
// A value gets the level that is nearest to it, the smaller one of two that are equally near: so
// rounding is unbiased where values are added, unlike rounding of logarithms. What is smaller than
// half of `lowest`, or than 2^-126, is zero. Infinity and NaN come back as they are and leave their
// neighbours alone; a block whose values have one magnitude comes back exactly; the sign of zero is
// lost.
//
// Error of a value x that is not below `lowest`, with R = log2(hi / lowest) <= 32 (docs/latency.md
// derives it): at most |x| * (2^(R / 505) - 1) / 2 + |x| * 5e-6. Below: at most lowest / 2.
//
// A row of `hidden` channels (a multiple of 4) in flight: the low 8 bits of each code, one a byte;
// the high 2 bits, four a byte, the first channel in the lowest; the ranges. Where they lie:
// core/layout.hpp.
//
// Source of the idea: "Insights into DeepSeek-V3" (DeepSeek-AI, 2025), LogFMT-nBit.
//
// Every step is one IEEE operation in the order written, none takes or makes a subnormal.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/device.hpp"
#include "core/number/formats.hpp"
#include "core/number/quantize.hpp"

namespace ferry {

/// What the codes of a block stand for; travels with them.
struct LogfmtRange {
  float lowest = 0;  ///< magnitude of code 1; 0: the block holds no value that needs one
  float step = 0;    ///< from one level to the next, in octaves
};

inline constexpr std::int32_t kLogfmtLevels = 510;
inline constexpr std::int32_t kLogfmtInfinity = kLogfmtLevels + 1;
inline constexpr std::int32_t kLogfmtSign = 512;  ///< alone: NaN

namespace number_detail {

inline constexpr std::int32_t kSmallestNormalBits = 0x00800000;
inline constexpr std::int32_t kLargestBits = 0x7f7fffff;
// Without a branch, and so that a compiler sees none either: loops over these vectorise.
FERRY_INLINE_FN constexpr std::int32_t select(bool first, std::int32_t a, std::int32_t b) {
  return b ^ ((a ^ b) & -static_cast<std::int32_t>(first));
}
FERRY_INLINE_FN constexpr std::int32_t larger(std::int32_t a, std::int32_t b) {
  return a > b ? a : b;
}
FERRY_INLINE_FN constexpr std::int32_t smaller(std::int32_t a, std::int32_t b) {
  return a < b ? a : b;
}

/// A range as it is used: `lowest` = base * 2^exponent, base in [1, 2), so that nothing overflows.
struct LogfmtScale {
  float base;
  float step;
  std::int32_t exponent;  ///< shifted to its place in a float
};

/// A range that a peer sent, whatever it sent.
FERRY_INLINE_FN constexpr LogfmtScale logfmt_scale(LogfmtRange range) {
  const auto lowest = static_cast<std::int32_t>(bits_of(range.lowest));
  const bool good = lowest >= kSmallestNormalBits && lowest <= kLargestBits;
  const std::int32_t bits = good ? lowest : 0x3f800000;
  const bool steps = range.step >= 0.0f && range.step <= 32.001f / 509.0f;
  return {float_of(static_cast<std::uint32_t>((bits & 0x7fffff) | 0x3f800000)),
          steps ? range.step : 0.0f, (bits & 0x7f800000) - 0x3f800000};
}

/// 1 + (9 f + 3 f^2 + f^3) / 13 for f in [0, 1): 2^f within 0.06 %, its logarithm's slope constant
/// within 0.3 %, and E(1) = 2 exactly. It never falls, as no operation does.
FERRY_INLINE_FN constexpr float logfmt_power(float f) {
  return ((f + 3.0f) * f + 9.0f) * f * (1.0f / 13.0f) + 1.0f;
}
static_assert(logfmt_power(1.0f) == 2.0f);

/// Level l, -1 ... 509, over 2^exponent: base * E(l * step), where E(n + f) = 2^n * E(f).
FERRY_INLINE_FN constexpr float logfmt_level(const LogfmtScale& scale, std::int32_t level) {
  const float p = static_cast<float>(level) * scale.step;
  const auto n = static_cast<std::int32_t>(p);
  const float e = scale.base * logfmt_power(p - static_cast<float>(n));
  return float_of(bits_of(e) + (static_cast<std::uint32_t>(n) << 23));
}

/// The inverse of E(f) = 1 + t within 0.02 %, also of small t.
FERRY_INLINE_FN constexpr float logfmt_log(float t) {
  return (((-0.08574608f * t + 0.33267335f) * t - 0.69131767f) * t + 1.44423326f) * t;
}

/// The logarithm of q >= 1/2, by `logfmt_log`.
FERRY_INLINE_FN constexpr float logfmt_octaves(float q) {
  const std::uint32_t bits = bits_of(q);
  const auto n = static_cast<std::int32_t>(bits >> 23) - 127;
  return static_cast<float>(n) + logfmt_log(float_of((bits & 0x7fffffu) | 0x3f800000u) - 1.0f);
}

}  // namespace number_detail

/// What one value adds to its block's largest and smallest magnitude, as the bits of a float: 0, or
/// the largest int, for what counts for nothing.
FERRY_INLINE_FN constexpr std::int32_t logfmt_high_bits(float x) {
  using namespace number_detail;
  const std::int32_t magnitude = magnitude_bits(x);
  return select(magnitude >= kSmallestNormalBits && magnitude <= kLargestBits, magnitude, 0);
}
FERRY_INLINE_FN constexpr std::int32_t logfmt_low_bits(float x) {
  using namespace number_detail;
  const std::int32_t bits = logfmt_high_bits(x);
  return select(bits == 0, 0x7fffffff, bits);
}

/// The range of a block from the maximum of `logfmt_high_bits` and the minimum of
/// `logfmt_low_bits`, in whatever order they were taken.
FERRY_INLINE_FN constexpr LogfmtRange logfmt_range(std::int32_t high, std::int32_t low) {
  using namespace number_detail;
  if (high == 0) return {};
  std::int32_t least = high - (32 << 23);
  least = least > kSmallestNormalBits ? least : kSmallestNormalBits;
  low = low > least ? low : least;
  const std::int32_t exponent = (low & 0x7f800000) - 0x3f800000;
  const float q = float_of(static_cast<std::uint32_t>(high - exponent)) /
                  float_of(static_cast<std::uint32_t>(low - exponent));
  const std::uint32_t bits = bits_of(q);
  const float m = float_of((bits & 0x7fffffu) | 0x3f800000u);
  const float guess = logfmt_log(m - 1.0f);
  // One step of Newton's method.
  const float slope = ((guess + 2.0f) * guess + 3.0f) * (3.0f / 13.0f);
  const float f = guess - (logfmt_power(guess) - m) / slope;
  const auto n = static_cast<std::int32_t>(bits >> 23) - 127;
  const float octaves = static_cast<float>(n) + f;
  return {float_of(static_cast<std::uint32_t>(low)), octaves > 0.0f ? octaves / 509.0f : 0.0f};
}

/// Codes of one block's values.
class LogfmtEncoder {
 public:
  FERRY_INLINE_FN explicit constexpr LogfmtEncoder(LogfmtRange range)
      : scale_(number_detail::logfmt_scale(range)),
        lowest_(static_cast<std::int32_t>(number_detail::bits_of(range.lowest))),
        inverse_(1.0f / scale_.base),
        levels_(scale_.step > 0.0f ? 1.0f / scale_.step : 0.0f) {}

  FERRY_INLINE_FN constexpr std::int32_t code(float x) const {
    using namespace number_detail;
    const std::int32_t magnitude = magnitude_bits(x);
    const std::int32_t bits = smaller(larger(magnitude, lowest_), kLargestBits);
    // Unsigned: for an infinity there is no such value.
    const float y =
        float_of(static_cast<std::uint32_t>(bits) - static_cast<std::uint32_t>(scale_.exponent));
    // The level below, or a neighbour of it when y is close to one: the logarithm is not exact.
    const float guess = logfmt_octaves(y * inverse_) * levels_;
    // As integers: the bits of a negative float are a negative number.
    constexpr auto kLast = static_cast<std::int32_t>(bits_of(508.0f));
    const std::int32_t clamped =
        smaller(larger(static_cast<std::int32_t>(bits_of(guess)), 0), kLast);
    const auto below = static_cast<std::int32_t>(float_of(static_cast<std::uint32_t>(clamped)));
    const bool up = y - logfmt_level(scale_, below) > logfmt_level(scale_, below + 1) - y;
    const std::int32_t level = below + 1 + static_cast<std::int32_t>(up);
    const std::int32_t half = larger(lowest_ - kSmallestNormalBits, kSmallestNormalBits);
    const auto sign = static_cast<std::int32_t>(bits_of(x) >> 31) * kLogfmtSign;
    std::int32_t code = select(magnitude < half, 0, level | sign);
    code = select(magnitude == kInfinityBits, kLogfmtInfinity | sign, code);
    return select(magnitude > kInfinityBits, kLogfmtSign, code);
  }

 private:
  number_detail::LogfmtScale scale_;
  std::int32_t lowest_;  ///< its bits
  float inverse_;        ///< 1 / base
  float levels_;         ///< an octave
};

/// Values of one block's codes. Total: defined for whatever a peer sent.
class LogfmtDecoder {
 public:
  FERRY_INLINE_FN explicit constexpr LogfmtDecoder(LogfmtRange range)
      : scale_(number_detail::logfmt_scale(range)) {}

  /// code: 0 ... 1023.
  FERRY_INLINE_FN constexpr float value(std::int32_t code) const {
    using namespace number_detail;
    const std::int32_t magnitude = code & (kLogfmtSign - 1);
    const std::uint32_t level =
        bits_of(logfmt_level(scale_, magnitude - 1)) + static_cast<std::uint32_t>(scale_.exponent);
    // The largest float may be a little more.
    const auto most = static_cast<std::uint32_t>(kLargestBits);
    auto bits = static_cast<std::int32_t>(level < most ? level : most);
    bits = select(magnitude == 0, 0, bits);
    bits = select(magnitude == kLogfmtInfinity, kInfinityBits, bits);
    const std::uint32_t sign = static_cast<std::uint32_t>(code & kLogfmtSign) << 22;
    bits = select(code == kLogfmtSign, 0x7fc00000, static_cast<std::int32_t>(sign) | bits);
    return float_of(static_cast<std::uint32_t>(bits));
  }

 private:
  number_detail::LogfmtScale scale_;
};

/// The range of `count` values (T: float, Bf16, Fp16).
template <class T>
FERRY_INLINE_FN constexpr LogfmtRange logfmt_block_range(const T* values, std::size_t count) {
  std::int32_t high = 0, low = 0x7fffffff;
  for (std::size_t i = 0; i < count; ++i) {
    const std::int32_t h = logfmt_high_bits(to_float(values[i]));
    const std::int32_t l = logfmt_low_bits(to_float(values[i]));
    high = number_detail::larger(h, high);
    low = number_detail::smaller(l, low);
  }
  return logfmt_range(high, low);
}

/// Writes the two planes of `count` codes (a multiple of 4) and returns their range.
template <class T>
FERRY_INLINE_FN constexpr LogfmtRange logfmt_encode_block(const T* FERRY_RESTRICT values,
                                                          std::size_t count,
                                                          std::uint8_t* FERRY_RESTRICT low,
                                                          std::uint8_t* FERRY_RESTRICT high) {
  const LogfmtRange range = logfmt_block_range(values, count);
  const LogfmtEncoder encoder(range);
  std::int32_t codes[kScaleBlock] = {};
  for (std::size_t i = 0; i < count; ++i) {
    codes[i] = encoder.code(to_float(values[i]));
    low[i] = static_cast<std::uint8_t>(codes[i]);
  }
  for (std::size_t i = 0; i < count / 4; ++i) {
    const std::int32_t* c = codes + 4 * i;
    high[i] = static_cast<std::uint8_t>((c[0] >> 8) | (c[1] >> 8) << 2 | (c[2] >> 8) << 4 |
                                        (c[3] >> 8) << 6);
  }
  return range;
}

/// The inverse of logfmt_encode_block, up to its rounding. count: a multiple of 4.
FERRY_INLINE_FN constexpr void logfmt_decode_block(const std::uint8_t* FERRY_RESTRICT low,
                                                   const std::uint8_t* FERRY_RESTRICT high,
                                                   std::size_t count, LogfmtRange range,
                                                   float* FERRY_RESTRICT values) {
  const LogfmtDecoder decoder(range);
  std::int32_t codes[kScaleBlock] = {};
  for (std::size_t i = 0; i < count / 4; ++i) {
    for (std::size_t c = 0; c < 4; ++c) codes[4 * i + c] = ((high[i] >> (2 * c)) & 3) << 8;
  }
  for (std::size_t i = 0; i < count; ++i) values[i] = decoder.value(low[i] | codes[i]);
}

}  // namespace ferry

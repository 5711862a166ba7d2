// UE8M0: a power-of-two scale as its biased exponent, one byte; four of them in a 32-bit word.
//
// Code c stands for 2^(c - 127); 255 is NaN. Word w holds scales 4w .. 4w + 3, the first in its
// lowest byte, which is also the order of the bytes in the memory of a little-endian machine. The
// unused bytes of the last word are zero.
//
// Source: OCP Microscaling Formats (MX) Specification 1.0, E8M0.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/device.hpp"
#include "core/number/formats.hpp"

namespace ferry {

/// The code of a scale that is a power of two from 2^-127 to 2^127, as `round_scale` makes them.
/// Infinity and NaN give 255; a scale that is not a power of two is rounded down to one, its sign
/// dropped.
FERRY_INLINE_FN constexpr std::uint8_t ue8m0_from_scale(float scale) {
  return static_cast<std::uint8_t>(number_detail::magnitude_bits(scale) >> 23);
}

/// The scale of a code; exact, also for 0 (2^-127, a subnormal float). 255 gives NaN.
FERRY_INLINE_FN constexpr float scale_from_ue8m0(std::uint8_t code) {
  const std::uint32_t bits = static_cast<std::uint32_t>(code) << 23;
  return number_detail::float_of(code == 0 ? 0x00400000u : code == 255 ? 0x7fffffffu : bits);
}

/// Words that hold `scales` codes.
FERRY_INLINE_FN constexpr std::size_t ue8m0_word_count(std::size_t scales) {
  return (scales + 3) / 4;
}

/// Packs `count` power-of-two scales into ue8m0_word_count(count) words.
FERRY_INLINE_FN constexpr void pack_ue8m0(const float* FERRY_RESTRICT scales, std::size_t count,
                                          std::uint32_t* FERRY_RESTRICT words) {
  for (std::size_t first = 0; first < count; first += 4) {
    std::uint32_t word = 0;
    for (std::size_t i = first; i < count && i < first + 4; ++i) {
      word |= static_cast<std::uint32_t>(ue8m0_from_scale(scales[i])) << (8 * (i - first));
    }
    words[first / 4] = word;
  }
}

}  // namespace ferry

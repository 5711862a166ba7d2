// A fused multiply-add that is one.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

namespace ferry {

/// Whether the C library's fmaf rounds once where the instruction is not used. That of mingw-w64
/// computes in long double and rounds twice.
#if defined(__MINGW32__)
inline constexpr bool kFmafIsExact = false;
#else
inline constexpr bool kFmafIsExact = true;
#endif

/// w * x + sum, rounded once, without the instruction: the product is exact in double, and the
/// sum is rounded to odd there, so that rounding to float loses nothing. (Boldo and Melquiond,
/// "Emulation of FMA and correctly rounded sums", 2008.)
[[gnu::always_inline]] inline float exact_fma(float w, float x, float sum) {
  const double product = static_cast<double>(w) * x;
  const double total = product + sum;
  if (!std::isfinite(total)) return static_cast<float>(total);
  // What the addition lost (Knuth's two-sum).
  const double other = total - product;
  const double lost = (product - (total - other)) + (sum - other);
  auto bits = std::bit_cast<std::uint64_t>(total);
  if (lost == 0 || (bits & 1) != 0) return static_cast<float>(total);
  // Towards what was lost: the neighbour, which is odd.
  bits += (lost > 0) == (total > 0) ? 1 : -1;
  return static_cast<float>(std::bit_cast<double>(bits));
}

}  // namespace ferry

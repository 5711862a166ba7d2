// An independent, slow model of the narrow formats for the tests: tables of values in double, built
// from the definition of each format, and searched. No bit tricks, nothing from number/.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <limits>
#include <random>
#include <string>
#include <vector>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace ferry::oracle {

inline float float_from_bits(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline std::uint32_t bits_from_float(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

/// A sign, exponent, mantissa format by its definition. Codes are magnitudes, without the sign.
class Model {
 public:
  Model(int exponent_bits, int mantissa_bits, std::uint32_t largest_code, std::uint32_t nan_code,
        bool saturates)
      : width_(1 + exponent_bits + mantissa_bits), nan_(nan_code), saturates_(saturates) {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const std::uint32_t per_power = 1u << mantissa_bits;
    // One more than the largest finite code: where the next value would be, were there one.
    for (std::uint32_t code = 0; code <= largest_code + 1; ++code) {
      const int exponent = static_cast<int>(code / per_power);
      const double fraction = static_cast<double>(code % per_power) / per_power;
      values_.push_back(exponent == 0 ? std::ldexp(fraction, 1 - bias)
                                      : std::ldexp(1.0 + fraction, exponent - bias));
    }
  }

  int width() const { return width_; }
  std::uint32_t nan() const { return nan_; }
  std::uint32_t largest_code() const { return static_cast<std::uint32_t>(values_.size()) - 2; }
  double value(std::uint32_t code) const { return values_[code]; }
  std::uint32_t sign_bit() const { return 1u << (width_ - 1); }

  /// The code nearest to x, ties to the even code; the table's end is infinity or saturation.
  std::uint32_t encode(float x) const {
    if (std::isnan(x)) return nan_;
    const std::uint32_t sign = std::signbit(x) ? sign_bit() : 0;
    const double magnitude = std::fabs(static_cast<double>(x));
    std::uint32_t code;
    if (magnitude >= values_.back()) {
      code = largest_code() + 1;
    } else {
      const auto above = std::upper_bound(values_.begin(), values_.end(), magnitude);
      const auto high = static_cast<std::uint32_t>(above - values_.begin());
      const double middle = (values_[high - 1] + values_[high]) / 2;  // exact
      const bool up = magnitude > middle || (magnitude == middle && high % 2 == 0);
      code = up ? high : high - 1;
    }
    if (saturates_) code = std::min(code, largest_code());
    return sign | code;
  }

  /// Floats at which a rounding could go wrong: every value, every middle between two, and the
  /// neighbours of both, with both signs.
  std::vector<float> boundaries() const {
    std::vector<float> result;
    const auto add = [&result](double at) {
      const auto centre = static_cast<float>(at);
      const float infinity = std::numeric_limits<float>::infinity();
      for (float x : {std::nextafter(centre, 0.0f), centre, std::nextafter(centre, infinity)}) {
        result.push_back(x);
        result.push_back(-x);
      }
    };
    for (std::size_t code = 0; code + 1 < values_.size(); ++code) {
      add(values_[code]);
      add((values_[code] + values_[code + 1]) / 2);
    }
    return result;
  }

 private:
  int width_;
  std::uint32_t nan_;
  bool saturates_;
  std::vector<double> values_;
};

inline Model bf16() {
  return Model(8, 7, 0x7f7f, 0x7fff, false);
}
inline Model fp16() {
  return Model(5, 10, 0x7bff, 0x7fff, false);
}
inline Model e4m3() {
  return Model(4, 3, 0x7e, 0x7f, true);
}
inline Model e5m2() {
  return Model(5, 2, 0x7b, 0x7f, true);
}

inline Model e2m1() {
  return Model(2, 1, 0x7, 0x7, true);
}

/// Zeros, infinities, NaNs of both kinds and signs, subnormals, the ends of the range.
inline std::vector<float> special_floats() {
  std::vector<float> result;
  for (std::uint32_t bits :
       {0x00000000u, 0x00000001u, 0x00000002u, 0x00400000u, 0x007fffffu, 0x00800000u, 0x00800001u,
        0x3f800000u, 0x7f7fffffu, 0x7f7ffffeu, 0x7f800000u, 0x7f800001u, 0x7fa00000u, 0x7fbfffffu,
        0x7fc00000u, 0x7fffffffu}) {
    result.push_back(float_from_bits(bits));
    result.push_back(float_from_bits(bits | 0x80000000u));
  }
  return result;
}

/// `count` floats of random bits: every exponent alike, NaN and infinity among them.
inline std::vector<float> random_floats(std::size_t count, std::uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<float> result(count);
  for (float& x : result) x = float_from_bits(static_cast<std::uint32_t>(generator()));
  return result;
}

/// The seed of a test, FERRY_TEST_SEED if set; printed.
inline std::uint32_t seed() {
  const char* text = std::getenv("FERRY_TEST_SEED");
  const auto value = text ? static_cast<std::uint32_t>(std::stoul(text)) : 20261121u;
  std::cout << "seed " << value << " (FERRY_TEST_SEED)\n";
  return value;
}

#if defined(__SSE2__)
/// While it lives, the processor flushes subnormal results and operands to zero (FTZ, DAZ).
class FlushSubnormals {
 public:
  FlushSubnormals() : saved_(_mm_getcsr()) { set(saved_ | 0x8040u); }
  ~FlushSubnormals() { set(saved_); }
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

  /// Whether the mode has its effect.
  static bool works() {
    volatile float tiny = 1e-42f, two = 2.0f;
    return tiny * two == 0.0f;
  }

 private:
  static void set(unsigned mode) {
    std::atomic_signal_fence(std::memory_order_seq_cst);  // the compiler moves no work across
    _mm_setcsr(mode);
    std::atomic_signal_fence(std::memory_order_seq_cst);
  }

  unsigned saved_;
};
#endif

}  // namespace ferry::oracle

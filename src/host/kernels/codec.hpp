// Codes of f32 values as they cross between domains, and what encoding them lost.
//
// Elements are coded in blocks of kScaleBlock (the last may be short). Of each block:
//
//   amax    largest |x|, at least 2^-100
//   e4m3    scale = amax / 448; q = from_float<E4m3>(x * (448 / amax)); value = to_float(q) * scale
//   e5m2    the same with 57344
//   bf16, f16   q = from_float<T>(x); value = to_float(q)
//
// Unlike quantize_block (core/number/quantize.hpp), whose amax is at least 1e-4: gradients are
// smaller than that. Codes lie one behind the other; the scales of fp8 follow them, at a multiple
// of 4 bytes.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/number/quantize.hpp"
#include "ferry/collectives.hpp"

namespace ferry::host {

/// What the codes of some elements lost: Σe² and Σg², of the elements whose magnitude is not the
/// largest of its block. Those are always exact in fp8, and one that is far larger than the others
/// would hide that it has cleared them.
struct CodeError {
  double error = 0;
  double signal = 0;
  bool nonfinite = false;  ///< NaN or infinity among the values: nothing else holds
  bool overflow = false;   ///< a finite value became infinity
};

/// Where the scales of fp8 begin, from the codes.
constexpr std::size_t scales_offset(std::size_t count) {
  return (count + 3) / 4 * 4;
}

/// Bytes of `count` elements in a format that is not `automatic`.
constexpr std::size_t code_bytes(ReduceFormat format, std::size_t count) {
  switch (format) {
    case ReduceFormat::bf16:
    case ReduceFormat::f16: return 2 * count;
    case ReduceFormat::e4m3:
    case ReduceFormat::e5m2: return scales_offset(count) + scale_count(count) * sizeof(float);
    default: return sizeof(float) * count;
  }
}

struct EncodeValues {
  const float* values = nullptr;
  std::size_t count = 0;
  ReduceFormat format = ReduceFormat::bf16;  ///< bf16, f16, e4m3 or e5m2
  void* codes = nullptr;                     ///< [code_bytes], at a multiple of 4 bytes
};

struct DecodeValues {
  const void* codes = nullptr;  ///< as of EncodeValues
  std::size_t count = 0;
  ReduceFormat format = ReduceFormat::bf16;
  float* values = nullptr;
};

}  // namespace ferry::host

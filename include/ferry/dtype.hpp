// Element types that Ferry carries.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace ferry {

/// The type of one element of a tensor.
///
/// `e4m3` is the OCP FP8 E4M3 format without infinities (largest 448), `e5m2` the IEEE-like OCP
/// FP8 E5M2 format (largest finite 57344): OCP 8-bit Floating Point Specification 1.0.
enum class Dtype : std::uint8_t { f32, bf16, f16, e4m3, e5m2, i32, i64, u8 };

/// Bytes of one element.
constexpr std::size_t size_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32:
    case Dtype::i32: return 4;
    case Dtype::bf16:
    case Dtype::f16: return 2;
    case Dtype::i64: return 8;
    case Dtype::e4m3:
    case Dtype::e5m2:
    case Dtype::u8: return 1;
  }
  return 0;
}

/// The name used in messages, on the command line and in Python: "f32", "bf16", ...
constexpr std::string_view name_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32: return "f32";
    case Dtype::bf16: return "bf16";
    case Dtype::f16: return "f16";
    case Dtype::e4m3: return "e4m3";
    case Dtype::e5m2: return "e5m2";
    case Dtype::i32: return "i32";
    case Dtype::i64: return "i64";
    case Dtype::u8: return "u8";
  }
  return "unknown";
}

}  // namespace ferry

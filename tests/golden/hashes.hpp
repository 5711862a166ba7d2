// Hashes of results whose bits must be the same on every platform: x86-64 with and without AVX2 and
// AVX-512, Arm64, Linux and Windows. Computed on Linux, x86-64; a change of them is a change of the
// arithmetic (docs/design.md).
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace ferry::golden {

struct Named {
  std::string_view name;
  std::uint64_t hash;
};

inline constexpr Named kHashes[] = {
#include "golden/hashes.inc"
};

/// 0: no such name.
constexpr std::uint64_t hash_of(std::string_view name) {
  for (const Named& each : kHashes) {
    if (each.name == name) return each.hash;
  }
  return 0;
}

/// Of bytes, one after another; eight at a time.
class Hash {
 public:
  void add(const void* data, std::size_t bytes) {
    const auto* at = static_cast<const char*>(data);
    for (std::size_t i = 0; i < bytes; i += 8) {
      std::uint64_t word = 0;
      std::memcpy(&word, at + i, bytes - i < 8 ? bytes - i : 8);
      add(word);
    }
    add(bytes);
  }
  void add(std::uint64_t word) {
    value_ = (value_ ^ word) * 0x9e3779b97f4a7c15;
    value_ ^= value_ >> 29;
  }
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0xcbf29ce484222325;
};

}  // namespace ferry::golden

// Hashes of states. 64 bits: with a million states the chance that two collide is below 1e-7.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#include "explorer.hpp"

namespace ferry::model {

inline std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  std::uint64_t x = (a ^ (b + 0x9e3779b97f4a7c15ull + (a << 6) + (a >> 2))) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 29)) * 0x94d049bb133111ebull;
  return x ^ (x >> 32);
}

inline std::uint64_t hash_of(const Clock& clock) {
  std::uint64_t h = 1;
  std::array<std::uint64_t, sizeof(clock.at) / 8> parts;
  static_assert(sizeof(clock.at) % 8 == 0);
  std::memcpy(parts.data(), clock.at.data(), sizeof(clock.at));
  for (std::uint64_t part : parts) h = mix(h, part);
  return h;
}

}  // namespace ferry::model

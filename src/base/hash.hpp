// A hash by which ranks compare what they were given.
#pragma once
#include <cstdint>
#include <span>

namespace ferry {

/// The same on every machine; 0 of no numbers.
inline std::uint64_t hash_of(std::span<const int> numbers) {
  std::uint64_t hash = 0;
  for (const int number : numbers) hash = hash * 0x100000001b3 + static_cast<unsigned>(number) + 1;
  return hash;
}

}  // namespace ferry

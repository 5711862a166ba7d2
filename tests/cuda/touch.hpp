// Kernels of the current device that touch memory of its own and of peers.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace ferry::test {

/// word[i] = value + i. What went wrong, or "".
std::string store(std::byte* to, std::uint64_t value, std::size_t words);
/// Whether word[i] == value + i * step. What went wrong, or "".
std::string expect(const std::byte* from, std::uint64_t value, std::uint64_t step,
                   std::size_t words);

}  // namespace ferry::test

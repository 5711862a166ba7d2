// The system's source of random numbers.
#pragma once
#include <cstddef>
#include <span>

namespace ferry {

/// Fills it with bytes that nobody predicts. 0, or the errno of the failure.
int random_bytes(std::span<std::byte> bytes) noexcept;

}  // namespace ferry

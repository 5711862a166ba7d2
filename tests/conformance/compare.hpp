// Byte for byte, and the first difference in words.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ferry/dtype.hpp"
#include "ferry/tensor.hpp"
#include "fleet.hpp"

namespace ferry::conformance {

/// Rows of `row_bytes`, every bit the same.
bool same_bytes(Rank& rank, const char* what, const void* got, const void* expected,
                std::size_t rows, std::size_t row_bytes);

/// Rows of f32, bf16, f16 or e4m3: every bit the same, but all NaNs are one.
bool same_values(Rank& rank, const char* what, Dtype dtype, const void* got, const void* expected,
                 std::int64_t rows, std::int64_t columns);

template <class T>
bool same_vector(Rank& rank, const char* what, const T* got, const std::vector<T>& expected) {
  return same_bytes(rank, what, got, expected.data(), expected.size(), sizeof(T));
}

bool same_shape(Rank& rank, const char* what, const Tensor& got, Dtype dtype,
                const Extents& expected);

/// What memory is filled with before somebody else should write it: NaN in every format.
inline constexpr int kPoison = 0xff;
void poison(const TensorView& tensor);
/// True when every byte is still poison.
bool is_poison(const void* data, std::size_t bytes);

}  // namespace ferry::conformance

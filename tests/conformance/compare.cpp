#include "compare.hpp"

#include <cstring>

#include "device.hpp"

namespace ferry::conformance {
namespace {

std::string hex(const std::byte* data, std::size_t bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text = "0x";
  for (std::size_t i = bytes; i-- > 0;) {  // little-endian
    text += kDigits[std::to_integer<int>(data[i]) >> 4];
    text += kDigits[std::to_integer<int>(data[i]) & 15];
  }
  return text;
}

std::uint32_t bits_of(const std::byte* value, std::size_t size) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, value, size);
  return bits;
}

bool is_nan(Dtype dtype, const std::byte* value) {
  const std::uint32_t bits = bits_of(value, size_of(dtype));
  switch (dtype) {
    case Dtype::f32: return (bits & 0x7fffffffu) > 0x7f800000u;
    case Dtype::bf16: return (bits & 0x7fffu) > 0x7f80u;
    case Dtype::f16: return (bits & 0x7fffu) > 0x7c00u;
    case Dtype::e4m3: return (bits & 0x7fu) == 0x7fu;
    default: return false;
  }
}

}  // namespace

bool same_bytes(Rank& rank, const char* what, const void* got, const void* expected,
                std::size_t rows, std::size_t row_bytes) {
  if (golden::Hash* hash = rank.hash()) hash->add(got, rows * row_bytes);
  if (rows * row_bytes == 0 || std::memcmp(got, expected, rows * row_bytes) == 0) return true;
  const auto* a = static_cast<const std::byte*>(got);
  const auto* b = static_cast<const std::byte*>(expected);
  std::size_t at = 0;
  while (a[at] == b[at]) ++at;
  const std::size_t row = at / row_bytes;
  const std::size_t word = row_bytes % 4 == 0 ? 4 : 1;
  const std::size_t start = at / word * word;
  rank.fail(std::string(what) + ": row " + std::to_string(row) + " of " + std::to_string(rows) +
            ", byte " + std::to_string(at % row_bytes) + ": got " + hex(a + start, word) +
            ", expected " + hex(b + start, word));
  return false;
}

bool same_values(Rank& rank, const char* what, Dtype dtype, const void* got, const void* expected,
                 std::int64_t rows, std::int64_t columns) {
  const std::size_t size = size_of(dtype);
  const std::size_t count = static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns);
  const auto* a = static_cast<const std::byte*>(got);
  const auto* b = static_cast<const std::byte*>(expected);
  golden::Hash* const hash = rank.hash();
  for (std::size_t i = 0; hash != nullptr && i < count; ++i) {
    const std::byte* const value = a + i * size;
    hash->add(is_nan(dtype, value) ? ~std::uint64_t{0} : bits_of(value, size));
  }
  if (count == 0 || std::memcmp(got, expected, count * size) == 0) return true;
  for (std::size_t i = 0; i < count; ++i, a += size, b += size) {
    if (std::memcmp(a, b, size) == 0 || (is_nan(dtype, a) && is_nan(dtype, b))) continue;
    const auto row = i / static_cast<std::size_t>(columns);
    rank.fail(std::string(what) + ": row " + std::to_string(row) + " of " + std::to_string(rows) +
              ", channel " + std::to_string(i % static_cast<std::size_t>(columns)) + ": got " +
              hex(a, size) + ", expected " + hex(b, size) + " (" + std::string(name_of(dtype)) +
              ")");
    return false;
  }
  return true;
}

bool same_shape(Rank& rank, const char* what, const Tensor& got, Dtype dtype,
                const Extents& expected) {
  return rank.check(got.dtype() == dtype && got.shape() == expected,
                    std::string(what) + ": got " + std::string(name_of(got.dtype())) + " " +
                        to_string(got.shape()) + ", expected " + std::string(name_of(dtype)) + " " +
                        to_string(expected));
}

void poison(const TensorView& tensor) {
  if (tensor.data != nullptr) fill_bytes(tensor.data, kPoison, tensor.bytes(), tensor.device);
}

bool is_poison(const void* data, std::size_t bytes) {
  const auto* at = static_cast<const unsigned char*>(data);
  return bytes == 0 || (at[0] == kPoison && std::memcmp(at, at + 1, bytes - 1) == 0);
}

}  // namespace ferry::conformance

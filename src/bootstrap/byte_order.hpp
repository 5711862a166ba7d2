// Little-endian numbers in byte sequences, bounds checked on the way in.
#pragma once
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace ferry::bootstrap {

template <std::unsigned_integral T>
void append(std::vector<std::byte>& out, T value) {
  for (std::size_t i = 0; i < sizeof(T); ++i) {
    out.push_back(std::byte(std::uint64_t(value) >> (8 * i) & 0xff));
  }
}

inline void append(std::vector<std::byte>& out, std::span<const std::byte> bytes) {
  out.insert(out.end(), bytes.begin(), bytes.end());
}

/// Reads from the front; once something was missing, `ok()` is false and all reads give zeros.
class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) : rest_(bytes) {}

  template <std::unsigned_integral T>
  T read() {
    if (rest_.size() < sizeof(T)) {
      ok_ = false;
      rest_ = {};
      return 0;
    }
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < sizeof(T); ++i) value |= std::uint64_t(rest_[i]) << (8 * i);
    rest_ = rest_.subspan(sizeof(T));
    return T(value);
  }

  template <std::size_t N>
  std::array<std::byte, N> read_bytes() {
    std::array<std::byte, N> out{};
    for (std::byte& b : out) b = std::byte(read<std::uint8_t>());
    return out;
  }

  std::size_t left() const { return rest_.size(); }
  bool ok() const { return ok_; }
  /// Everything was there and nothing is left over.
  bool complete() const { return ok_ && rest_.empty(); }

 private:
  std::span<const std::byte> rest_;
  bool ok_ = true;
};

}  // namespace ferry::bootstrap

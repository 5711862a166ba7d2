// Takes small decisions and byte pieces from the front of a fuzzer's input.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace ferry::fuzz {

class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size)
      : rest_(reinterpret_cast<const std::byte*>(data), size) {}

  bool empty() const { return rest_.empty(); }
  std::uint8_t byte() {
    if (rest_.empty()) return 0;
    const auto value = std::uint8_t(rest_[0]);
    rest_ = rest_.subspan(1);
    return value;
  }
  std::uint16_t word() { return std::uint16_t(byte() | byte() << 8); }
  std::size_t below(std::size_t limit) { return limit == 0 ? 0 : byte() % limit; }
  std::span<const std::byte> piece(std::size_t length) {
    const auto out = rest_.first(std::min(length, rest_.size()));
    rest_ = rest_.subspan(out.size());
    return out;
  }
  std::span<const std::byte> rest() const { return rest_; }

 private:
  std::span<const std::byte> rest_;
};

}  // namespace ferry::fuzz

// A set of seats, as a plain value of fixed size.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "core/device.hpp"

namespace ferry::protocol {

/// Seats 0 .. kSeats - 1, one bit each.
template <int kSeats>
struct SeatSet {
  static constexpr std::size_t kWords = (static_cast<std::size_t>(kSeats) + 63) / 64;
  std::uint64_t words[kWords] = {};

  FERRY_FN static constexpr SeatSet first(int seats) {
    SeatSet set;
    for (int seat = 0; seat < seats; ++seat) set.add(seat);
    return set;
  }
  FERRY_FN static constexpr SeatSet of(int seat) {
    SeatSet set;
    set.add(seat);
    return set;
  }

  FERRY_FN constexpr bool has(int seat) const {
    return (words[static_cast<std::size_t>(seat) / 64] >> (seat % 64) & 1) != 0;
  }
  FERRY_FN constexpr void add(int seat) {
    words[static_cast<std::size_t>(seat) / 64] |= 1ull << (seat % 64);
  }
  FERRY_FN constexpr void remove(int seat) {
    words[static_cast<std::size_t>(seat) / 64] &= ~(1ull << (seat % 64));
  }
  FERRY_FN constexpr int count() const {
    int all = 0;
    for (const std::uint64_t word : words) all += std::popcount(word);
    return all;
  }
  FERRY_FN constexpr bool empty() const { return *this == SeatSet{}; }
  FERRY_FN constexpr bool contains(const SeatSet& other) const { return (other - *this).empty(); }
  /// The lowest seat from `from` on; -1: none.
  FERRY_FN constexpr int next(int from = 0) const {
    for (std::size_t i = static_cast<std::size_t>(from) / 64; i < kWords; ++i) {
      std::uint64_t word = words[i];
      if (i == static_cast<std::size_t>(from) / 64) word &= ~0ull << (from % 64);
      if (word != 0) return static_cast<int>(i * 64) + std::countr_zero(word);
    }
    return -1;
  }

  FERRY_FN friend constexpr SeatSet operator|(SeatSet a, const SeatSet& b) {
    for (std::size_t i = 0; i < kWords; ++i) a.words[i] |= b.words[i];
    return a;
  }
  FERRY_FN friend constexpr SeatSet operator&(SeatSet a, const SeatSet& b) {
    for (std::size_t i = 0; i < kWords; ++i) a.words[i] &= b.words[i];
    return a;
  }
  FERRY_FN friend constexpr SeatSet operator-(SeatSet a, const SeatSet& b) {
    for (std::size_t i = 0; i < kWords; ++i) a.words[i] &= ~b.words[i];
    return a;
  }
  friend constexpr bool operator==(const SeatSet&, const SeatSet&) = default;
};

}  // namespace ferry::protocol

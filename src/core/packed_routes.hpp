// Routes as they cross between domains: ids in as few bits as the number of experts needs, where
// that is fewer bytes than 4 each.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ferry {

/// The same on both sides of a crossing, by what both know. Ids of −1 to experts − 1 cross as id +
/// 1, the lowest bits first; rows begin at whole bytes.
struct PackedRoutes {
  int bits = 32;  ///< of an id
  int topk = 1;

  constexpr PackedRoutes(std::int64_t experts, int slots)
      : bits(std::bit_width(static_cast<std::uint64_t>(experts))), topk(slots) {
    if (row_bytes() >= static_cast<std::size_t>(topk) * sizeof(std::int32_t)) bits = 32;
  }
  constexpr std::size_t row_bytes() const {
    return (static_cast<std::size_t>(topk * bits) + 7) / 8;
  }

  /// `ids`: [rows, topk]; `to`: rows × row_bytes.
  void pack(const std::int32_t* ids, std::size_t rows, std::byte* to) const {
    for (; rows > 0; --rows) {
      std::uint64_t held = 0;
      int have = 0;
      for (int k = 0; k < topk; ++k) {
        held |= std::uint64_t{static_cast<std::uint32_t>(*ids++ + 1)} << have;
        for (have += bits; have >= 8; have -= 8, held >>= 8) *to++ = static_cast<std::byte>(held);
      }
      if (have > 0) *to++ = static_cast<std::byte>(held);
    }
  }
  /// `from` may be anything: what comes is checked as ids that were not packed are.
  void unpack(const std::byte* from, std::size_t rows, std::int32_t* ids) const {
    const std::uint64_t mask = (std::uint64_t{1} << bits) - 1;
    for (; rows > 0; --rows) {
      std::uint64_t held = 0;
      int have = 0;
      for (int k = 0; k < topk; ++k) {
        for (; have < bits; have += 8) held |= std::to_integer<std::uint64_t>(*from++) << have;
        *ids++ = static_cast<std::int32_t>(static_cast<std::uint32_t>(held & mask) - 1u);
        held >>= bits;
        have -= bits;
      }
    }
  }
};

}  // namespace ferry

// Where everything of a latency exchange lies, for kernels and for the proxy between domains.
#pragma once
#include <cstddef>
#include <cstdint>

#include "cuda/kernels/latency/view.hpp"

namespace ferry::cuda {

inline constexpr std::uint32_t kPerSlotTag = 1u << 31;
/// Bits of the tags of a combine's rows that say how it combines: the path, and above kFormatShift
/// the format.
inline constexpr int kFormatShift = 29;
inline constexpr std::uint32_t kGenerationTag = (1u << kFormatShift) - 1;

/// Words of rejoining: the round, and below it a generation.
inline constexpr int kRejoinShift = 48;

// Places; `base` is any rank's registered memory.

struct LatencyPlaces {
  const LatencyView& v;
  std::uint64_t generation;

  FERRY_FN std::size_t half() const { return generation % 2; }
  FERRY_FN std::uint32_t tag() const { return static_cast<std::uint32_t>(generation); }
  /// Of rows of a combine: ranks that take different paths find each other's tags odd, not right.
  FERRY_FN std::uint32_t sum_tag(bool per_slot) const {
    return tag() ^ (per_slot ? kPerSlotTag : 0u);
  }
  FERRY_FN std::size_t line(int source) const {
    return (half() * static_cast<std::size_t>(v.group.ranks) + static_cast<std::size_t>(source));
  }
  FERRY_FN std::size_t slot(int source, std::int64_t token) const {
    return line(source) * static_cast<std::size_t>(v.capacity) + static_cast<std::size_t>(token);
  }
  FERRY_FN std::size_t sum_slot(int row, std::int64_t token) const {
    return (half() * v.layout.sum_slots + static_cast<std::size_t>(row)) *
               static_cast<std::size_t>(v.capacity) +
           static_cast<std::size_t>(token);
  }
  FERRY_FN std::uint64_t* released(std::byte* base, int receiver) const {
    return line_of(base, v.layout.released, receiver);
  }
  FERRY_FN static std::uint64_t* line_of(std::byte* base, std::size_t lines, int rank) {
    return reinterpret_cast<std::uint64_t*>(base + lines +
                                            static_cast<std::size_t>(rank) * kLineBytes);
  }
  /// Of this rank's last rejoin: round << kRejoinShift | generation that was agreed on. Its proxy
  /// looks there; in an inbox no peer writes to this rank's own line.
  FERRY_FN std::uint64_t* rejoined(std::byte* inbox) const {
    return line_of(inbox, v.layout.answers, v.group.rank);
  }
  /// What the owner of `base` knows of `rank`: of Gone.
  FERRY_FN std::uint32_t* gone(std::byte* base, int rank) const {
    return reinterpret_cast<std::uint32_t*>(base + v.layout.gone) + rank;
  }
  /// Words of the head, then the numbers of rows.
  FERRY_FN std::uint64_t* header(std::byte* base, int source) const {
    return reinterpret_cast<std::uint64_t*>(base + v.layout.headers +
                                            line(source) * v.layout.header_bytes);
  }
  FERRY_FN std::uint64_t* numbers(std::byte* base, int source) const {
    return header(base, source) + kLatencyHeadWords;
  }
  FERRY_FN std::uint64_t* places(std::byte* base, int source) const {
    return header(base, source) + v.layout.places_at / 8;
  }
  FERRY_FN std::uint64_t* header_weights(std::byte* base, int source) const {
    return header(base, source) + v.layout.weights_at / 8;
  }
  FERRY_FN std::uint32_t* row_tags(std::byte* base, int source, std::int64_t token) const {
    return reinterpret_cast<std::uint32_t*>(base + v.layout.row_tags) +
           slot(source, token) * kMaxParts;
  }
  FERRY_FN std::byte* row(std::byte* base, int source, std::int64_t token) const {
    return base + v.layout.rows + slot(source, token) * v.layout.row_slot;
  }
  FERRY_FN std::uint64_t* weights(std::byte* base, int source) const {
    return reinterpret_cast<std::uint64_t*>(base + v.layout.weights) +
           slot(source, 0) * static_cast<std::size_t>(v.topk);
  }
  FERRY_FN std::uint32_t* sum_tags(std::byte* base, int row, std::int64_t token) const {
    return reinterpret_cast<std::uint32_t*>(base + v.layout.sum_tags) +
           sum_slot(row, token) * kMaxParts;
  }
  FERRY_FN std::byte* sum(std::byte* base, int row, std::int64_t token,
                          std::size_t row_bytes) const {
    return base + v.layout.sums + sum_slot(row, token) * row_bytes;
  }
  /// The same of a row that is not as it is.
  FERRY_FN std::byte* encoded_sum(std::byte* base, int row, std::int64_t token) const {
    return base + v.layout.encoded_sums + sum_slot(row, token) * v.layout.encoded_slot;
  }
};

}  // namespace ferry::cuda

// An array of flags, one for each rank, and the wait for all of them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "protocol/reach.hpp"
#include "protocol/sync.hpp"

namespace ferry::protocol {

/// Where an array of flags lies, at the same place in every rank's memory: flag[r] of rank p is
/// written by rank r alone.
struct FlagLayout {
  int ranks = 0;
  Place flags;
  std::uint64_t stride = kFlagStride;

  FERRY_FN constexpr std::uint64_t bytes() const {
    return static_cast<std::uint64_t>(ranks) * stride;
  }
  FERRY_FN constexpr Place place(int writer) const {
    return flags.at(static_cast<std::uint64_t>(writer) * stride);
  }
};

/// The own array, as memory.
struct FlagArray {
  std::byte* base = nullptr;
  std::uint64_t stride = kFlagStride;
  int ranks = 0;
  const std::uint8_t* live = nullptr;  ///< [ranks], 0: a hole, whose flag nobody awaits; null: all

  FERRY_FN bool has(int writer) const { return live == nullptr || live[writer] != 0; }
  FERRY_FN Flag operator[](int writer) const {
    return Flag{
        reinterpret_cast<std::uint64_t*>(base + static_cast<std::uint64_t>(writer) * stride)};
  }
};

/// No limit to how far ahead a peer may be: for flags whose generations have gaps.
inline constexpr std::uint64_t kAnyAhead = ~0ull;

/// What a wait relies on, as parameters, so that the explorer can break them one by one.
struct AwaitTraits {
  /// Acquire: everything that the writer did before publishing is visible after the wait.
  static constexpr order kLoad = order::acquire;
  /// Never ==: a fast peer may have published the next generation already.
  FERRY_FN static constexpr bool reached(std::uint64_t seen, std::uint64_t wanted) {
    return seen >= wanted;
  }
  /// How many of the flags a wait for all looks at.
  FERRY_FN static constexpr int awaited(int ranks) { return ranks; }
};

/// Waits until `flag`, written by `peer`, reaches `wanted`; overtaken if it is `depth` or more
/// ahead. On failure the status holds `peer` (unless the watch named the one to blame), the value
/// wanted and the value seen.
template <class Traits = AwaitTraits, class W>
FERRY_FN Status await_flag(Flag flag, int peer, std::uint64_t wanted, std::uint64_t depth,
                           W& watch) {
  Status status = flag.wait_until(
      [wanted](std::uint64_t seen) { return Traits::reached(seen, wanted); }, watch, Traits::kLoad);
  status.expected = wanted;
  if (status.ok() && status.seen > wanted && status.seen - wanted >= depth) {
    status.code = Status::Code::kOvertaken;
  }
  if (!status.ok() && status.peer < 0) status.peer = peer;
  return status;
}

/// Waits for every flag of the array. On failure `peer` is the lowest rank whose flag is missing,
/// unless the watch named another.
template <class Traits = AwaitTraits, class W>
FERRY_FN Status await_all(const FlagArray& flags, std::uint64_t wanted, std::uint64_t depth,
                          W& watch) {
  for (int peer = 0; peer < Traits::awaited(flags.ranks); ++peer) {
    if (!flags.has(peer)) continue;
    const Status status = await_flag<Traits>(flags[peer], peer, wanted, depth, watch);
    if (!status.ok()) return status;
  }
  Status done;
  done.expected = wanted;
  done.seen = wanted;
  return done;
}

}  // namespace ferry::protocol

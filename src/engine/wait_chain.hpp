// Whom each rank waits for, as it says itself: in a group of several domains nobody sees of a far
// rank whether it waits. A rank that is late may be held up by another one.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/layout.hpp"
#include "engine/reach.hpp"
#include "protocol/flags.hpp"
#include "protocol/status.hpp"

namespace ferry::engine {

class WaitChain {
 public:
  enum class In : std::uint8_t { call, transfer };

  /// `control`: this rank's control segment.
  WaitChain(int ranks, int rank, std::byte* control, const ControlLayout& layout)
      : ranks_(ranks), rank_(rank), control_(control), layout_(layout) {}

  /// Tells all ranks for whom this one waits, unless it has said so; -1: for nobody any more. Of
  /// one thread at a time for each `In`.
  void say(FabricReach& reach, In in, int peer, protocol::Generation generation);
  /// For whom the rank has said that it waits; -1: it has not. What it said before the generation
  /// `since`, in an earlier epoch, is over.
  int awaited_by(int rank, protocol::Generation since) const;
  /// The end of the chain from the rank: the first that has not said for whom it waits. Where the
  /// chain comes to this rank, or goes in a circle: the rank itself.
  int last_after(int rank, protocol::Generation since) const;

 private:
  static constexpr std::size_t kIns = 2;
  std::size_t at(int rank, In in) const {
    return layout_.awaited + static_cast<std::size_t>(rank) * kLineBytes +
           static_cast<std::size_t>(in) * protocol::kFlagStride;
  }

  int ranks_;
  int rank_;
  std::byte* control_;
  ControlLayout layout_;
  std::array<std::uint64_t, kIns> said_{};
};

}  // namespace ferry::engine

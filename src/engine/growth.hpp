// Registered memory grows by agreement: every rank takes part, whether or not it wants more itself.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/channel.hpp"
#include "fabric/fabric.hpp"

namespace ferry::engine {

/// Segments added later are whole huge pages.
std::size_t segment_bytes(std::size_t bytes);

/// At least half of what there is, so that the number of segments stays small.
inline std::size_t grown_by(std::size_t total) {
  return total / 2;
}

/// What `add_segments` yields: this rank's segment (bytes 0: none), and every rank's number for it.
struct AddedSegments {
  fabric::Segment mine{};
  /// [ranks]; meaningless of a rank that is lost, or that added nothing.
  std::vector<fabric::SegmentId> ids{};
  std::vector<std::uint64_t> bytes{};  ///< [ranks]
};

/// `bytes` > 0: what this rank needs; it takes `wanted` if they are to be had, else `bytes`.
/// `sized_by` names the arguments that give the size.
struct Growth {
  const char* stage = "";
  const char* sized_by = "";
  std::size_t bytes = 0;
  std::size_t wanted = 0;
};

/// Throws Error(mismatch), after `all_ranks_throw`, when a message of the last swap is of another
/// call than `mine`.
void check_same_call(Channel& channel, const char* stage, const CallSignature& mine);

/// Registers one more segment on every rank that wants one, and attaches it everywhere. If some
/// rank has no memory, every rank throws Error(exhausted), and what others registered joins their
/// arenas.
AddedSegments add_segments(Channel& channel, Memory& memory, const Growth& growth);

}  // namespace ferry::engine

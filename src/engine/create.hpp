// Creation of a group, the only time at which the bootstrap is used: steps that all ranks take
// together, and what a rank must tell of its segments.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "fabric/fabric.hpp"
#include "ferry/bootstrap.hpp"
#include "ferry/error.hpp"
#include "ferry/group.hpp"

namespace ferry::engine {

/// One segment's id, size and handle, as it crosses at creation.
struct Card {
  std::uint32_t id = 0;
  std::uint32_t handle_bytes = 0;
  std::uint64_t bytes = 0;
  std::byte handle[fabric::kMaxHandleBytes]{};
};
using Cards = std::array<Card, 2>;  // control segment, arena

Card card_of(const fabric::Segment& segment);
std::vector<std::byte> bytes_of(const Cards& cards);

/// A step that every rank takes and that may fail on one: all learn of it, so nobody waits for a
/// rank that gave up. Returns what the ranks' steps yielded.
std::vector<std::vector<std::byte>> together(Bootstrap& bootstrap, const GroupConfig& config,
                                             const char* stage,
                                             const std::function<std::vector<std::byte>()>& step);

/// What `peer` sent: Throws Error(mismatch) unless it registered the same numbers and sizes as
/// `mine`: flags are written there unchecked later on.
Cards checked_cards(const std::vector<std::byte>& bytes, int rank, int peer, const Cards& mine);

/// Attaches the peers' segments to `memory`, which has the words of a fabric.
template <class Registered>
void attach_all(Registered& memory, const std::vector<std::vector<std::byte>>& cards,
                const Cards& mine) {
  for (int peer = 0; peer < memory.size(); ++peer) {
    const Cards theirs =
        checked_cards(cards[static_cast<std::size_t>(peer)], memory.rank(), peer, mine);
    if (peer == memory.rank()) continue;
    for (const Card& card : theirs) {
      memory.attach(peer, card.id, card.bytes, {card.handle, card.handle_bytes});
    }
  }
}

}  // namespace ferry::engine

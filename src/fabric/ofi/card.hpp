// What a process that joins a group and its ranks in other domains tell each other of their
// endpoints and memory. All of it is checked: it comes over the network.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fabric/ofi/handshake.hpp"
#include "fabric/segment_handle.hpp"

namespace ferry::fabric::ofi {

/// What a rank shows to processes of its user on its machine that will join.
struct Invitation {
  JobKey key{};
  std::string address{};  ///< at which it listens
  int local = 1;          ///< ranks of the machine
};

/// How a rank is reached.
struct Card {
  struct Segment {
    SegmentId id = 0;
    std::uint64_t bytes = 0;
    std::vector<std::byte> handle{};
  };
  Handshake handshake{};
  std::vector<Segment> segments{};
};

std::vector<std::byte> to_bytes(const Invitation& invitation);
/// Throws Error(mismatch) naming `rank`.
Invitation invitation_from(std::span<const std::byte> bytes, int rank);

std::vector<std::byte> to_bytes(const Card& card);
/// Throws Error(mismatch) naming `rank` and `peer`, whose bytes these are.
Card card_from(std::span<const std::byte> bytes, int rank, int peer);

}  // namespace ferry::fabric::ofi

// What ranks tell each other when an ofi fabric is created.
#pragma once
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "fabric/segment_handle.hpp"

namespace ferry::fabric::ofi {

/// What a rank says first.
struct Offer {
  JobKey key{};                        ///< rank 0's is the job's; the others send zeros
  std::string problem{};               ///< why this rank has no NIC; empty: it has
  std::string boot_id{};               ///< which kernel it runs on
  std::vector<std::string> nearest{};  ///< Nic::id of its nearest NICs
};

/// What it says when it knows with whom it shares them.
struct Handshake {
  std::string problem{};                        ///< why this rank has no endpoint; empty: it has
  std::string provider{};                       ///< the same on all ranks
  std::string boot_id{};                        ///< which kernel it runs on
  std::string processes{};                      ///< which processes see each other there
  std::string address{};                        ///< at which it listens
  std::vector<std::string> networks{};          ///< of its NICs
  std::vector<std::vector<std::byte>> names{};  ///< of its endpoints: [endpoints][NICs]
};

std::vector<std::byte> to_bytes(const Offer& offer);
/// Throws Error(mismatch) naming `rank` and `peer`, whose bytes these are.
Offer offer_from(std::span<const std::byte> bytes, int rank, int peer);
/// Throws, on every rank alike, unless all have a NIC.
void check_offers(const std::vector<Offer>& offers, int rank);

std::vector<std::byte> to_bytes(const Handshake& handshake);
/// Throws Error(mismatch) naming `rank` and `peer`, whose bytes these are.
Handshake handshake_from(std::span<const std::byte> bytes, int rank, int peer);

/// Throws, on every rank alike, unless all have endpoints of the same provider, as many on each
/// NIC, that the others can reach.
void check_handshakes(const std::vector<Handshake>& handshakes, int rank);

/// Of two that did not begin together: throws Error(mismatch) naming both unless they can reach
/// each other.
void check_joined(const Handshake& mine, int rank, const Handshake& theirs, int peer);

}  // namespace ferry::fabric::ofi

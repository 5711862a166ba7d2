// What the ranks of an elastic group tell each other of who is in it: views and statements. How
// they agree: membership.hpp.
#pragma once

#include <algorithm>
#include <cstdint>

#include "protocol/seat_set.hpp"
#include "protocol/status.hpp"

namespace ferry::protocol {

/// The number of a membership; every message carries it. A group begins with 1; 0: a joiner.
using Epoch = std::uint64_t;

/// What membership relies on, as parameters, so that the explorer can break it.
struct MembershipTraits {
  static constexpr int kSeats = 2048;
  static constexpr int kJoins = 8;  ///< joiners that one epoch takes in
  static constexpr bool kStops = true;
  static constexpr bool kPromises = true;
  static constexpr bool kAdopts = true;
  static constexpr bool kLastPromise = true;
  static constexpr bool kQuarantine = true;
  static constexpr bool kHoles = true;
  static constexpr bool kTickets = true;
  static constexpr bool kOffered = true;
  static constexpr bool kEpochs = true;
  static constexpr bool kNextLeader = true;
  static constexpr bool kGoesOn = true;
  static constexpr bool kArbiterPromises = true;
  /// `votes` of `seats`, each seat two; an arbiter has one.
  static constexpr bool majority(int votes, int seats) { return votes > seats; }
  static constexpr Generation after(Generation newest) { return newest + 2; }
  static constexpr std::uint64_t newer(std::uint64_t mine, std::uint64_t theirs) {
    return std::max(mine, theirs);
  }
};

/// A process that takes a seat. The ticket tells it from others that want or had the same seat.
struct Join {
  std::uint64_t seat = 0;
  std::uint64_t ticket = 0;  ///< 0: none
  friend constexpr bool operator==(const Join&, const Join&) = default;
};

/// The membership of one epoch.
template <class Traits = MembershipTraits>
struct MembershipView {
  Epoch epoch = 0;
  Generation generation = 0;  ///< the first one of this epoch
  std::uint64_t step = 0;     ///< the newest step that anybody committed
  SeatSet<Traits::kSeats> live;
  Join joins[Traits::kJoins];  ///< who is new in this epoch

  constexpr std::uint64_t ticket(int seat) const {
    for (const Join& join : joins) {
      if (join.ticket != 0 && join.seat == static_cast<std::uint64_t>(seat)) return join.ticket;
    }
    return 0;
  }
  friend constexpr bool operator==(const MembershipView&, const MembershipView&) = default;
};

/// All that a rank says. Within an epoch a statement with a higher `number` replaces the others.
template <class Traits = MembershipTraits>
struct Statement {
  Epoch epoch = 0;
  std::uint64_t number = 0;
  std::uint64_t stopped = 0;            ///< 1: it uses no generation of this epoch any more
  std::uint64_t round = 0;              ///< the newest it heard of: its promise; 0: none
  std::uint64_t accepted = 0;           ///< the round in which it accepted `proposal`; 0: none
  std::uint64_t ticket = 0;             ///< of a joiner
  Generation generation = 0;            ///< the newest that it used
  std::uint64_t step = 0;               ///< the newest that it committed
  SeatSet<Traits::kSeats> suspects;     ///< its own: it wants to leave
  SeatSet<Traits::kSeats> quarantined;  ///< who may still write to its memory
  MembershipView<Traits> view;          ///< of `epoch`
  MembershipView<Traits> proposal;      ///< for the next one
};

}  // namespace ferry::protocol

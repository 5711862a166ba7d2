// Credits: latency mode writes without asking, into buffers that its receiver is known to have
// dropped. Generation g uses buffer g % 2; g may be written once g - 2 was released.
#pragma once

#include <cstddef>
#include <cstdint>

#include "protocol/flags.hpp"
#include "protocol/reach.hpp"
#include "protocol/sync.hpp"

namespace ferry::protocol {

/// Where the two arrays of flags lie, at the same place in every rank's memory.
struct CreditLayout {
  FlagLayout arrived;   ///< arrived[source], written by the sender at the receiver
  FlagLayout released;  ///< released[receiver], written by the receiver at the sender
};

/// What credits rely on, as parameters, so that the explorer can break them.
struct CreditTraits {
  using Await = AwaitTraits;
  static constexpr std::uint64_t kBuffers = 2;
  /// A sender of g waits for the release of g - kWindow.
  static constexpr std::uint64_t kWindow = 2;
  static constexpr bool kCounted = true;
};

/// The credits of one rank with all ranks. Generations count from 1 without gaps.
/// Sender: `await_credit`, write under `tag` into buffer `buffer(g)`, `announce`. Receiver:
/// `await_arrivals`, read, and when the result is dropped: `release`.
template <class Traits = CreditTraits>
class Credit {
 public:
  FERRY_FN Credit(const CreditLayout& layout, int self, std::byte* arrived, std::byte* released)
      : layout_(layout),
        self_(self),
        arrived_{arrived, layout.arrived.stride, layout.arrived.ranks},
        released_{released, layout.released.stride, layout.released.ranks} {}

  FERRY_FN static constexpr std::uint64_t buffer(Generation generation) {
    return generation % Traits::kBuffers;
  }
  FERRY_FN static constexpr std::uint64_t tag(Generation generation) {
    return make_tag(Channel::kArrival, generation);
  }

  /// Sender: waits until `receiver` released the generation that used this buffer before.
  template <class W>
  FERRY_FN Status await_credit(int receiver, Generation generation, W& watch) const {
    if (generation <= Traits::kWindow) return {};  // both buffers start free
    return await_flag<typename Traits::Await>(released_[receiver], receiver,
                                              generation - Traits::kWindow, Traits::kWindow, watch);
  }

  /// Sender: all of `generation` for `receiver` is written: `bytes` in all.
  template <class R>
    requires Reach<R>
  FERRY_FN void announce(R& reach, int receiver, Generation generation, std::uint64_t bytes) const {
    reach.publish(receiver, Signal{layout_.arrived.place(self_), generation, tag(generation),
                                   Traits::kCounted ? bytes : 0});
  }

  /// Receiver: waits for what one source sent, or for all, lowest rank first.
  template <class W>
  FERRY_FN Status await_arrival(int source, Generation generation, W& watch) const {
    return await_flag<typename Traits::Await>(arrived_[source], source, generation, 2, watch);
  }
  template <class W>
  FERRY_FN Status await_arrivals(Generation generation, W& watch) const {
    return await_all<typename Traits::Await>(arrived_, generation, 2, watch);
  }

  /// Receiver: `generation` and all before it are read and dropped; every sender may reuse them.
  /// Results dropped out of order go through a `DropOrder` first.
  template <class R>
    requires Reach<R>
  FERRY_FN void release(R& reach, Generation generation) const {
    for (int i = 0; i < layout_.released.ranks; ++i) {
      reach.publish((self_ + i) % layout_.released.ranks,
                    Signal{layout_.released.place(self_), generation,
                           make_tag(Channel::kCredit, generation), 0});
    }
  }

 private:
  CreditLayout layout_;
  int self_;
  FlagArray arrived_;
  FlagArray released_;
};

/// What the order of drops relies on.
struct DropTraits {
  static constexpr bool kHoldBack = true;
};

/// Turns drops in any order into releases in order: a credit speaks for all generations before it,
/// so generation g + 1 dropped first must wait for g. Used by one thread; at most 64 in flight.
template <class Traits = DropTraits>
class DropOrder {
 public:
  /// Everything up to `released` counts as dropped.
  constexpr explicit DropOrder(Generation released = 0) : released_(released) {}

  /// Notes that `generation` was dropped; returns the newest generation before which nothing is
  /// alive (0: none yet). Publish it if it grew.
  constexpr Generation drop(Generation generation) {
    if (!Traits::kHoldBack) return generation;
    if (generation > released_) dropped_ |= 1ull << (generation - released_ - 1);
    while ((dropped_ & 1) != 0) {
      dropped_ >>= 1;
      ++released_;
    }
    return released_;
  }

 private:
  Generation released_;
  std::uint64_t dropped_ = 0;  // bit i: generation released_ + 1 + i
};

}  // namespace ferry::protocol

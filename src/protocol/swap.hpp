// Swap: every rank gives every rank one small message of fixed size. Counts, grants, descriptors,
// segment handles: all are swaps.
//
// Each rank owns a mailbox of two slots for each source. Swap g writes slot [g % 2]. Two suffice:
// whoever posts swap g+2 has passed swap g+1, so it has seen everyone's flag g+1, and everyone
// published that flag after it finished reading swap g.
#pragma once

#include <cstddef>
#include <cstdint>

#include "protocol/flags.hpp"
#include "protocol/reach.hpp"
#include "protocol/sync.hpp"

namespace ferry::protocol {

/// Where the mailbox lies, at the same place in every rank's memory.
struct SwapLayout {
  std::uint64_t message_bytes = 0;
  Place slots;                    ///< [2][ranks] slots
  std::uint64_t slot_stride = 0;  ///< >= message_bytes; a multiple of 64 keeps sources apart
  FlagLayout flags;

  FERRY_FN constexpr std::uint64_t slots_bytes() const {
    return 2 * static_cast<std::uint64_t>(flags.ranks) * slot_stride;
  }
};

/// What swap relies on, as parameters, so that the explorer can break it.
struct SwapTraits {
  using Await = AwaitTraits;
  static constexpr std::uint64_t kSlots = 2;
  /// A network counts the message's bytes before it shows the flag.
  static constexpr bool kCounted = true;
};

/// The swap of one rank. Holds no state but addresses: the caller counts the generations, from 1,
/// without gaps: each generation is one swap on this mailbox.
/// Use: `post` to every rank, `await`, read every `message`; all reading of generation g is over
/// before this rank posts g+1.
template <class Traits = SwapTraits>
class Swap {
 public:
  /// `slots`, `flags`: this rank's own mailbox as memory, zeroed before anyone posts.
  /// `live`: [ranks], or null (flags.hpp): nothing is posted to holes, and nobody waits for them.
  FERRY_FN Swap(const SwapLayout& layout, int self, std::byte* slots, std::byte* flags,
                const std::uint8_t* live = nullptr)
      : layout_(layout),
        self_(self),
        slots_(slots),
        flags_{flags, layout.flags.stride, layout.flags.ranks, live} {}

  FERRY_FN int ranks() const { return flags_.ranks; }

  /// Gives `peer` (or the own rank) this rank's message of `generation`: `bytes` of it, at most
  /// `message_bytes`.
  template <class R>
    requires Reach<R>
  FERRY_FN void post(R& reach, int peer, Generation generation, const void* message,
                     std::uint64_t bytes) const {
    const std::uint64_t tag = make_tag(Channel::kSwap, generation);
    if (bytes > 0) {
      reach.write(peer, layout_.slots.at(slot_offset(self_, generation)), message, bytes, tag);
    }
    reach.publish(
        peer, Signal{layout_.flags.place(self_), generation, tag, Traits::kCounted ? bytes : 0});
  }

  template <class R>
    requires Reach<R>
  FERRY_FN void post(R& reach, int peer, Generation generation, const void* message) const {
    post(reach, peer, generation, message, layout_.message_bytes);
  }

  /// Gives every rank its message; message p begins at `messages + p * stride` (0: the same one).
  template <class R>
    requires Reach<R>
  FERRY_FN void post_all(R& reach, Generation generation, const void* messages,
                         std::uint64_t stride) const {
    post_all(reach, generation, messages, stride, layout_.message_bytes);
  }
  template <class R>
    requires Reach<R>
  FERRY_FN void post_all(R& reach, Generation generation, const void* messages,
                         std::uint64_t stride, std::uint64_t bytes) const {
    for (int i = 0; i < ranks(); ++i) {
      const int peer = (self_ + i) % ranks();  // each starts elsewhere: no rush on rank 0
      if (!flags_.has(peer)) continue;
      post(reach, peer, generation,
           static_cast<const std::byte*>(messages) + static_cast<std::uint64_t>(peer) * stride,
           bytes);
    }
  }

  /// Waits until every rank's message of `generation` is here. On failure `peer` is the lowest rank
  /// whose message is missing, unless the watch named another. A peer two or more generations ahead
  /// has overwritten our slot: overtaken.
  template <class W>
  FERRY_FN Status await(Generation generation, W& watch) const {
    return await_all<typename Traits::Await>(flags_, generation, Traits::kSlots, watch);
  }

  /// The message that `source` gave this rank. Valid from a successful `await(generation)` until
  /// this rank's next `post`.
  FERRY_FN const std::byte* message(int source, Generation generation) const {
    return slots_ + slot_offset(source, generation);
  }

 private:
  FERRY_FN std::uint64_t slot_offset(int source, Generation generation) const {
    return ((generation % Traits::kSlots) * static_cast<std::uint64_t>(layout_.flags.ranks) +
            static_cast<std::uint64_t>(source)) *
           layout_.slot_stride;
  }

  SwapLayout layout_;
  int self_;
  std::byte* slots_;
  FlagArray flags_;
};

}  // namespace ferry::protocol

// Delivery: rows move, then a flag for each pair says that they are there.
//
// Push: the receiver grants memory in a swap; the sender writes rows there under `tag`, then
// `deliver`; the receiver waits for all. It grants the same memory again only after it has read:
// the next swap carries that order.
// Pull: the owner lends memory by a descriptor in a swap; the readers read, then `give_back`; the
// owner waits for all before it writes there again.
#pragma once

#include <cstddef>
#include <cstdint>

#include "protocol/flags.hpp"
#include "protocol/reach.hpp"
#include "protocol/sync.hpp"

namespace ferry::protocol {

/// What delivery relies on, as parameters, so that the explorer can break it.
struct DeliveryTraits {
  using Await = AwaitTraits;
  /// A network counts the rows' bytes before it shows the flag.
  static constexpr bool kCounted = true;
  static constexpr Channel kChannel = Channel::kDelivery;
};

/// Of a second delivery in the same generation, whose bytes are counted apart: what is
/// announced before rows.
struct AnnounceTraits : DeliveryTraits {
  static constexpr Channel kChannel = Channel::kAnnounced;
};

/// The delivery flags of one rank: delivered[source] = generation. Generations grow, gaps allowed.
template <class Traits = DeliveryTraits>
class Delivery {
 public:
  /// `live`: [ranks], or null (flags.hpp).
  FERRY_FN Delivery(const FlagLayout& layout, int self, std::byte* flags,
                    const std::uint8_t* live = nullptr)
      : layout_(layout), self_(self), flags_{flags, layout.stride, layout.ranks, live} {}

  /// The tag under which all rows of a generation are written.
  FERRY_FN static constexpr std::uint64_t tag(Generation generation) {
    return make_tag(Traits::kChannel, generation);
  }

  /// Says that all rows of `generation` for `receiver` are written: `bytes` in all, maybe 0. Called
  /// once for every receiver, also for one that gets nothing.
  template <class R>
    requires Reach<R>
  FERRY_FN void deliver(R& reach, int receiver, Generation generation, std::uint64_t bytes) const {
    reach.publish(receiver, Signal{layout_.place(self_), generation, tag(generation),
                                   Traits::kCounted ? bytes : 0});
  }

  /// Waits for the rows of one source.
  template <class W>
  FERRY_FN Status await_from(int source, Generation generation, W& watch) const {
    return await_flag<typename Traits::Await>(flags_[source], source, generation, kAnyAhead, watch);
  }

  /// Waits for the rows of every source, lowest rank first.
  template <class W>
  FERRY_FN Status await(Generation generation, W& watch) const {
    return await_all<typename Traits::Await>(flags_, generation, kAnyAhead, watch);
  }

 private:
  FlagLayout layout_;
  int self_;
  FlagArray flags_;
};

/// What a loan relies on, as parameters, so that the explorer can break it.
struct LoanTraits {
  using Await = AwaitTraits;
  /// How far behind a reader's flag may be for its loan to count as returned.
  static constexpr std::uint64_t kSlack = 0;
};

/// The flags of the pull form: done[reader] = generation. Generations grow, gaps allowed.
template <class Traits = LoanTraits>
class Loan {
 public:
  FERRY_FN Loan(const FlagLayout& layout, int self, std::byte* flags)
      : layout_(layout), self_(self), flags_{flags, layout.stride, layout.ranks} {}

  /// A reader says that it reads `owner`'s memory of `generation` no more. Its reads stay before
  /// this (release), the owner's writes after its wait (acquire).
  template <class R>
    requires Reach<R>
  FERRY_FN void give_back(R& reach, int owner, Generation generation) const {
    reach.publish(
        owner, Signal{layout_.place(self_), generation, make_tag(Channel::kLoan, generation), 0});
  }

  /// The owner waits until every reader gave back `generation`.
  template <class W>
  FERRY_FN Status await(Generation generation, W& watch) const {
    return await_all<typename Traits::Await>(flags_, generation - Traits::kSlack, kAnyAhead, watch);
  }

 private:
  FlagLayout layout_;
  int self_;
  FlagArray flags_;
};

}  // namespace ferry::protocol

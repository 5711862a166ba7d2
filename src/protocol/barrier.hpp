// Barrier: nobody leaves before everybody has come. A swap without a message.
#pragma once

#include <cstddef>

#include "protocol/flags.hpp"
#include "protocol/reach.hpp"
#include "protocol/sync.hpp"

namespace ferry::protocol {

/// What the barrier relies on, as parameters, so that the explorer can break it.
struct BarrierTraits {
  using Await = AwaitTraits;
  /// The value that says "I am in barrier g".
  FERRY_FN static constexpr std::uint64_t value(Generation generation) { return generation; }
};

/// The barrier of one rank. Generations grow from barrier to barrier, by any step, the same on all
/// ranks. What a rank did before `arrive` is visible to every rank after its `await`.
template <class Traits = BarrierTraits>
class Barrier {
 public:
  FERRY_FN Barrier(const FlagLayout& layout, int self, std::byte* flags)
      : layout_(layout), self_(self), flags_{flags, layout.stride, layout.ranks} {}

  /// Tells every rank, the own included, that this one is here.
  template <class R>
    requires Reach<R>
  FERRY_FN void arrive(R& reach, Generation generation) const {
    for (int i = 0; i < layout_.ranks; ++i) {
      reach.publish((self_ + i) % layout_.ranks,
                    Signal{layout_.place(self_), Traits::value(generation),
                           make_tag(Channel::kBarrier, generation), 0});
    }
  }

  /// Waits for all. On failure `peer` is the lowest rank that is missing, unless the watch named
  /// another.
  template <class W>
  FERRY_FN Status await(Generation generation, W& watch) const {
    return await_all<typename Traits::Await>(flags_, Traits::value(generation), kAnyAhead, watch);
  }

 private:
  FlagLayout layout_;
  int self_;
  FlagArray flags_;
};

}  // namespace ferry::protocol

// Masks: a rank that misses a deadline is left out by the others, each of which decides for itself.
//
// What keeps tokens right when ranks disagree about who is left out:
// - a flag is taken for generation g only if it says g, or the next (`await_some`): a late write of
//   an older generation counts for nothing. If it says the next, what came must say itself that it
//   is of g: a rank that masked this one for a while left g out;
// - every place is written by one rank alone, so what a late rank writes spoils only what it would
//   have sent itself, and no rank writes to a peer without the peer's credit;
// - a rank says that its part of a generation is there only if it is: to a peer whose rows it did
//   not get it says nothing.
// A rank that masks a peer tells it. Who hears that from a peer that it has not masked itself was
// overtaken, and stops before it masks the ranks that went on.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "protocol/flags.hpp"
#include "protocol/passed_on.hpp"
#include "protocol/reach.hpp"
#include "protocol/sync.hpp"

namespace ferry::protocol {

/// One byte for each rank, not zero for those in the set.
using RankSet = std::span<std::uint8_t>;

/// A watch that ends a sleep after a short while, to look at other flags.
template <class W>
struct ShortSleep : PassedOn<W> {
  using PassedOn<W>::watch;
  bool spins = false;
  std::uint64_t longest_ns = 0;
  bool over = false;

  std::uint64_t spin_ns() { return spins ? static_cast<std::uint64_t>(watch.spin_ns()) : 0; }
  std::uint64_t slice_ns() { return std::min<std::uint64_t>(watch.slice_ns(), longest_ns); }
  Status check() {
    Status status = watch.check();
    if (!status.ok()) return status;
    over = true;
    status.code = Status::Code::kInterrupted;
    return status;
  }
};

/// Waits until the flag of some rank in `pending` reaches `wanted`, and moves all those that have
/// from `pending` to `came`. Whichever comes first is served first, so that a rank which is late
/// holds up nobody but the one who waits for it. Overtaken if a flag is `depth` or more ahead. On
/// failure the status names the lowest rank that is missing, unless the watch named another.
template <class Traits = AwaitTraits, class W>
Status await_some(const FlagArray& flags, std::uint64_t wanted, std::uint64_t depth,
                  RankSet pending, RankSet came, W& watch) {
  constexpr std::uint64_t kShortNs = 500'000;
  for (bool first_poll = true;; first_poll = false) {
    int missing = -1, others = 0;
    bool any = false;
    for (int peer = 0; peer < flags.ranks; ++peer) {
      const auto p = static_cast<std::size_t>(peer);
      if (pending[p] == 0) continue;
      // Acquire: as in every wait, what the writer did before is visible after.
      const std::uint64_t seen = flags[peer].load(Traits::kLoad);
      if (!Traits::reached(seen, wanted)) {
        if (missing < 0) {
          missing = peer;
        } else {
          ++others;
        }
        continue;
      }
      if (seen > wanted && seen - wanted >= depth) {
        return {Status::Code::kOvertaken, peer, wanted, seen};
      }
      pending[p] = 0;
      came[p] = 1;
      any = true;
    }
    if (any || missing < 0) return {};
    ShortSleep<W> sleep{{watch}, first_poll, others > 0 ? kShortNs : ~0ull};
    Status status = flags[missing].wait_until(
        [wanted](std::uint64_t seen) { return Traits::reached(seen, wanted); }, sleep,
        Traits::kLoad);
    if (status.ok() || sleep.over) continue;
    const bool gone = status.code == Status::Code::kPeerFailed;
    if (gone || status.code == Status::Code::kDeadline) {
      // What has come by now counts: a rank may tell before it goes, and one that was itself
      // stopped past its deadline finds what others sent meanwhile.
      bool any_came = false;
      for (int peer = 0; peer < flags.ranks; ++peer) {
        any_came = any_came || (pending[static_cast<std::size_t>(peer)] != 0 &&
                                Traits::reached(flags[peer].load(Traits::kLoad), wanted));
      }
      if (any_came) continue;
    }
    status.expected = wanted;
    if (status.peer < 0) status.peer = missing;
    return status;
  }
}

/// What a rank tells a peer about its mask of it: since which generation the mask, or its end,
/// counts. Grows with every change, and so is never cleared.
FERRY_FN constexpr std::uint64_t pack_mask(Generation since, bool masked) {
  return since << 1 | (masked ? 1 : 0);
}
/// The word after `last`, in generation `now`.
FERRY_FN constexpr std::uint64_t next_mask(std::uint64_t last, Generation now, bool masked) {
  const Generation since = std::max(now, (last >> 1) + 1);
  return pack_mask(since, masked);
}

/// The masks of which peers have told this rank: told[peer], written by the peer alone.
class ToldMasks {
 public:
  FERRY_FN ToldMasks(const FlagLayout& layout, int self, std::byte* told)
      : layout_(layout), self_(self), flags_{told, layout.stride, layout.ranks} {}

  template <class R>
    requires Reach<R>
  FERRY_FN void tell(R& reach, int peer, std::uint64_t word) const {
    reach.publish(peer, Signal{layout_.place(self_), word, make_tag(Channel::kMask, word), 0});
  }

  /// The lowest peer that goes without this rank since a generation after `base`, among those that
  /// `counts` lets pass; -1: none.
  template <class Counts>
  FERRY_FN int find(Generation base, Counts counts) const {
    for (int peer = 0; peer < flags_.ranks; ++peer) {
      // relaxed: the word is the whole message; nothing else is read on the strength of it.
      const std::uint64_t word = flags_[peer].load(order::relaxed);
      if ((word & 1) != 0 && (word >> 1) > base && counts(peer)) return peer;
    }
    return -1;
  }

 private:
  FlagLayout layout_;
  int self_;
  FlagArray flags_;
};

}  // namespace ferry::protocol

// Failure broadcasts: a rank that fails, leaves, or finds another dead tells everyone, once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "protocol/flags.hpp"
#include "protocol/reach.hpp"
#include "protocol/sync.hpp"

namespace ferry::protocol {

/// A failure broadcast: why `culprit` is no longer there, in which generation, told by `reporter`.
struct FailureBroadcast {
  /// In the order of belief: what is certain wins over what was concluded.
  enum class Kind : std::uint8_t {
    kNone = 0,
    kStopped = 1,  ///< the culprit wants the membership to change (reporter == culprit)
    kLate = 2,     ///< the culprit missed the reporter's deadline
    kLeft = 3,     ///< the culprit left the group (reporter == culprit)
    kFailed = 4,   ///< the culprit reports its own failure (reporter == culprit)
    kDied = 5,     ///< the culprit's process is gone
  };

  Kind kind = Kind::kNone;
  int culprit = -1;
  int reporter = -1;
  Generation generation = 0;  ///< modulo 2^40

  friend constexpr bool operator==(const FailureBroadcast&, const FailureBroadcast&) = default;
};

/// One word: kind (8 bits), culprit (16), generation (40). Never 0 for a real failure broadcast.
FERRY_FN constexpr std::uint64_t pack_broadcast(FailureBroadcast::Kind kind, int culprit,
                                                Generation generation) {
  return (static_cast<std::uint64_t>(kind) << 56) |
         (static_cast<std::uint64_t>(static_cast<std::uint16_t>(culprit)) << 40) |
         (generation & ((1ull << 40) - 1));
}

FERRY_FN constexpr FailureBroadcast unpack_broadcast(std::uint64_t word, int reporter) {
  FailureBroadcast broadcast;
  broadcast.kind = static_cast<FailureBroadcast::Kind>(word >> 56);
  broadcast.culprit = static_cast<int>((word >> 40) & 0xffff);
  broadcast.reporter = reporter;
  broadcast.generation = word & ((1ull << 40) - 1);
  return broadcast;
}

/// What failure broadcasts rely on, as parameters, so that the explorer can break them.
struct FailureBroadcastTraits {
  /// The first failure broadcast of a rank is the one that stays, also when two of its threads
  /// raise one.
  static constexpr bool kFirstWins = true;
  /// Failure broadcasts of earlier epochs are over.
  static constexpr bool kEpochs = true;
  FERRY_FN static constexpr int told(int ranks) { return ranks; }
  FERRY_FN static constexpr int scanned(int ranks) { return ranks; }
  FERRY_FN static constexpr bool stronger(const FailureBroadcast& a, const FailureBroadcast& b) {
    return a.kind > b.kind;
  }
};

/// The failure broadcasts of one rank: an array broadcast[reporter] at each rank, and one word of
/// its own, in memory of this rank alone, that decides which of its failure broadcasts was first.
template <class Traits = FailureBroadcastTraits>
class FailureBroadcasts {
 public:
  /// `broadcasts`: this rank's array; `mine`: this rank's own word. Both zeroed, never cleared.
  FERRY_FN FailureBroadcasts(const FlagLayout& layout, int self, std::byte* broadcasts,
                             std::uint64_t* mine, const std::uint8_t* live = nullptr)
      : layout_(layout),
        self_(self),
        flags_{broadcasts, layout.stride, layout.ranks, live},
        mine_{mine} {}

  /// Tells every rank, the own included. Any thread of the rank may call it, any number of times:
  /// all calls of one epoch spread its first failure broadcast. Returns the failure broadcast that
  /// was spread. `since`: the least generation that a broadcast of this epoch can have.
  template <class R>
    requires Reach<R>
  FERRY_FN FailureBroadcast raise(R& reach, FailureBroadcast::Kind kind, int culprit,
                                  Generation generation, Generation since = 0) const {
    std::uint64_t word = pack_broadcast(kind, culprit, generation);
    std::uint64_t first = 0;
    // relaxed: the word is the whole message; nothing else is read on the strength of it.
    while (Traits::kFirstWins && !mine_.compare_exchange(first, word, order::relaxed)) {
      if (!is_over(unpack_broadcast(first, self_), since)) {
        word = first;
        break;
      }
    }
    for (int peer = 0; peer < Traits::told(layout_.ranks); ++peer) {
      reach.notify(peer, layout_.place(self_), word);
    }
    return unpack_broadcast(word, self_);
  }

  /// The failure broadcast to believe: the strongest kind, then the lowest reporter. Nothing:
  /// nobody reported.
  FERRY_FN std::optional<FailureBroadcast> scan(Generation since = 0) const {
    return scan([](const FailureBroadcast&) { return true; }, since);
  }

  /// The same among those that `counts` lets pass: one that does not concern this wait must not
  /// hide one that does.
  template <class Counts>
  FERRY_FN std::optional<FailureBroadcast> scan(Counts counts, Generation since = 0) const {
    FailureBroadcast best;
    for (int reporter = 0; reporter < Traits::scanned(flags_.ranks); ++reporter) {
      // relaxed: the word is the whole message; nothing else is read on the strength of it.
      const std::uint64_t word = flags_[reporter].load(order::relaxed);
      if (word == 0) continue;
      const FailureBroadcast broadcast = unpack_broadcast(word, reporter);
      if (is_over(broadcast, since)) continue;
      if (Traits::stronger(broadcast, best) && counts(broadcast)) best = broadcast;
    }
    if (best.kind == FailureBroadcast::Kind::kNone) return std::nullopt;
    return best;
  }

 private:
  /// Of an earlier epoch, or of a rank that is not in this one.
  FERRY_FN bool is_over(const FailureBroadcast& told, Generation since) const {
    return Traits::kEpochs && (told.generation < since || !flags_.has(told.reporter));
  }

  FlagLayout layout_;
  int self_;
  FlagArray flags_;
  Flag mine_;
};

}  // namespace ferry::protocol

// Failure notices: a rank that fails, leaves, or finds another dead tells everyone, once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "protocol/flags.hpp"
#include "protocol/reach.hpp"
#include "protocol/sync.hpp"

namespace ferry::protocol {

/// A notice: why `culprit` is no longer there, in which generation, told by `reporter`.
struct Notice {
  /// In the order of belief: what is certain wins over what was concluded.
  enum class Kind : std::uint8_t {
    kNone = 0,
    kLate = 1,    ///< the culprit missed the reporter's deadline
    kLeft = 2,    ///< the culprit left the group (reporter == culprit)
    kFailed = 3,  ///< the culprit reports its own failure (reporter == culprit)
    kDied = 4,    ///< the culprit's process is gone
  };

  Kind kind = Kind::kNone;
  int culprit = -1;
  int reporter = -1;
  Generation generation = 0;  ///< modulo 2^40

  friend constexpr bool operator==(const Notice&, const Notice&) = default;
};

/// One word: kind (8 bits), culprit (16), generation (40). Never 0 for a real notice.
FERRY_FN constexpr std::uint64_t pack_notice(Notice::Kind kind, int culprit,
                                             Generation generation) {
  return (static_cast<std::uint64_t>(kind) << 56) |
         (static_cast<std::uint64_t>(static_cast<std::uint16_t>(culprit)) << 40) |
         (generation & ((1ull << 40) - 1));
}

FERRY_FN constexpr Notice unpack_notice(std::uint64_t word, int reporter) {
  Notice notice;
  notice.kind = static_cast<Notice::Kind>(word >> 56);
  notice.culprit = static_cast<int>((word >> 40) & 0xffff);
  notice.reporter = reporter;
  notice.generation = word & ((1ull << 40) - 1);
  return notice;
}

/// What notices rely on, as parameters, so that the explorer can break them.
struct NoticeTraits {
  /// The first notice of a rank is the one that stays, also when two of its threads raise one.
  static constexpr bool kFirstWins = true;
  FERRY_FN static constexpr int told(int ranks) { return ranks; }
  FERRY_FN static constexpr int scanned(int ranks) { return ranks; }
  FERRY_FN static constexpr bool stronger(const Notice& a, const Notice& b) {
    return a.kind > b.kind;
  }
};

/// The notices of one rank: a row notice[reporter] at each rank, and one word of its own, in memory
/// of this rank alone, that decides which of its notices was first.
template <class Traits = NoticeTraits>
class Notices {
 public:
  /// `notices`: this rank's row; `mine`: this rank's own word. Both zeroed, never cleared.
  FERRY_FN Notices(const FlagLayout& layout, int self, std::byte* notices, std::uint64_t* mine)
      : layout_(layout), self_(self), row_{notices, layout.stride, layout.ranks}, mine_{mine} {}

  /// Tells every rank, the own included. Any thread of the rank may call it, any number of times:
  /// all calls spread the first notice. Returns the notice that was spread.
  template <class R>
    requires Reach<R>
  FERRY_FN Notice raise(R& reach, Notice::Kind kind, int culprit, Generation generation) const {
    std::uint64_t word = pack_notice(kind, culprit, generation);
    std::uint64_t first = 0;
    // relaxed: the word is the whole message; nothing else is read on the strength of it.
    if (Traits::kFirstWins && !mine_.compare_exchange(first, word, order::relaxed)) word = first;
    for (int peer = 0; peer < Traits::told(layout_.ranks); ++peer) {
      reach.notify(peer, layout_.place(self_), word);
    }
    return unpack_notice(word, self_);
  }

  /// The notice to believe: the strongest kind, then the lowest reporter. Nothing: nobody reported.
  FERRY_FN std::optional<Notice> scan() const {
    return scan([](const Notice&) { return true; });
  }

  /// The same among those that `counts` lets pass: one that does not concern this wait must not
  /// hide one that does.
  template <class Counts>
  FERRY_FN std::optional<Notice> scan(Counts counts) const {
    Notice best;
    for (int reporter = 0; reporter < Traits::scanned(row_.ranks); ++reporter) {
      // relaxed: the word is the whole message; nothing else is read on the strength of it.
      const std::uint64_t word = row_[reporter].load(order::relaxed);
      if (word == 0) continue;
      const Notice notice = unpack_notice(word, reporter);
      if (Traits::stronger(notice, best) && counts(notice)) best = notice;
    }
    if (best.kind == Notice::Kind::kNone) return std::nullopt;
    return best;
  }

 private:
  FlagLayout layout_;
  int self_;
  FlagRow row_;
  Flag mine_;
};

}  // namespace ferry::protocol

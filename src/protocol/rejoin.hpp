// Rejoin: all ranks that are left agree on the newest generation that any of them used, so that
// all go on with the one after it.
//
// A round has two steps. Every rank offers the newest generation that it used; who has all offers
// answers with the newest of them, and goes on when all answers are the same. The second step is
// there because a rank may end between two of its offers: then some have it and some have not.
// Ranks whose attempts failed count rounds differently: whoever sees a later round joins that one,
// also while it waits for answers. It may have answered offers of an attempt that had failed before
// it came; those who made them offer again, and wait for it. But who succeeded and rejoins again
// may have its next offer overtake its answer: so an offer says in which round its rank succeeded
// last, and to those who are still in that round it is the answer.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "protocol/flags.hpp"
#include "protocol/mask.hpp"
#include "protocol/passed_on.hpp"
#include "protocol/reach.hpp"
#include "protocol/sync.hpp"

namespace ferry::protocol {

/// Where the words lie, at the same place in every rank's memory.
struct RejoinLayout {
  FlagLayout offers;   ///< offers[source], written by the source
  FlagLayout answers;  ///< answers[source], written by the source
};

/// What rejoining relies on, as parameters, so that the explorer can break it.
struct RejoinTraits {
  using Await = AwaitTraits;
  static constexpr bool kAnswers = true;
  static constexpr bool kRounds = true;
  static constexpr bool kSuccess = true;
  FERRY_FN static constexpr Generation newer(Generation mine, Generation theirs) {
    return std::max(mine, theirs);
  }
};

/// A watch that is told whom the next wait is for; the status of a rank that is gone for ever is
/// kPeerFailed. It may have `all_arrived`, called when all ranks have made their offers.
template <class T>
concept RejoinWatch = Watch<T> && requires(T& watch, int peer) { watch.awaits(peer); };

/// A watch that ends the wait for a peer's answer when the peer offers in a round from `later` on.
template <class W>
struct LaterOffer : PassedOn<W> {
  using PassedOn<W>::watch;
  Flag offer;
  std::uint64_t later = 0;  ///< the least word of it
  std::uint64_t seen = 0;   ///< the word, if there was one

  std::uint64_t spin_ns() { return static_cast<std::uint64_t>(watch.spin_ns()); }
  std::uint64_t slice_ns() { return watch.slice_ns(); }
  void awaits(int peer) { watch.awaits(peer); }
  Status check() {
    // relaxed: a round to join; what counts of it is waited for then.
    const std::uint64_t word = offer.load(order::relaxed);
    if (word < later) return watch.check();
    seen = word;
    Status status;
    status.code = Status::Code::kInterrupted;
    return status;
  }
};

/// The rejoins of one rank. A word is round * 2^48 + age * 2^44 + generation: it grows with every
/// round. `age`, of an offer: how many rounds ago its rank succeeded; 0: long ago, or never.
template <class Traits = RejoinTraits>
class Rejoin {
 public:
  FERRY_FN Rejoin(const RejoinLayout& layout, int self, std::byte* offers, std::byte* answers)
      : layout_(layout),
        self_(self),
        offers_{offers, layout.offers.stride, layout.offers.ranks},
        answers_{answers, layout.answers.stride, layout.answers.ranks} {}

  /// `used`: the newest generation that this rank used. On success `agreed` is the newest that any
  /// used, the same on all ranks, and `absent` holds those that are gone. Mismatch: ranks did not
  /// see the same ranks; a new attempt will. After a failure the caller must not use generations
  /// before an attempt succeeds: others may have succeeded.
  template <class R, class W>
    requires Reach<R> && RejoinWatch<W>
  Status agree(R& reach, Generation used, RankSet absent, W& watch, Generation& agreed) {
    if (Traits::kRounds) {
      ++round_;
      for (int peer = 0; peer < offers_.ranks; ++peer) {
        // relaxed: a round to join; what counts of it is waited for below.
        round_ = std::max(round_, round_of(offers_[peer].load(order::relaxed)));
      }
    } else {
      round_ = 1;
    }
    for (;;) {
      publish(reach, layout_.offers, Channel::kOffer, word(used) | age() << kGenerationBits);
      agreed = used;
      bool later = false;
      Status status = hear_offers(absent, watch, agreed, later);
      if (!status.ok()) return status;
      if (later) continue;
      if (!Traits::kAnswers) return {};
      if constexpr (requires { watch.all_arrived(); }) watch.all_arrived();
      publish(reach, layout_.answers, Channel::kAnswer, word(agreed));
      status = hear_answers(absent, watch, agreed, later);
      if (later) continue;
      if (status.ok()) succeeded_ = round_;
      return status;
    }
  }

  /// Whether a peer's offer in this round, or in a later one, is here.
  bool offered(int peer) const {
    // relaxed: nothing is read on the strength of it.
    return round_of(offers_[peer].load(order::relaxed)) >= round_;
  }

 private:
  static constexpr int kGenerationBits = 44;
  static constexpr int kRoundBegin = 48;
  static constexpr std::uint64_t kAges = 1ull << (kRoundBegin - kGenerationBits);
  static constexpr std::uint64_t round_of(std::uint64_t word) { return word >> kRoundBegin; }
  static constexpr Generation generation_of(std::uint64_t word) {
    return word & ((1ull << kGenerationBits) - 1);
  }
  std::uint64_t word(Generation generation) const { return round_ << kRoundBegin | generation; }
  std::uint64_t age() const {
    const bool known = Traits::kSuccess && succeeded_ != 0 && round_ - succeeded_ < kAges;
    return known ? round_ - succeeded_ : 0;
  }
  /// Whether the rank of this offer succeeded in the round in which this rank still is. Then it had
  /// this rank's answer, and its own was the same.
  bool succeeded_here(std::uint64_t offer) const {
    const std::uint64_t age = (offer >> kGenerationBits) % kAges;
    return age != 0 && round_of(offer) - age == round_;
  }

  template <class R>
  void publish(R& reach, const FlagLayout& flags, Channel channel, std::uint64_t word) const {
    for (int i = 0; i < flags.ranks; ++i) {
      reach.publish((self_ + i) % flags.ranks,
                    Signal{flags.place(self_), word, make_tag(channel, word), 0});
    }
  }

  /// `later`: somebody's was of a later round, which this rank joins.
  template <class W>
  Status hear_offers(RankSet absent, W& watch, Generation& agreed, bool& later) {
    for (int peer = 0; peer < offers_.ranks && !later; ++peer) {
      Status status = hear(offers_, peer, absent, watch);
      if (!status.ok()) return status;
      if (absent[static_cast<std::size_t>(peer)] != 0) continue;
      later = joins(status.seen);
      agreed = Traits::newer(agreed, generation_of(status.seen));
    }
    return {};
  }

  /// `later`: in place of an answer came an offer of a later round, which this rank joins.
  template <class W>
  Status hear_answers(RankSet absent, W& watch, Generation agreed, bool& later) {
    for (int peer = 0; peer < answers_.ranks; ++peer) {
      LaterOffer<W> watch_of{{watch}, offers_[peer], (round_ + 1) << kRoundBegin};
      Status status = hear(answers_, peer, absent, watch_of);
      if (watch_of.seen != 0 && !status.ok()) {
        // acquire: in place of the answer's.
        if (succeeded_here(offers_[peer].load(order::acquire))) continue;
        later = joins(watch_of.seen);
        return {};
      }
      if (!status.ok()) return status;
      if (absent[static_cast<std::size_t>(peer)] == 0 && status.seen != word(agreed)) {
        status.code = Status::Code::kMismatch;
        return status;
      }
    }
    return {};
  }

  bool joins(std::uint64_t word) {
    if (round_of(word) <= round_) return false;
    round_ = round_of(word);
    return true;
  }

  /// Waits for one rank's word of this round or a later one; a rank that is gone goes to `absent`.
  template <class W>
  Status hear(const FlagArray& flags, int peer, RankSet absent, W& watch) const {
    if (absent[static_cast<std::size_t>(peer)] != 0) return {};
    watch.awaits(peer);
    Status status =
        await_flag<typename Traits::Await>(flags[peer], peer, word(0), kAnyAhead, watch);
    if (status.code == Status::Code::kPeerFailed && status.peer == peer) {
      absent[static_cast<std::size_t>(peer)] = 1;
      return {};
    }
    return status;
  }

  RejoinLayout layout_;
  int self_;
  FlagArray offers_;
  FlagArray answers_;
  std::uint64_t round_ = 0;
  std::uint64_t succeeded_ = 0;  ///< the last round in which it did; 0: none yet
};

}  // namespace ferry::protocol

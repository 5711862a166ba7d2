// Chunks: rows come to a rank in parts, each of which may be used as soon as it is there.
//
// A receiver grants memory for all chunks in a swap; the sender writes each chunk there under the
// tag of its number and raises the receiver's flag to that number. Numbers count the chunks between
// two ranks for ever, from 1 without gaps: both know how many an exchange has. The receiver grants
// the same memory again only after it has used all of them: the next swap carries that order.
// Where an exchange failed, they may know different numbers: every later epoch counts from one of
// its own (`before`).
//
// The forwarder of a domain passes on what came, then says `Delivery` to the ranks of its domain:
// for those rows it stands for their source, so they wait for it alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "protocol/flags.hpp"
#include "protocol/reach.hpp"
#include "protocol/sync.hpp"

namespace ferry::protocol {

/// What chunks rely on, as parameters, so that the explorer can break it.
struct ChunkTraits {
  using Await = AwaitTraits;
  /// A network counts the chunk's bytes before it shows the flag.
  static constexpr bool kCounted = true;
  /// Every chunk has a tag of its own. Under one tag, early bytes of the next chunk would stand in
  /// for late bytes of this one.
  /// The epoch, which the high bits of a number say, is left out: at its beginning no chunk of an
  /// earlier one is under way.
  FERRY_FN static constexpr std::uint64_t tagged(std::uint64_t number) {
    return number & ((1ull << kEpochBit) - 1);
  }
  static constexpr int kEpochBit = 40;
};

/// The chunk flags of one rank: crossed[source] = number of the last chunk that is there.
template <class Traits = ChunkTraits>
class Chunks {
 public:
  FERRY_FN Chunks(const FlagLayout& layout, int self, std::byte* flags)
      : layout_(layout), self_(self), flags_{flags, layout.stride, layout.ranks} {}

  /// Of an epoch, before its first chunk. More than any number of an earlier epoch.
  FERRY_FN static constexpr std::uint64_t before(std::uint64_t epoch) {
    return epoch << Traits::kEpochBit;
  }

  /// The tag under which chunk `number` is written.
  FERRY_FN static constexpr std::uint64_t tag(std::uint64_t number) {
    return make_tag(Channel::kChunk, Traits::tagged(number));
  }

  /// Says that chunk `number` for `receiver` is written: `bytes` of it.
  template <class R>
    requires Reach<R>
  FERRY_FN void send(R& reach, int receiver, std::uint64_t number, std::uint64_t bytes) const {
    reach.publish(receiver,
                  Signal{layout_.place(self_), number, tag(number), Traits::kCounted ? bytes : 0});
  }

  /// Whether chunk `number` of `source` is there, without waiting.
  FERRY_FN bool arrived(int source, std::uint64_t number) const {
    return Traits::Await::reached(flags_[source].load(Traits::Await::kLoad), number);
  }

  /// Waits for chunk `number` of `source`.
  template <class W>
  FERRY_FN Status await(int source, std::uint64_t number, W& watch) const {
    return await_flag<typename Traits::Await>(flags_[source], source, number, kAnyAhead, watch);
  }

 private:
  FlagLayout layout_;
  int self_;
  FlagArray flags_;
};

}  // namespace ferry::protocol

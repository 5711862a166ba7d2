// How protocol code reaches a peer: the same words for memory and for networks.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "protocol/sync.hpp"

namespace ferry::protocol {

/// Where in a peer's registered memory: which of its segments, and bytes from the segment's start.
struct Place {
  std::uint32_t segment = 0;
  std::uint64_t offset = 0;

  FERRY_FN constexpr Place at(std::uint64_t bytes) const { return {segment, offset + bytes}; }
  friend FERRY_FN constexpr auto operator<=>(const Place&, const Place&) = default;
};

/// Which flag a tag belongs to. The protocols of one generation must not share tags, or the bytes
/// of one would be counted for another.
enum class Channel : std::uint8_t {
  kSwap = 1,
  kBarrier,
  kDelivery,
  kLoan,
  kArrival,
  kCredit,
  kAnnounced,
  kMask,
  kOffer,
  kAnswer,
  kChunk,
  kPacket,
  kPacketTaken
};

/// Names the bytes that one signal counts: unique for each (source, target, signal).
FERRY_FN constexpr std::uint64_t make_tag(Channel channel, Generation generation) {
  return (static_cast<std::uint64_t>(channel) << 56) | (generation & ((1ull << 56) - 1));
}

/// "Set this flag to `value`, once all `bytes` that I wrote to you under `tag` are there."
struct Signal {
  Place flag;
  std::uint64_t value = 0;
  std::uint64_t tag = 0;
  std::uint64_t bytes = 0;
};

/// A way to reach every rank, the own rank included.
/// `write`: puts bytes into a peer's memory; the source may be reused at once. `publish`: the flag
/// takes the value after all bytes of the signal's tag; whoever reads it with acquire sees them,
/// and all that this rank wrote there in memory before. Values of one flag become visible in the
/// order of their `publish`; different flags keep no order. `notify`: sets a word of a failure
/// broadcast at once, behind nothing.
template <class T>
concept Reach = requires(T& reach, int peer, Place place, const void* from, std::size_t bytes,
                         std::uint64_t value, const Signal& signal) {
  reach.write(peer, place, from, bytes, value);
  reach.publish(peer, signal);
  reach.notify(peer, place, value);
};

/// The order of the one store that makes everything before it visible. A parameter so that the
/// explorer can weaken it.
struct PublishTraits {
  static constexpr order kPublish = order::release;
};

/// Publishes in memory: store, then wake whoever sleeps on it.
template <class Traits = PublishTraits>
FERRY_FN void publish_in_memory(Flag flag, std::uint64_t value) {
  // Release: who acquires this value sees every write (and no longer disturbs any read) that this
  // rank made before.
  flag.store(value, Traits::kPublish);
  flag.wake();
}

/// Reaches peers inside the domain: plain writes and a release store. `resolve(peer, place)` gives
/// the address, in this process, of a place in a peer's memory.
template <class Resolve, class Traits = PublishTraits>
class MemoryReach {
 public:
  explicit MemoryReach(Resolve resolve) : resolve_(std::move(resolve)) {}

  void write(int peer, Place to, const void* from, std::size_t bytes, std::uint64_t /*tag*/) {
    write_bytes(resolve_(peer, to), from, bytes);
  }
  void publish(int peer, const Signal& signal) {
    publish_in_memory<Traits>(flag_at(peer, signal.flag), signal.value);
  }
  void notify(int peer, Place flag, std::uint64_t value) {
    publish_in_memory<Traits>(flag_at(peer, flag), value);
  }

 private:
  Flag flag_at(int peer, Place place) {
    return Flag{reinterpret_cast<std::uint64_t*>(resolve_(peer, place))};
  }

  Resolve resolve_;
};

}  // namespace ferry::protocol

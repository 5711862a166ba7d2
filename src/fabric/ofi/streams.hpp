// Numbers of the streams to one peer, which its writes belong to. They come around, long after the
// writes of the last time have arrived; those that were pre-announced wait for their writes as long
// as it takes, and are left out until then and once more.
#pragma once
#include <cstdint>
#include <map>
#include <optional>

#include "protocol/pre_announced.hpp"

namespace ferry::fabric::ofi {

/// Bits of a stream's number, of the 32 that come with a write; 12 say whose write it is.
inline constexpr int kStreamBits = 20;
inline constexpr std::uint32_t kStreamMask = (1u << (kStreamBits - 1)) - 1;
/// With a stream: the write counts as one of its companion, too, which has no other one.
inline constexpr std::uint32_t kWithCompanion = kStreamMask + 1;
/// With a stream: its companion.
inline constexpr std::uint32_t kCompanion = kWithCompanion << 1;
/// A stream without writes.
inline constexpr std::uint32_t kNoStream = kCompanion << 1;

/// Streams that are pre-announced at once (protocol/pre_announced.hpp), from a multiple of it on.
inline constexpr std::uint32_t kForecast = protocol::PreAnnouncedTraits::kCount;

/// Not thread-safe.
class Streams {
 public:
  std::uint32_t next() {
    if (next_ % kForecast == 0) skip_told();
    const std::uint32_t stream = next_;
    advance(1);
    return stream;
  }

  /// The first of kForecast streams that are pre-announced; nothing: too many are.
  std::optional<std::uint32_t> tell() {
    if (told_.size() >= kMaxTold) return std::nullopt;
    advance((kForecast - next_ % kForecast) % kForecast);
    skip_told();
    const std::uint32_t first = next_;
    told_.emplace(first, 1);
    advance(kForecast);
    return first;
  }

  /// The same ones are told as companions, too.
  void share(std::uint32_t first) { ++told_.at(first); }

  /// Of one that told or shared them: all of its signals have left, one way or the other. They are
  /// used again when the numbers have come around once more, for their writes may be under way.
  void give_back(std::uint32_t first) { --told_.at(first); }

 private:
  static constexpr std::size_t kMaxTold = (kStreamMask + 1) / kForecast / 2;

  void skip_told() {
    for (auto at = told_.find(next_); at != told_.end(); at = told_.find(next_)) {
      if (at->second == 0) told_.erase(at);
      advance(kForecast);
    }
  }
  void advance(std::uint32_t count) { next_ = (next_ + count) & kStreamMask; }

  std::uint32_t next_ = 0;
  std::map<std::uint32_t, int> told_{};  // by the first one: who is not done with them
};

}  // namespace ferry::fabric::ofi

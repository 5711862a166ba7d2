// Counted signals: the target's side of a network that keeps no order. Pieces of data and signals
// of one source come in any order; a flag may change only when all bytes that its signal counts are
// there, and one flag takes its values only in the order in which the source published them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "protocol/status.hpp"

namespace ferry::protocol {

/// What the bookkeeping relies on, as parameters, so that the explorer can break it.
struct CountedTraits {
  /// Bytes are counted for each tag. Counted together, early pieces of the next generation would
  /// stand in for late pieces of this one.
  static constexpr std::uint64_t counter(std::uint64_t tag) { return tag; }
  /// A flag takes its values in the source's order. Otherwise a newer value overtakes: a wait for
  /// "at least g" would pass while pieces of g are still under way.
  static constexpr bool kInOrder = true;
  /// A signal by itself says what is; one pre-announced of the same number what was expected.
  static constexpr bool replaces(bool pre_announced, bool by_pre_announced) {
    return pre_announced && !by_pre_announced;
  }
  static constexpr bool complete(std::uint64_t landed, std::uint64_t bytes) {
    return landed >= bytes;
  }
};

/// A signal as it arrives.
template <class FlagRef>
struct ArrivedSignal {
  std::uint64_t sequence = 0;  ///< 1, 2, 3, … for each (source, flag), given by the source
  FlagRef flag{};              ///< the target's word; any ordered type
  std::uint64_t value = 0;
  std::uint64_t tag = 0;
  std::uint64_t bytes = 0;
  bool pre_announced = false;  ///< protocol/pre_announced.hpp; one that comes by itself counts
};

/// Counts for one target. Plain state for one progress thread; makes no system call. Both calls
/// take `release(source, signal)` and call it for every signal that is now complete: it should
/// `publish_in_memory`.
template <class FlagRef, class Traits = CountedTraits>
class CountedSignals {
 public:
  using Arrived = ArrivedSignal<FlagRef>;

  explicit CountedSignals(int ranks) : sources_(static_cast<std::size_t>(ranks)) {}

  /// `bytes` of `tag` from `source` are in this rank's memory.
  template <class Release>
  void piece(int source, std::uint64_t tag, std::uint64_t bytes, Release&& release) {
    Source& from = sources_[static_cast<std::size_t>(source)];
    if (release_alone(source, from, tag, bytes, release)) return;
    from.landed[Traits::counter(tag)] += bytes;
    for (auto& entry : from.streams) release_complete(source, from, entry.second, release);
  }

  /// A signal of `source` came, before or after its pieces, by itself or pre-announced. Mismatch,
  /// and no effect, if its sequence number was used before.
  template <class Release>
  Status signal(int source, const Arrived& arrived, Release&& release) {
    Source& from = sources_[static_cast<std::size_t>(source)];
    Stream& stream = from.streams[arrived.flag];
    if (arrived.sequence < stream.next) {
      return {Status::Code::kMismatch, source, stream.next, arrived.sequence};
    }
    const auto [entry, is_new] = stream.waiting.emplace(arrived.sequence, arrived);
    if (!is_new) {
      if (!Traits::replaces(entry->second.pre_announced, arrived.pre_announced)) {
        return {Status::Code::kMismatch, source, stream.next, arrived.sequence};
      }
      entry->second = arrived;
    }
    release_complete(source, from, stream, release);
    return {};
  }

  /// `source` is another process from now on.
  void begin_anew(int source) { sources_[static_cast<std::size_t>(source)] = {}; }

  /// Tags of `source` with bytes that no released signal has counted.
  std::size_t noted(int source) const {
    return sources_[static_cast<std::size_t>(source)].landed.size();
  }

  /// Signals of `source` that wait for bytes or for an earlier signal.
  std::size_t waiting(int source) const {
    std::size_t count = 0;
    for (const auto& entry : sources_[static_cast<std::size_t>(source)].streams) {
      count += entry.second.waiting.size();
    }
    return count;
  }

 private:
  struct Stream {
    std::uint64_t next = 1;                    // sequence to release next
    std::map<std::uint64_t, Arrived> waiting;  // by sequence
  };
  struct Source {
    std::map<FlagRef, Stream> streams;
    std::map<std::uint64_t, std::uint64_t> landed;  // bytes by tag, until released
  };

  /// The most frequent case, without a note of what landed: the piece is all that the next signal
  /// of some flag waits for. False: it is not so.
  template <class Release>
  static bool release_alone(int source, Source& from, std::uint64_t tag, std::uint64_t bytes,
                            Release& release) {
    for (auto& [flag, stream] : from.streams) {
      const auto first = stream.waiting.begin();
      if (first == stream.waiting.end() || first->first != stream.next) continue;
      const Arrived arrived = first->second;
      if (arrived.tag != tag || arrived.bytes != bytes || !Traits::complete(bytes, arrived.bytes) ||
          from.landed.contains(Traits::counter(tag))) {
        continue;
      }
      stream.waiting.erase(first);
      ++stream.next;
      release(source, arrived);
      release_complete(source, from, stream, release);
      return true;
    }
    return false;
  }

  template <class Release>
  static void release_complete(int source, Source& from, Stream& stream, Release& release) {
    auto it = stream.waiting.begin();
    while (it != stream.waiting.end()) {
      const Arrived arrived = it->second;
      if (Traits::kInOrder && arrived.sequence != stream.next) return;
      const auto counter = from.landed.find(Traits::counter(arrived.tag));
      const bool any = counter != from.landed.end();
      const std::uint64_t landed = any ? counter->second : 0;
      if (Traits::complete(landed, arrived.bytes)) {
        if (any && landed <= arrived.bytes) {
          from.landed.erase(counter);
        } else if (any) {
          counter->second -= arrived.bytes;
        }
        it = stream.waiting.erase(it);
        if (Traits::kInOrder) ++stream.next;
        release(source, arrived);
      } else {
        if (Traits::kInOrder) return;
        ++it;
      }
    }
  }

  std::vector<Source> sources_;
};

}  // namespace ferry::protocol

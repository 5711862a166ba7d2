// Which segments of which rank this rank can reach, and whether a range lies inside them.
#pragma once
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "fabric/fabric.hpp"
#include "fabric/memory.hpp"

namespace ferry::fabric {

/// Segments of one rank at most. Growth adds at least half of what is there, so that this is far.
inline constexpr SegmentId kMaxSegments = 256;

/// For one rank. Any number of threads may look things up while one thread adds: entries are
/// published with release, found with acquire, never moved, and freed only with the table.
class SegmentTable {
 public:
  struct Entry {
    std::shared_ptr<Memory> memory{};
    std::size_t bytes = 0;
  };

  SegmentTable(int self, int ranks)
      : self_(self), ranks_(ranks), slots_(std::make_unique<Slots[]>(std::size_t(ranks))) {}
  ~SegmentTable();
  SegmentTable(const SegmentTable&) = delete;
  SegmentTable& operator=(const SegmentTable&) = delete;

  /// One past the highest segment of `rank` that was added; 0 for none, or no such rank.
  SegmentId count(int rank) const noexcept;
  /// The id of this rank's next segment. Throws Error(exhausted) when it has kMaxSegments.
  SegmentId next() const;
  /// Throws Error(unsupported) unless a segment of another fabric may follow. Numbers may be left
  /// out: of one that this fabric could not share. `fabric`: "the network".
  void check_adopted(const Segment& segment, std::string_view fabric) const;
  /// One thread at a time. Throws Error(system) if the segment is there already or its number
  /// cannot be right.
  void add(int rank, SegmentId segment, std::shared_ptr<Memory> memory, std::size_t bytes);
  /// The rank is another process from now on: its segments are forgotten, but stay mapped, for
  /// threads that look at them now. One thread at a time.
  void clear(int rank);
  /// Null if it is not there, or there is no such rank.
  const Entry* find(int rank, SegmentId segment) const noexcept;
  /// Bytes of the segment; 0 if it is not there.
  std::size_t bytes(int rank, SegmentId segment) const noexcept {
    const Entry* entry = find(rank, segment);
    return entry == nullptr ? 0 : entry->bytes;
  }

  /// The entry that holds [to.offset, to.offset + bytes). Throws Error(invalid_argument), saying
  /// which of peer, segment and range is wrong; `call` starts the message.
  const Entry& checked(int peer, Address to, std::uint64_t bytes, std::string_view call) const;
  /// The same for a flag word: 8 bytes, aligned to 8.
  const Entry& checked_flag(int peer, Address flag, std::string_view call) const;

 private:
  using Slot = std::atomic<const Entry*>;
  /// Of one rank. Most have few segments: a place for each that could be would take 2 KiB for each
  /// pair of ranks.
  struct Slots {
    static constexpr SegmentId kFew = 4;
    std::array<Slot, kFew> few{};
    std::atomic<Slot*> more{nullptr};  // [kMaxSegments - kFew], from when the first is needed
    std::atomic<SegmentId> count{0};

    const Slot* at(SegmentId segment) const noexcept;
  };

  int self_;
  int ranks_;
  std::unique_ptr<Slots[]> slots_;  // [ranks]
  std::vector<std::unique_ptr<const Entry>> cleared_;
};

/// Throws Error(invalid_argument) unless 0 <= peer < ranks.
void check_peer(int peer, int ranks, int self, std::string_view call);

}  // namespace ferry::fabric

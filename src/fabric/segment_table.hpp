// Which segments of which rank this rank can reach, and whether a range lies inside them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "fabric/fabric.hpp"
#include "fabric/memory.hpp"

namespace ferry::fabric {

/// For one rank. Several threads may look things up, but not while one adds.
class SegmentTable {
 public:
  struct Entry {
    std::shared_ptr<Memory> memory{};  ///< null: not attached
    std::size_t bytes = 0;
  };

  SegmentTable(int self, int ranks) : self_(self), ranks_(static_cast<std::size_t>(ranks)) {}

  /// Segments registered by `rank` so far: the id of its next one.
  SegmentId count(int rank) const noexcept;
  /// Throws Error(system) if the segment is there already or its number cannot be right.
  void add(int rank, SegmentId segment, std::shared_ptr<Memory> memory, std::size_t bytes);
  /// Null if it is not there, or there is no such rank.
  const Entry* find(int rank, SegmentId segment) const noexcept;

  /// The entry that holds [to.offset, to.offset + bytes). Throws Error(invalid_argument), saying
  /// which of peer, segment and range is wrong; `call` starts the message.
  const Entry& checked(int peer, Address to, std::uint64_t bytes, std::string_view call) const;
  /// The same for a flag word: 8 bytes, aligned to 8.
  const Entry& checked_flag(int peer, Address flag, std::string_view call) const;

 private:
  int self_;
  std::vector<std::vector<Entry>> ranks_;
};

/// Throws Error(invalid_argument) unless 0 <= peer < ranks.
void check_peer(int peer, int ranks, int self, std::string_view call);

}  // namespace ferry::fabric

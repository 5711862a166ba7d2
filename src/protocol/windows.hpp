// Windows: memory in which a rank shows its data to its peers, round after round, two in turn.
//
// In each round a rank writes its window, the ranks meet, and each reads the windows of the others.
// Two windows suffice: whoever writes the window of round k+2 has met its peers in round k+1, and a
// peer came there only after it had read the windows of round k.
#pragma once

#include <cstdint>

#include "protocol/sync.hpp"

namespace ferry::protocol {

/// What windows rely on, as parameters, so that the explorer can break it.
struct WindowTraits {
  static constexpr std::uint64_t kWindows = 2;
};

/// Counts the rounds of one rank; all ranks begin the same rounds.
template <class Traits = WindowTraits>
class Windows {
 public:
  /// The window of the round that comes. It may be written before the meeting of that round.
  FERRY_FN std::uint64_t next() const { return (round_ + 1) % Traits::kWindows; }
  /// The ranks have met: the round begins.
  FERRY_FN void begin() { ++round_; }

 private:
  std::uint64_t round_ = 0;
};

}  // namespace ferry::protocol

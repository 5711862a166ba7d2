// Shared memory in which ranks of a test meet.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "shared_ranks.hpp"

namespace ferry::test {

inline constexpr int kMostRanks = 16;
inline constexpr std::size_t kSlot = 16384;

struct Board {
  struct Rank {
    std::atomic<std::uint64_t> given{0};  // gathers that it has joined
    std::size_t bytes[2]{};
    std::byte slot[2][kSlot]{};
    char problem[2048]{};
  };
  Rank ranks[kMostRanks];

  /// For ranks that have not begun.
  void clear(int count);
  /// The process of the ranks from `first` has ended, `how` says how: a problem of those that had
  /// not, and of those that had ended well if it has not.
  void note_end(int first, int threads, int count, const std::string& how);
  std::vector<std::string> problems(int count) const;
};

/// From now on this process tells on stderr where it was when a signal of an error ends it.
void tell_of_signals();
/// "exit status 3", "signal 11 (Segmentation fault)"; of waitpid.
std::string spell_end(int status);

/// Runs the ranks from `first` as threads of this process.
void run_here(Board& board, int first, int threads, int ranks, const RankBody& body);

}  // namespace ferry::test

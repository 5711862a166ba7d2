// What the ranks of a fleet share, and how they are run.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>

#include "fleet.hpp"

namespace ferry::conformance {

inline constexpr int kMaxRanks = 16;
inline constexpr int kMaxFailures = 20;
inline constexpr std::size_t kTextBytes = 1400;
inline constexpr std::size_t kGatherBytes = 16384;

/// Lies in memory that forked ranks share.
struct Board {
  struct Progress {
    std::atomic<std::int64_t> since_ms{0};
    std::atomic<bool> ended{false};
    char what[kTextBytes]{};
  };
  struct Gather {
    std::atomic<std::uint64_t> posted{0};
    std::uint32_t bytes[2]{};
    std::byte data[2][kGatherBytes]{};
  };
  Progress progress[kMaxRanks];
  Gather gather[kMaxRanks];
  Gather left[kMaxRanks];  // of the ranks that are left when one is gone
  std::atomic<int> failures{0};
  std::atomic<std::uint64_t> results{0};  // in any order
  char failure[kMaxFailures][kTextBytes]{};

  void fail(int rank, const std::string& text) {
    const int slot = failures.fetch_add(1);
    if (slot >= kMaxFailures) return;
    const std::string line =
        "rank " + std::to_string(rank) + ": " + text + "\n    in: " + progress[rank].what;
    std::strncpy(failure[slot], line.c_str(), kTextBytes - 1);
  }
};

/// Zeroed but for its constructors; forked ranks share it.
std::shared_ptr<Board> make_board();

AllGather gather_on(Board::Gather* gather, int rank, int size);
Device device_of(const Fleet& fleet, int rank);
void run_rank(Rank& rank, Board& board, const std::function<void(Rank&)>& body);
/// The rank that has not said anything for too long, or -1.
int stuck(const Board& board, const Fleet& fleet);

void run_threads(Board& board, const Fleet& fleet, const std::function<void(Rank&)>& body);
void run_processes(Board& board, const Fleet& fleet, const std::function<void(Rank&)>& body);
/// Threads in one child, which alone calls CUDA.
void run_threads_in_child(Board& board, const Fleet& fleet, const std::function<void(Rank&)>& body);

}  // namespace ferry::conformance

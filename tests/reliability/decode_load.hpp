// Ranks as processes that decode without end, with two copies of each expert, while the test kills
// some at random moments and starts processes in their places. Every row and sum is checked.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "platform/test_child.hpp"
#include "processes.hpp"

namespace ferry::test {

/// Memory that the test and all ranks share.
struct DecodeBoard {
  static constexpr int kRanks = 4;
  static constexpr int kLayers = 3;  ///< rounds of a step
  struct Rank {
    std::atomic<std::int64_t> tokens{0};  ///< checked, of committed steps
    std::atomic<std::int64_t> zeroed{0};  ///< parts of tokens lost with a rank, of steps made anew
    std::atomic<bool> inside{false};      ///< it has made a step
  };
  static constexpr int kEpochs = 1 << 16;
  std::array<Rank, kRanks> ranks{};
  std::array<std::atomic<std::uint64_t>, kEpochs> views{};  ///< by who came first
  std::atomic<std::int64_t> step{0}, last{1L << 40};        ///< committed; that ends the job
  std::atomic<std::int64_t> epoch{1};
};

struct DecodeCounts {
  std::int64_t rounds = 0, tokens = 0, zeroed = 0, epochs = 0;
  int kills = 0, joins = 0;
};

class DecodeJob {
 public:
  /// `joins`: of a group that takes processes in, which makes its exchange anew after each regroup;
  /// otherwise the exchange goes on.
  DecodeJob(unsigned seed, bool joins);
  DecodeJob(const DecodeJob&) = delete;
  DecodeJob& operator=(const DecodeJob&) = delete;

  /// Until so many rounds are over: a rank dies or a process joins, again and again; without joins
  /// at least until two ranks are left.
  DecodeCounts run(std::int64_t rounds);
  /// What was wrong; empty: nothing.
  const std::string& wrong() const { return wrong_; }

 private:
  static constexpr int kRanks = DecodeBoard::kRanks;

  void kill_or_restart();
  void check();

  std::shared_ptr<void> shared_ = test::shared_block(sizeof(DecodeBoard));
  DecodeBoard* board_;
  std::mt19937 random_;
  bool joins_;
  std::unique_ptr<Ranks> ranks_{};
  std::vector<bool> dead_ = std::vector<bool>(kRanks);
  DecodeCounts counts_{};
  std::int64_t seen_ = 0;  // of the committed steps
  double seen_at_ = 0;
  std::string wrong_{};
};

}  // namespace ferry::test

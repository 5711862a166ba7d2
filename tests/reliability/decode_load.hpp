// Ranks as processes that decode without end, with two copies of each expert, while the test kills
// some at random moments and starts processes in their places. Every row and sum is checked.
#pragma once
#include <array>
#include <atomic>
#include <chrono>
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
  static constexpr int kMost = 8;    ///< ranks
  static constexpr int kLayers = 3;  ///< rounds of a step
  struct Rank {
    std::atomic<std::int64_t> tokens{0};  ///< checked, of committed steps
    std::atomic<std::int64_t> zeroed{0};  ///< parts of tokens lost with a rank, of steps made anew
    std::atomic<bool> inside{false};      ///< it has made a step
  };
  static constexpr int kEpochs = 1 << 16;
  std::array<Rank, kMost> ranks{};
  std::array<std::atomic<std::uint64_t>, kEpochs> views{};  ///< by who came first
  std::atomic<std::int64_t> step{0}, last{1L << 40};        ///< committed; that ends the job
  std::atomic<std::int64_t> epoch{1};
};

struct DecodeCounts {
  std::int64_t rounds = 0, tokens = 0, zeroed = 0, epochs = 0;
  int kills = 0, joins = 0;
  double longest = 0;  ///< seconds without a step
};

/// Who decodes, and how often the test interferes.
struct DecodePolicy {
  /// The group takes processes in, and makes its exchange anew after each regroup; otherwise the
  /// exchange goes on.
  bool joins = true;
  int ranks = 4;
  int domain_size = 0;  ///< > 0: so many ranks are a domain each, and libfabric joins them
  std::chrono::milliseconds pause{30};  ///< at most, between two kills or starts

  /// Whoever dies alone in its domain still counts: more than half of the ranks have to be left.
  int least() const { return domain_size > 0 ? ranks / 2 + 1 : 2; }
};

class DecodeJob {
 public:
  DecodeJob(unsigned seed, DecodePolicy policy);
  DecodeJob(const DecodeJob&) = delete;
  DecodeJob& operator=(const DecodeJob&) = delete;

  /// Until so many rounds are over: a rank dies or a process joins, again and again, each at least
  /// twice; without joins until no more ranks than `least` are left.
  DecodeCounts run(std::int64_t rounds);
  /// What was wrong; empty: nothing.
  const std::string& wrong() const { return wrong_; }

 private:
  void kill_or_restart();
  void check();

  std::shared_ptr<void> shared_ = test::shared_block(sizeof(DecodeBoard));
  DecodeBoard* board_;
  std::mt19937 random_;
  DecodePolicy policy_;
  std::unique_ptr<Ranks> ranks_{};
  std::vector<bool> dead_;
  DecodeCounts counts_{};
  std::int64_t seen_ = 0;  // of the committed steps
  double seen_at_ = 0;
  std::string wrong_{};
};

}  // namespace ferry::test

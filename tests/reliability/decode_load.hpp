// Ranks as processes that decode without end, with two copies of each expert, while the test kills
// some, lets others pause, and starts processes in the places of the dead. Every token is checked.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "ferry/experts.hpp"
#include "platform/test_child.hpp"
#include "processes.hpp"

namespace ferry::test {

/// Memory that the test and all ranks share.
struct DecodeBoard {
  static constexpr int kRanks = 4;
  struct Rank {
    std::atomic<int> ended{0};            ///< the group that it has left, or is about to
    std::atomic<int> inside{0};           ///< the group in which it decodes
    std::atomic<std::int64_t> round{0};   ///< of that group, the last that ended
    std::atomic<std::int64_t> tokens{0};  ///< checked
    std::atomic<std::int64_t> zeroed{0};  ///< parts of tokens lost with a rank, in that very round
    std::atomic<std::int64_t> zeroed_later{0};
  };
  /// What all do before the same round: the deciding rank names one that nobody has reached.
  struct Turn {
    std::atomic<int> decider{-1};
    std::atomic<std::int64_t> at{0};
  };
  std::array<Rank, kRanks> ranks{};
  std::atomic<int> group{0}, port{0};  ///< the newest group, and where its ranks meet
  std::atomic<int> pausing{-1};        ///< the rank that pauses
  Turn pause{}, rejoin{}, leave{};
};

struct DecodeCounts {
  std::int64_t rounds = 0, tokens = 0, zeroed = 0, zeroed_later = 0;
  int kills = 0, pauses = 0, joins = 0;
};

class DecodeJob {
 public:
  explicit DecodeJob(unsigned seed);
  DecodeJob(const DecodeJob&) = delete;
  DecodeJob& operator=(const DecodeJob&) = delete;

  /// Groups one after another until so many rounds are over. In each a rank or two are killed, or
  /// one pauses and rejoins; then processes take the places of the dead in the next group.
  DecodeCounts run(std::int64_t rounds);
  /// What was wrong; empty: nothing.
  const std::string& wrong() const { return wrong_; }

 private:
  static constexpr int kRanks = DecodeBoard::kRanks;

  DecodeBoard::Rank& at(int rank) { return board_->ranks[static_cast<std::size_t>(rank)]; }
  template <class Ready>
  void await(const char* what, const Ready& ready);
  void await_rounds(std::int64_t count);
  std::int64_t take_turn(DecodeBoard::Turn& turn);
  bool may_lose(int rank) const;
  void kill_one();
  void pause_one();
  void begin_group();

  std::shared_ptr<void> shared_ = test::shared_block(sizeof(DecodeBoard));
  DecodeBoard* board_;
  std::mt19937 random_;
  ExpertPlacement placement_;
  std::optional<Ranks> ranks_{};
  std::vector<bool> gone_ = std::vector<bool>(kRanks);  // dead or pausing
  DecodeCounts counts_{};
  std::string wrong_{};
};

}  // namespace ferry::test

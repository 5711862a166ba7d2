// Ranks as processes that exchange in throughput mode without end, checking every row, and go on by
// `regroup` when others are killed or stopped.
#pragma once
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ferry/group.hpp"
#include "platform/test_child.hpp"
#include "processes.hpp"

namespace ferry::test {

/// Where in a step a rank dies. `anywhere`: the test sends the signal at a random moment;
/// `regroup`: while the ranks agree about another loss; otherwise the rank does it itself, at that
/// place.
enum class Stage : int { anywhere, plan, dispatch, combine, after, regroup };
inline constexpr std::array kStages = {Stage::anywhere, Stage::plan,  Stage::dispatch,
                                       Stage::combine,  Stage::after, Stage::regroup};
const char* name_of(Stage stage);

/// Memory that the test and all ranks share.
struct ElasticBoard {
  static constexpr int kRanks = 32;
  static constexpr int kEpochs = 4096;
  struct Rank {
    std::atomic<int> order{-1};  ///< a Stage at which it does away with itself
    std::atomic<int> signal{0};  ///< by this signal
    std::atomic<std::int64_t> steps{0}, epoch{1};
    std::atomic<double> lost{0};       ///< when it killed or stopped itself
    std::atomic<double> failed{0};     ///< when its last call threw
    std::atomic<double> exchanged{0};  ///< the end of the first step of `epoch`
    std::atomic<int> evicted{0};
  };
  std::array<Rank, kRanks> ranks{};
  /// By who came first: bits of ranks; the committed step, plus 1.
  std::array<std::atomic<std::uint64_t>, kEpochs> views{}, steps{};
};

/// Of one loss, in milliseconds.
struct Loss {
  std::vector<double> detected{};  ///< of each survivor: from the signal to its error
  double regrouped = 0;            ///< from the last error to the end of the last first step
};

class ElasticJob {
 public:
  /// `domain_size` > 0: so many ranks are a domain each, and libfabric joins them. `gpus` > 0: on
  /// as many GPUs, which the ranks take in turn.
  ElasticJob(int ranks, std::chrono::nanoseconds deadline, int domain_size = 0, int gpus = 0);
  ~ElasticJob();
  ElasticJob(const ElasticJob&) = delete;
  ElasticJob& operator=(const ElasticJob&) = delete;

  /// Ranks die or stop together; the others go on. Of `Stage::regroup` the first dies anywhere, the
  /// rest while the others agree.
  Loss lose(const std::vector<int>& victims, Stage stage, int signal);
  /// Ranks that were stopped go on, and must hear that they were evicted.
  void resume(const std::vector<int>& victims);
  /// Processes take the places of lost ranks, at once. In milliseconds: from their start until
  /// all ranks have gone on with them.
  double join(const std::vector<int>& ranks);
  /// A process that joins is killed after so long.
  void lose_joiner(int rank, std::chrono::microseconds after);
  /// A rank is killed that long after a process began to join.
  void lose_beside_joiner(int joiner, int victim, std::chrono::microseconds after);
  /// In the group, as far as the test has had them lost.
  const std::vector<int>& alive() const { return alive_; }
  /// Whether all ranks were there at first.
  bool began() const { return began_; }
  /// What was wrong; empty: nothing.
  std::string wrong() const { return wrong_; }

 private:
  template <class Ready>
  void await(const char* what, const Ready& ready);
  void check_lines();
  std::string whereabouts();
  void restart(int rank);
  /// All that are alive are in a view of their own, and have made steps in it.
  void await_steps(const char* what);
  double strike(const std::vector<int>& victims, Stage stage, int signal);

  std::shared_ptr<void> shared_ = test::shared_block(sizeof(ElasticBoard));
  ElasticBoard* board_;
  std::optional<Ranks> ranks_{};
  std::vector<int> alive_{};
  bool began_ = true;
  std::string wrong_{};
};

}  // namespace ferry::test

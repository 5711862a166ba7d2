// Ranks as processes that dispatch and combine without end under masks, checking every row, while
// the test kills, stops and wakes them.
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

/// Memory that the test and all ranks share.
struct MaskBoard {
  static constexpr int kRanks = 4;
  std::array<std::atomic<std::int64_t>, kRanks> round{};
  std::array<std::atomic<std::int64_t>, kRanks> masked_ns{};  ///< when it went on without another
  std::array<std::atomic<int>, kRanks> masked{};              ///< bits of ranks, by this rank
  std::array<std::atomic<int>, kRanks> evicted{};
  std::array<std::atomic<std::int64_t>, kRanks> rejoined{};  ///< the round in which it did
  std::atomic<std::int64_t> rejoin_at{0}, stop_at{0};        ///< rounds, said by the deciding rank
  std::atomic<int> rejoin_decider{-1}, stop_decider{-1};
  std::atomic<int> victims{0};  ///< bits of the ranks that others may go without
  std::array<std::atomic<std::int64_t>, kRanks> seen_ns{};  ///< in a wait or between; 0: not yet
};

struct MaskFault {
  std::vector<double> mask_ms{};  ///< of each survivor, from the signal
  double rounds_before = 0;       ///< a second
  double rounds_masked = 0;
  double rounds_after = 0;  ///< of all ranks, after the rejoin; 0: a rank is dead
};

/// One job of MaskBoard::kRanks ranks under load.
class MaskedJob {
 public:
  /// `domain_size`: of virtual domains; 0: one domain.
  explicit MaskedJob(std::chrono::nanoseconds deadline, int domain_size = 0);
  ~MaskedJob();
  MaskedJob(const MaskedJob&) = delete;
  MaskedJob& operator=(const MaskedJob&) = delete;

  /// A rank is killed. The job may only be ended then.
  MaskFault kill(int victim);
  /// Ranks are stopped together for `seconds`, learn that they were evicted, and all rejoin.
  MaskFault stop(const std::vector<int>& victims, double seconds);
  /// Ends all ranks that live. What was wrong; empty: nothing.
  std::string end();
  int ranks() const { return MaskBoard::kRanks; }

 private:
  MaskFault fault(const std::vector<int>& victims, int number);
  static bool is_among(const std::vector<int>& ranks, int rank);
  double rounds_per_second(int rank);
  /// Waits until `ready()`; after 60 s the job is broken.
  template <class Ready>
  void await(const char* what, const Ready& ready);

  /// False: the deadline was too short to make the exchange on this machine.
  bool start(const GroupConfig& config);

  std::shared_ptr<void> shared_ = test::shared_block(sizeof(MaskBoard));
  MaskBoard* board_;
  std::optional<Ranks> ranks_{};
  int dead_ = -1;
  std::string wrong_{};
};

}  // namespace ferry::test

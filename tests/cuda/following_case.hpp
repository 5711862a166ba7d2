// A dispatch and the expert-major fan-out that follows it, of all ranks of a KernelGroup.
#pragma once
#include <memory>
#include <vector>

#include "cuda/following_fan_out.hpp"
#include "expert_major_case.hpp"

namespace ferry::cuda::test {

/// One rank's part, and what must come of it.
struct FollowingRank {
  ExpertRows local;
  DispatchParameters dispatch;
  FanOutParameters fan_out;
  Bytes rows;                 ///< [capacity, row_bytes] as they arrive
  std::vector<float> scales;  ///< [capacity, C]
};

class Following {
 public:
  /// `routes`: the dispatch brings them.
  Following(KernelGroup& group, const ExpertCase& c, Random& random, bool routes);

  FollowingRank& rank(int r) { return ranks_[KernelGroup::index(r)]; }
  const Exchange& exchange() const { return exchange_; }
  /// The next call of one rank: dispatch with `dispatch_sms`, fan-out up to these ends.
  void launch(int r, const std::vector<int>& ends);
  /// Every byte, and poisons what the next call writes.
  void check_and_poison();
  void poison();
  /// Stops unless no row has been copied.
  void check_nothing_copied(int r);

 private:
  void make_input(int r, Random& random);
  void make_rows(int r, bool routes);

  KernelGroup& group_;
  ExpertCase c_;
  Exchange exchange_;
  std::vector<Bytes> x_;    // as it arrives
  std::vector<Bytes> raw_;  // before it is quantised, if it is
  std::vector<std::vector<float>> scales_;
  std::vector<FollowingRank> ranks_;
  std::vector<std::unique_ptr<SideStream>> sides_;
};

/// The steps of the next call.
ArrivalSteps steps_of(const std::vector<int>& ends);

}  // namespace ferry::cuda::test

// A dispatch and the expert-major fan-out that follows it, of all ranks of a KernelGroup.
#pragma once
#include <vector>

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
  /// The next call of one rank: dispatch, fan-out beside it.
  void launch(int r);
  /// Every byte, and poisons what the next call writes; the slots, too, unless it knows them.
  void check_and_poison(bool keep_slots = false);
  void poison(bool keep_slots = false);
  /// Stops unless no row has been copied, but for those of one source.
  void check_nothing_copied(int r, int except = -1);

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
};

}  // namespace ferry::cuda::test

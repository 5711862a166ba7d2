// Which ranks hold which experts, when that may change: after a loss, or with the load.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ferry/tensor.hpp"

namespace ferry {

class ExpertTable;

/// Logical experts in places. Each rank has `slots` places, each of which is empty or holds a copy
/// of one expert. A group that is made with `experts` = ranks · slots carries rows to places: slot
/// s of rank r is what it calls expert r · slots + s. Computed without any exchange: ranks that
/// make the same calls have the same placement.
class ExpertPlacement {
 public:
  /// Balanced for equal loads, one copy of each expert. Throws Error(invalid_argument) when there
  /// are fewer places than experts.
  ExpertPlacement(std::int64_t experts, int ranks, int slots);
  ~ExpertPlacement();
  ExpertPlacement(ExpertPlacement&&) noexcept;
  ExpertPlacement& operator=(ExpertPlacement&&) noexcept;

  std::int64_t experts() const;
  int ranks() const;
  int slots() const;

  /// Places the experts on these ranks of the group alone (GroupView::ranks), at least `copies`
  /// times each if the slots suffice; slots that are left go to further copies of the heaviest.
  /// What need not move stays. `load`: [experts], of each, 0 or more; empty: all equal. By the
  /// policy that DeepSeek published as EPLB (core/experts/balance.hpp). Throws
  /// Error(invalid_argument), and changes nothing, when these ranks have fewer places than there
  /// are experts.
  void balance(std::span<const int> ranks, std::span<const double> load = {}, int copies = 1);

  /// [slots]: the experts that the rank holds, −1: none.
  std::vector<std::int32_t> held_by(int rank) const;
  /// What Group::plan takes for routes to experts: topk_idx, i64 or i32 [T, K], with the place of a
  /// copy for each expert, i64 [T, K]. Tokens spread over copies by a hash of `rank`, whose tokens
  /// they are, and their number.
  Tensor places(const ConstTensorView& topk_idx, int rank) const;

 private:
  std::unique_ptr<ExpertTable> table_;
};

}  // namespace ferry

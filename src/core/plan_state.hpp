// What a Plan holds, whatever engine made it.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/crossing_plan.hpp"
#include "core/exchange_plan.hpp"
#include "ferry/group.hpp"
#include "ferry/plan.hpp"
#include "ferry/stream.hpp"

namespace ferry {

class Engine;

/// The routes of received rows, known after the first dispatch with a plan.
struct ReceivedRoutes {
  std::vector<std::int32_t> source_token;  ///< [n]
  std::vector<std::int32_t> topk_idx;      ///< [n, K], local ids
};

/// How a dispatch lays out its rows; a combine may bring rows in no other way.
struct RowLayout {
  RowOrder order = RowOrder::rank_major;
  std::int64_t alignment = 1;
  std::int64_t worst_case_rows = 0;  ///< 0: exact
  friend bool operator==(const RowLayout&, const RowLayout&) = default;
};

/// The layouts of a plan's dispatches, without repeats, the newest last. Touched only by a call
/// that has not taken its place in the group's order yet: the engine lets in one at a time.
class RowLayouts {
 public:
  void add(const RowLayout& layout) {
    std::erase(used_, layout);
    if (used_.size() == kMost) used_.erase(used_.begin());
    used_.push_back(layout);
  }
  const std::vector<RowLayout>& all() const { return used_; }

 private:
  static constexpr std::size_t kMost = 64;
  std::vector<RowLayout> used_{};
};

struct PlanState {
  std::weak_ptr<Engine> engine{};
  std::uint64_t number = 0;  ///< by the order of making in the group, from 1; set with `exchange`
  std::int64_t tokens = 0;
  int topk = 0;
  Event ready{};  ///< complete when `exchange` is filled
  ExchangePlan exchange{};
  ReceivedRoutes routes{};
  RowLayouts layouts{};
  /// Set when a dispatch that will carry the routes was entered, and when it has brought them.
  std::atomic<bool> routes_sent{false};
  std::atomic<bool> routes_known{false};
  std::function<void()> on_wait{};

  // Of groups in several domains.
  CrossingPlan crossing{};  ///< filled with `exchange`
  /// By feeder: where rows that cross to this rank go. Known after the first hierarchical dispatch,
  /// which brings it; touched only by the call whose turn it is.
  std::vector<Forward> forwards{};
  bool forwards_known = false;
  Crossing crossed = Crossing::direct;  ///< how the last dispatch did
};

/// The state of a plan that may be used: throws Error(invalid_argument) for an empty plan and
/// Error(destroyed) when its group is gone.
PlanState& checked(const Plan& plan, const char* caller);
/// The same, after the counts are known.
const ExchangePlan& counted(const Plan& plan, const char* caller);

}  // namespace ferry

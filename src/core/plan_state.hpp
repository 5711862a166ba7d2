// What a Plan holds, whatever engine made it.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/access.hpp"
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
  std::int64_t max_recv_rows = 0;  ///< 0: exact
  friend bool operator==(const RowLayout&, const RowLayout&) = default;
};

/// The layouts of a plan's dispatches that were not refused, without repeats, the newest last.
/// Touched only by a call that has not taken its place in the group's order yet: the engine lets in
/// one at a time. A refusal is known later, on any thread, and counted in what `add` returned.
class RowLayouts {
 public:
  /// How many dispatches of a layout were not refused.
  using Count = std::shared_ptr<std::atomic<std::int64_t>>;

  /// A dispatch is entered. Whoever learns that it was refused takes one off the count.
  Count add(const RowLayout& layout) {
    std::erase_if(used_, [](const Used& used) { return used.dispatches->load() == 0; });
    const auto found = std::find_if(used_.begin(), used_.end(),
                                    [&](const Used& used) { return used.layout == layout; });
    Used newest{layout, found == used_.end() ? std::make_shared<std::atomic<std::int64_t>>(0)
                                             : found->dispatches};
    if (found != used_.end()) used_.erase(found);
    if (used_.size() == kMost) used_.erase(used_.begin());
    ++*newest.dispatches;
    used_.push_back(newest);
    return newest.dispatches;
  }
  std::vector<RowLayout> all() const {
    std::vector<RowLayout> layouts;
    for (const Used& used : used_) {
      if (used.dispatches->load() > 0) layouts.push_back(used.layout);
    }
    return layouts;
  }

 private:
  static constexpr std::size_t kMost = 64;
  struct Used {
    RowLayout layout{};
    Count dispatches{};
  };
  std::vector<Used> used_{};
};

struct PlanState {
  std::weak_ptr<Engine> engine{};
  std::uint64_t number = 0;  ///< as ExchangeTerms has it, from 1; set with `exchange`
  std::int64_t tokens = 0;
  std::int64_t most_tokens = 0;  ///< of any rank; set with `exchange`, host engine
  int topk = 0;
  std::uint32_t epoch = 1;  ///< of the group, when the plan was made; beside topk: takes no room
  Event ready{};            ///< complete when `exchange` is filled
  ExchangePlan exchange{};
  TensorView rank_rows{};  ///< what Plan::rank_rows shows; no data: `exchange` has it
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
  Crossing crossed = Crossing::direct;  ///< how the last dispatch did, but for what a tuner chose
};

/// The state of a plan that may be used: throws Error(invalid_argument) for an empty plan and
/// Error(destroyed) when its group is gone.
PlanState& checked(const Plan& plan, const char* caller);
/// The same of a plan that this engine has made; refuses others.
PlanState& checked(const Plan& plan, const char* caller, const Engine& engine);
/// The same, after the counts are known.
const ExchangePlan& counted(const Plan& plan, const char* caller);

}  // namespace ferry

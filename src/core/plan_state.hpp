// What a Plan holds, whatever engine made it.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/exchange_plan.hpp"
#include "ferry/plan.hpp"
#include "ferry/stream.hpp"

namespace ferry {

class Engine;

/// The routes of received rows, known after the first dispatch with a plan.
struct ReceivedRoutes {
  std::vector<std::int32_t> source_token;  ///< [n]
  std::vector<std::int32_t> topk_idx;      ///< [n, K], local ids
};

struct PlanState {
  std::weak_ptr<Engine> engine{};
  std::uint64_t number = 0;  ///< by the order of making in the group, from 1; set with `exchange`
  std::int64_t tokens = 0;
  int topk = 0;
  Event ready{};  ///< complete when `exchange` is filled
  ExchangePlan exchange{};
  ReceivedRoutes routes{};
  /// Set when a dispatch that will carry the routes was entered, and when it has brought them.
  std::atomic<bool> routes_sent{false};
  std::atomic<bool> routes_known{false};
  std::function<void()> on_wait{};
};

/// The state of a plan that may be used: throws Error(invalid_argument) for an empty plan and
/// Error(destroyed) when its group is gone.
PlanState& checked(const Plan& plan, const char* caller);
/// The same, after the counts are known.
const ExchangePlan& counted(const Plan& plan, const char* caller);

}  // namespace ferry

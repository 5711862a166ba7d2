// What the library alone may reach of the public classes.
#pragma once
#include <memory>
#include <utility>

#include "ferry/group.hpp"
#include "ferry/latency.hpp"

namespace ferry {

struct Access {
  static const std::shared_ptr<Engine>& engine(const Group& group) { return group.engine_; }
  static Plan plan(std::shared_ptr<PlanState> state) { return Plan(std::move(state)); }
  static const std::shared_ptr<PlanState>& state(const Plan& plan) { return plan.state_; }
  static const std::shared_ptr<LatencyState>& state(const LatencyReceived& r) { return r.state_; }
  static std::shared_ptr<LatencyState>& state(LatencyReceived& r) { return r.state_; }
  static std::shared_ptr<LatencyState>& state(LatencyCombined& c) { return c.state_; }
};

}  // namespace ferry

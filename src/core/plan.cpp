#include "ferry/plan.hpp"

#include <string>

#include "core/check.hpp"
#include "core/engine.hpp"
#include "core/pair_counts.hpp"
#include "core/plan_state.hpp"
#include "ferry/error.hpp"

namespace ferry {

namespace {

/// Numbers of a plan that its tensor shares. A tensor has no other way to say that its memory is
/// only to be read.
Tensor shared(const std::vector<std::int32_t>& numbers, const Extents& shape,
              const std::shared_ptr<PlanState>& state) {
  return {TensorView(const_cast<std::int32_t*>(numbers.data()), Dtype::i32, shape), state};
}

/// The state of a plan in CPU memory, after the counts are known; the group may be gone by now.
PlanState& on_cpu(const Plan& plan, const char* caller) {
  if (!plan) refuse(caller, "plan", "an empty one", "one that Group::plan returned");
  PlanState& state = *Access::state(plan);
  state.ready.wait(std::chrono::hours(24), state.on_wait);
  if (state.rank_rows.data == nullptr) return state;
  throw Error(ErrorKind::unsupported,
              std::string(caller) +
                  ": got a plan of a group on a GPU, whose routes stay there; "
                  "expected one of a group in CPU memory");
}

}  // namespace

PlanState& checked(const Plan& plan, const char* caller) {
  if (!plan) {
    throw Error(ErrorKind::invalid_argument,
                std::string(caller) + ": plan is empty; expected one that Group::plan returned");
  }
  const auto engine = Access::state(plan)->engine.lock();
  if (!engine || engine->destroyed()) {
    throw Error(ErrorKind::destroyed,
                std::string(caller) + ": the group that made this plan is destroyed");
  }
  return *Access::state(plan);
}

PlanState& checked(const Plan& plan, const char* caller, const Engine& engine) {
  PlanState& state = checked(plan, caller);
  if (state.engine.lock().get() != &engine) {
    refuse(caller, "plan", "a plan of another group", "one of this group");
  }
  if (state.epoch != engine.epoch()) {
    refuse(caller, "plan", "a plan of epoch " + std::to_string(state.epoch),
           "one that was made in epoch " + std::to_string(engine.epoch()) +
               ", since the last regroup of this group");
  }
  return state;
}

const ExchangePlan& counted(const Plan& plan, const char* caller) {
  PlanState& state = checked(plan, caller);
  state.ready.wait(std::chrono::hours(24), state.on_wait);
  return state.exchange;
}

std::int64_t Plan::tokens() const {
  return checked(*this, "Plan::tokens").tokens;
}

int Plan::topk() const {
  return checked(*this, "Plan::topk").topk;
}

std::int64_t Plan::recv_rows() const {
  return counted(*this, "Plan::recv_rows").recv_rows();
}

std::vector<std::int64_t> Plan::recv_rows_per_rank() const {
  const ExchangePlan& plan = counted(*this, "Plan::recv_rows_per_rank");
  std::vector<std::int64_t> rows;
  for (std::size_t s = 0; s + 1 < plan.recv_offset.size(); ++s) {
    rows.push_back(plan.recv_offset[s + 1] - plan.recv_offset[s]);
  }
  return rows;
}

std::vector<std::int64_t> Plan::send_rows_per_rank() const {
  const ExchangePlan& plan = counted(*this, "Plan::send_rows_per_rank");
  std::vector<std::int64_t> rows;
  for (int d = 0; d < plan.ranks(); ++d) rows.push_back(plan.send_rows(d));
  return rows;
}

Tensor Plan::rank_rows() const {
  PlanState& state = checked(*this, "Plan::rank_rows");
  if (state.rank_rows.data == nullptr) {
    const std::vector<std::int32_t>& rows = counted(*this, "Plan::rank_rows").rank_tokens;
    const std::int64_t ranks = state.exchange.ranks();
    if (rows.empty()) {
      throw Error(ErrorKind::unsupported,
                  "Plan::rank_rows: the group has " + std::to_string(ranks) +
                      " ranks, and what each sends to each is known in groups of at most " +
                      std::to_string(kMatrixRanks) +
                      "; use send_rows_per_rank and recv_rows_per_rank");
    }
    return shared(rows, {ranks, ranks}, state_);
  }
  return {state.rank_rows, state_};
}

Tensor Plan::routes() const {
  const PlanState& state = on_cpu(*this, "Plan::routes");
  return shared(state.exchange.own.topk_idx, {state.tokens, state.topk}, state_);
}

Tensor Plan::received_routes() const {
  const PlanState& state = on_cpu(*this, "Plan::received_routes");
  if (!state.routes_known.load(std::memory_order_acquire)) {
    refuse("Plan::received_routes", "plan", "one that no dispatch has used to its end",
           "a dispatch");
  }
  return shared(state.routes.topk_idx, {state.exchange.recv_rows(), state.topk}, state_);
}

std::vector<std::int64_t> Plan::slots_per_expert() const {
  return counted(*this, "Plan::slots_per_expert").slots_per_expert();
}

std::int64_t Plan::expert_major_rows(std::int64_t alignment) const {
  if (alignment < 1) {
    throw Error(ErrorKind::invalid_argument, "Plan::expert_major_rows: alignment is " +
                                                 std::to_string(alignment) +
                                                 ", expected at least 1");
  }
  return counted(*this, "Plan::expert_major_rows").expert_offsets(alignment).back();
}

Crossing Plan::crossing() const {
  PlanState& state = checked(*this, "Plan::crossing");
  state.ready.wait(std::chrono::hours(24), state.on_wait);
  return state.crossing.chosen;
}

}  // namespace ferry

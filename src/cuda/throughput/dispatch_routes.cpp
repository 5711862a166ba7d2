// The routes of a dispatch: those that it brings, or those that its plan has kept.
#include "cuda/throughput/dispatch_job.hpp"

namespace ferry::cuda {

WideSideLayout DispatchJob::side_layout() const {
  return make_wide_side_layout(granted_rows_, plan_->topk, carries_routes_, has_weights());
}

/// This dispatch brings the routes: where they will be.
void DispatchJob::place_routes() {
  const WideSideLayout layout = side_layout();
  routes_ = {};
  routes_.side = side_;
  routes_.ids = reinterpret_cast<const std::int32_t*>(side_.data() + layout.topk_idx);
  routes_.source_token = reinterpret_cast<std::int32_t*>(side_.data() + layout.source_token);
  routes_.rows = rank_rows_;
  // The tensors are the registered memory itself.
  routes_.topk_idx = {TensorView(side_.data() + layout.wide_ids, Dtype::i64,
                                 {rank_rows_, plan_->topk}, engine_.device()),
                      side_.owner};
  routes_.tokens = {TensorView(routes_.source_token, Dtype::i32, {rank_rows_}, engine_.device()),
                    side_.owner};
  routes_.carrier = launch_.record();
}

void DispatchJob::remember_routes() {
  if (lasting()) plan_->gpu_routes = routes_;
  if (!carries_routes_ || !lasting()) return;
  plan_->slot_rows.clear();
  plan_->carrier.store(routes_.carrier.get());
  plan_->routes_sent.store(true);
}

/// What the plan keeps of this dispatch goes when its refusal is seen. Of a call in a graph one
/// replay may be refused and the next not.
void DispatchJob::remember_layout() {
  const RowLayouts::Count dispatches =
      plan_->layouts.add({options_.order, options_.alignment, options_.worst_case_rows});
  if (!lasting()) return;
  launch_.record()->on_failure = [plan = std::weak_ptr(plan_), dispatches,
                                  record = launch_.record().get()] {
    --*dispatches;
    const auto state = plan.lock();
    if (state && state->carrier.load() == record) state->routes_sent.store(false);
  };
}

/// Routes that have come before, for more rows than those: true when they need new tensors.
bool DispatchJob::extend_routes() {
  if (routes_.topk_idx.rows() >= rank_rows_) return false;
  routes_.topk_idx = engine_.local_tensor(launch_, {rank_rows_, plan_->topk}, Dtype::i64);
  routes_.tokens = engine_.local_tensor(launch_, {rank_rows_}, Dtype::i32);
  return true;
}

void DispatchJob::bring_routes() {
  if (more_routes_) {
    RoutesParameters parameters;
    parameters.group = engine_.view();
    parameters.plan = plan_->routed();
    parameters.brought = routes_.rows;
    parameters.capacity = rank_rows_;
    parameters.ids = routes_.ids;
    parameters.tokens = routes_.source_token;
    parameters.topk_idx = routes_.topk_idx.as<std::int64_t>();
    parameters.source_token = routes_.tokens.as<std::int32_t>();
    parameters.sms = sms_;
    launch_.run(launch_routes(parameters, launch_.stream()), "launch_routes");
  }
  const Extents shape{rank_rows_, plan_->topk};
  result_.topk_idx = {TensorView(routes_.topk_idx.data(), Dtype::i64, shape, engine_.device()),
                      routes_.topk_idx.owner()};
  result_.source_token = {
      TensorView(routes_.tokens.data(), Dtype::i32, {rank_rows_}, engine_.device()),
      routes_.tokens.owner()};
  if (has_weights()) {
    result_.topk_weights = {
        TensorView(side_.data() + side_layout().weights, Dtype::f32, shape, engine_.device()),
        side_.owner};
  }
}

}  // namespace ferry::cuda

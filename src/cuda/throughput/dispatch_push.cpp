// What the kernel of a dispatch is told; in one call, or in two.
#include <algorithm>
#include <utility>

#include "cuda/throughput/dispatch_job.hpp"

namespace ferry::cuda {

CallSignature dispatch_signature(const WireRow& row, int topk, const DispatchOptions& options,
                                 bool carries_routes, std::uint64_t plan) {
  CallSignature call;
  call.kind = CallKind::dispatch;
  call.dtype = static_cast<std::uint32_t>(row.dtype);
  call.columns = row.columns;
  call.scale_columns = row.scale_columns;
  call.topk = static_cast<std::uint32_t>(topk);
  call.order = static_cast<std::uint16_t>(options.order);
  call.routes = carries_routes ? 1 : 0;
  call.weights = options.topk_weights ? 1 : 0;
  call.plan = plan;
  return call;
}

CallSignature DispatchJob::signature() const {
  return dispatch_signature(row_, plan_->topk, options_, carries_routes_, plan_->number);
}

/// True: the plan's kernel has been launched just now.
bool DispatchJob::make_plan() {
  if (!make_plan_) return false;
  std::exchange(make_plan_, {})();
  return true;
}

void DispatchJob::push(StepStatus status) {
  if (halves_ == nullptr) {
    push_tokens(status, 0, plan_->tokens);
    return;
  }
  push_tokens(status, 0, halves_->first);
  if (status == StepStatus::ok) halves_->between();
  push_tokens(status, halves_->first, plan_->tokens);
}

void DispatchJob::push_tokens(StepStatus status, std::int64_t begin, std::int64_t end) {
  DispatchParameters parameters;
  const bool behind_plan = make_plan();
  parameters.group = engine_.view();
  parameters.plan =
      some_tokens(carries_routes_ ? plan_->view : plan_->routed(), engine_.size(), begin, end);
  parameters.call = signature();
  parameters.x = input_ + begin * static_cast<std::int64_t>(x_.row_bytes());
  parameters.row_bytes = static_cast<std::int64_t>(row_.bytes());
  parameters.scale_columns = row_.scale_columns;
  parameters.quantize = row_.quantized;
  parameters.round_scale = row_.round_scale;
  parameters.x_dtype = x_.dtype;
  if (options_.scales) {
    parameters.scale_token_stride = options_.scales->strides[0];
    parameters.scale_column_stride = options_.scales->strides[1];
    parameters.scales =
        static_cast<const float*>(options_.scales->data) + begin * parameters.scale_token_stride;
  }
  parameters.has_weights = has_weights();
  if (has_weights()) {
    parameters.weights =
        static_cast<const float*>(options_.topk_weights->data) + begin * plan_->topk;
  }
  parameters.carries_routes = carries_routes_;
  if (plan_->token_names != nullptr) parameters.token_names = plan_->token_names + begin;
  if (carries_routes_ && lasting()) {
    parameters.came = reinterpret_cast<std::uint64_t*>(plan_->view.data + plan_->routes_state);
  }
  parameters.status = status;
  parameters.need_bytes =
      status == StepStatus::too_many ? std::max(rank_rows_, out_rows_) : need_bytes_;
  parameters.segment = rank_.region.address.segment;
  parameters.offset = rank_.region.address.offset;
  parameters.side_segment = side_.region.address.segment;
  parameters.side_offset = side_.region.address.offset;
  parameters.capacity = rank_rows_;
  if (guessed_) parameters.second = &launch_.record()->pinned().second;
  if (expert_major() && options_.worst_case_rows > 0) {
    parameters.out_capacity = out_rows_;
    parameters.out_alignment = options_.alignment;
  }
  parameters.parts = parts();
  parameters.followed = followed_;
  // A graph's memory is its own, so nobody has used it since the plan. Of a call that makes its
  // plan nothing lies between the two kernels, and memory was taken before both.
  const bool unused = behind_plan || launch_.follows_in_graph(plan_->number);
  parameters.early = unused && parameters.out_capacity == 0;
  parameters.glued = behind_plan && parameters.early;
  parameters.failure = launch_.record()->failure;
  parameters.sms = sms_;
  launch_.enter(parameters.call);
  launch_.run(launch_dispatch(parameters, launch_.stream()), "launch_dispatch");
}

}  // namespace ferry::cuda

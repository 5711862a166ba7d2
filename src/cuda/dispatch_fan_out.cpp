// The fan-out of a dispatch to expert-major order: beside it while the rows come, or after it.
#include <utility>

#include "cuda/dispatch_job.hpp"

namespace ferry::cuda {

void DispatchJob::make_slot_tensors() {
  const std::int64_t local = engine_.placement().local_experts(engine_.rank());
  result_.slot_rows = engine_.local_tensor(launch_, {rank_rows_, plan_->topk}, Dtype::i64);
  result_.expert_offsets = engine_.local_tensor(launch_, {local + 1}, Dtype::i64);
  scratch_ = launch_.temporary(
      engine_.gpu().take_local(fan_out_scratch_bytes(rank_rows_, local), launch_.user()));
}

/// Long exchanges tell of progress, so that those who receive much may begin before the end.
bool DispatchJob::tells_progress() const {
  constexpr std::size_t kLeast = std::size_t{4} << 20;
  return expert_major() && static_cast<std::size_t>(x_.rows()) * row_.bytes() >= kLeast;
}

/// Whether the fan-out follows the rows while they come. A graph's nodes cannot wait for a word
/// that a node beside them raises, and ranks that share a GPU take turns.
bool DispatchJob::follows() const {
  constexpr std::size_t kLeast = std::size_t{32} << 20;
  return expert_major() && !launch_.capture().active && engine_.side_stream() != nullptr &&
         engine_.local_sms() > sms_ &&
         static_cast<std::size_t>(rank_rows_) * row_.bytes() >= kLeast;
}

FanOutParameters DispatchJob::fan_out_parameters() const {
  const auto from = receive_layout(rank_rows_);
  const auto to = receive_layout(out_rows_);
  FanOutParameters parameters;
  parameters.group = engine_.view();
  parameters.plan = plan_->view;
  parameters.ids = routes_.ids;
  parameters.rows = rank_.data() + from.rows;
  parameters.row_bytes = static_cast<std::int64_t>(row_.bytes());
  parameters.scale_columns = row_.scale_columns;
  parameters.capacity = rank_rows_;
  parameters.alignment = options_.alignment;
  parameters.out_capacity = out_rows_;
  parameters.out = expert_.data() + to.rows;
  if (row_.scale_columns > 0) {
    parameters.scales = reinterpret_cast<const float*>(rank_.data() + from.scales);
    parameters.out_scales = reinterpret_cast<float*>(expert_.data() + to.scales);
  }
  parameters.slot_rows = result_.slot_rows.as<std::int64_t>();
  parameters.expert_offsets = result_.expert_offsets.as<std::int64_t>();
  parameters.scratch = reinterpret_cast<std::int32_t*>(scratch_);
  parameters.steps = steps_;
  parameters.sms = engine_.local_sms();
  return parameters;
}

/// Directly after the dispatch: all of the fan-out but its last step, on the SMs that are left.
void DispatchJob::follow() {
  FanOutParameters parameters = fan_out_parameters();
  parameters.sms -= sms_;
  following_.emplace(parameters, *engine_.side_stream(), launch_.stream());
  launch_.run(following_->error(), "a fan-out beside its dispatch");
}

void DispatchJob::fan_out() {
  if (following_) {
    launch_.run(following_->finish(engine_.local_sms()), "launch_fan_out_step");
  } else {
    launch_.run(launch_fan_out(fan_out_parameters(), launch_.stream()), "launch_fan_out");
  }
  if (!lasting()) return;
  auto& known = plan_->slot_rows;
  std::erase_if(known, [&](const auto& old) { return old.alignment == options_.alignment; });
  known.push_back({options_.alignment, result_.slot_rows, launch_.record()});
}

}  // namespace ferry::cuda

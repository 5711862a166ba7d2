// The fan-out of a dispatch to expert-major order: beside it while the rows come, or after it.
#include <algorithm>
#include <utility>

#include "cuda/kernels/base/load.hpp"
#include "cuda/throughput/dispatch_job.hpp"

namespace ferry::cuda {
namespace {

/// Of the current device.
bool has_bulk_copies() {
  KernelLimits limits;
  return kernel_limits(limits) == cudaSuccess && limits.bulk_copies;
}

/// SMs for a fan-out beside its dispatch: what keeps pace with the rows that four GPUs push to a
/// fifth of it, and no more, for its stores hold back those that arrive. Where fewer are left it
/// takes these; with less than the least, one after the other is faster.
constexpr int kLeastFollowerSms = 48, kMostFollowerSms = 80, kFollowersOfSm = 5;

int follower_sms(int sms, int left) {
  return std::min(left, std::clamp(kFollowersOfSm * sms, kLeastFollowerSms, kMostFollowerSms));
}

}  // namespace

void DispatchJob::make_slot_tensors() {
  const std::int64_t local = engine_.placement().local_experts(engine_.rank());
  scratch_ = launch_.temporary(
      engine_.gpu().take_local(fan_out_scratch_bytes(rank_rows_, local), launch_.user()));
  if (take_known_slots()) return;
  result_.slot_rows = engine_.local_tensor(launch_, {rank_rows_, plan_->topk}, Dtype::i64);
  const Tensor offsets = engine_.local_tensor(launch_, {local + 2}, Dtype::i64);
  made_ = reinterpret_cast<std::uint64_t*>(offsets.as<std::int64_t>() + local + 1);
  result_.expert_offsets = {TensorView(offsets.data(), Dtype::i64, {local + 1}, engine_.device()),
                            offsets.owner()};
}

/// Those of an earlier dispatch, whose slots lie alike: nothing has to be placed before rows can be
/// copied as they come.
bool DispatchJob::take_known_slots() {
  slots_made_ = false;
  if (carries_routes_ || !follows()) return false;
  for (const auto& known : plan_->slot_rows) {
    if (known.maker->refused() || known.made == nullptr) continue;
    if (known.alignment != options_.alignment || known.rows.rows() != rank_rows_) continue;
    launch_.use(known.rows.data(), known.rows.owner());
    launch_.use(known.offsets.data(), known.offsets.owner());
    result_.slot_rows = known.rows;
    result_.expert_offsets = known.offsets;
    made_ = known.made;
    slots_made_ = true;
    return true;
  }
  return false;
}

/// Long exchanges tell of progress, so that those who receive much may begin before the end.
int DispatchJob::parts() const {
  constexpr std::size_t kLeast = std::size_t{4} << 20;
  const bool tells = expert_major() && !plan_->scattered &&
                     static_cast<std::size_t>(x_.rows()) * row_.bytes() >= kLeast;
  return tells ? kProgressParts / 2 : 0;  // telling of 16 costs three times as much
}

/// Whether the fan-out copies the rows while they come. Ranks that share a GPU take turns.
bool DispatchJob::follows() const {
  constexpr std::size_t kLeast = std::size_t{32} << 20;
  return expert_major() && !plan_->scattered && !engine_.shares_gpu() && has_bulk_copies() &&
         engine_.local_sms() >= sms_ + kLeastFollowerSms &&
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
  parameters.made = made_;
  parameters.may_be_made = slots_made_;
  parameters.awaits_routes = carries_routes_;
  const int all = engine_.local_sms();
  parameters.sms = followed_ ? follower_sms(sms_, all - sms_) : all;
  return parameters;
}

void DispatchJob::follow() {
  launch_.run(launch_fan_out_beside(fan_out_parameters(), launch_.stream()),
              "launch_fan_out_beside");
}

void DispatchJob::fan_out() {
  launch_.run(launch_fan_out(fan_out_parameters(), launch_.stream()), "launch_fan_out");
}

void DispatchJob::remember_slots() {
  if (!lasting()) return;
  auto& known = plan_->slot_rows;
  std::erase_if(known, [&](const auto& old) { return old.alignment == options_.alignment; });
  known.push_back(
      {options_.alignment, result_.slot_rows, result_.expert_offsets, made_, launch_.record()});
}

}  // namespace ferry::cuda

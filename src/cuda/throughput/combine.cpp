// Combine: rows are put where peers can read them; the owners' GPUs pull and sum them.
#include <algorithm>
#include <string>
#include <utility>

#include "core/check.hpp"
#include "core/exchange_signature.hpp"
#include "cuda/runtime/event.hpp"
#include "cuda/throughput/combine_job.hpp"
#include "engine/regions.hpp"

namespace ferry::cuda {
namespace {

bool is_aligned(const void* data) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0;
}

}  // namespace

CombineJob::CombineJob(CudaEngine& engine, Launch& launch, const ConstTensorView& rows,
                       std::shared_ptr<CudaPlan> plan, const CombineOptions& options)
    : engine_(engine), launch_(launch), rows_(rows), plan_(std::move(plan)), options_(options) {
  sms_ = engine_.sms_for(kCombine, options_.sms);
  check_rows();
}

/// Rows that peers may read: known from the counts, else those of a worst case.
void CombineJob::check_rows() {
  const auto dispatched = plan_->layouts.all();
  const auto of_worst_case = [&](const RowLayout& used) {
    return used.worst_case_rows > 0 && used.order == options_.order &&
           used.alignment == options_.alignment && used.worst_case_rows == rows_.rows();
  };
  const bool like_weights = !has_weights() || options_.topk_weights->shape[0] == rows_.rows();
  const bool worst_case = std::any_of(dispatched.begin(), dispatched.end(), of_worst_case);
  if (!plan_->counts_known() && !(worst_case && like_weights)) {
    if (plan_->captured || launch_.capture().active) {
      refuse(kCombine, worst_case ? "topk_weights" : "rows",
             std::to_string(worst_case ? options_.topk_weights->shape[0] : rows_.rows()) + " rows",
             "the worst_case_rows of a dispatch of this plan, whose counts the CPU does not know "
             "while its stream is captured");
    }
    plan_->ready.wait(kUntilItEnds, engine_.config().on_wait);
  }
  if (plan_->counts_known()) {
    check_combine_rows(plan_->exchange, dispatched, rows_.rows(),
                       {options_.order, options_.alignment});
    if (has_weights()) {
      check_combine_weights(plan_->exchange, dispatched, options_.topk_weights->shape, plan_->topk);
    }
    brought_ = plan_->exchange.recv_rows();
    return;
  }
  brought_ = rows_.rows();  // of expert-major rows at most as many
}

CallSignature CombineJob::signature() const {
  return combine_signature(rows_, plan_->topk, options_, plan_->number);
}

Held CombineJob::copied(const void* from, std::size_t bytes, Held to) {
  if (bytes > 0) {
    check(cudaMemcpyAsync(to.data(), from, bytes, cudaMemcpyDeviceToDevice, launch_.stream()),
          "cudaMemcpyAsync");
  }
  launch_.temporary(to);
  return to;
}

/// False: there is no registered memory for them.
bool CombineJob::place_rows() {
  const std::size_t row_bytes = static_cast<std::size_t>(brought_) * rows_.row_bytes();
  const std::size_t weight_bytes = has_weights()
                                       ? static_cast<std::size_t>(brought_) *
                                             static_cast<std::size_t>(plan_->topk) * sizeof(float)
                                       : 0;
  auto& arena = engine_.gpu().registered();
  const auto in_place = [&](const void* data, std::size_t bytes) {
    auto found = is_aligned(data) ? arena.find(data, bytes) : std::nullopt;
    if (found) launch_.use(data, {});  // the caller holds it
    return found;
  };
  const auto rows = expert_major() ? std::nullopt : in_place(rows_.data, row_bytes);
  const auto weights =
      has_weights() ? in_place(options_.topk_weights->data, weight_bytes) : std::nullopt;
  std::vector<std::size_t> sizes;
  if (!rows) sizes.push_back(row_bytes);
  if (!weights) sizes.push_back(weight_bytes);
  need_bytes_ = static_cast<std::int64_t>(engine::Regions::total(sizes));
  auto taken = engine_.take_registered(launch_, sizes);
  if (!taken) return false;
  if (rows) {
    at_ = *rows;
  } else if (expert_major() || is_aligned(rows_.data)) {
    sums_ = taken->front();
    at_ = sums_.region.address;
    launch_.temporary(sums_);
    prepare_sums();
  } else {
    at_ = copied(rows_.data, row_bytes, taken->front()).region.address;
  }
  const void* given = has_weights() ? options_.topk_weights->data : nullptr;
  side_at_ = weights ? *weights : copied(given, weight_bytes, taken->back()).region.address;
  return true;
}

Tensor CombineJob::slot_rows() {
  for (const auto& known : plan_->slot_rows) {
    if (known.maker->refused()) continue;
    if (known.alignment == options_.alignment && known.rows.rows() >= brought_) {
      if (!plan_->captured) launch_.record()->needs.push_back(known.maker);
      launch_.use(known.rows.data(), known.rows.owner());
      return known.rows;
    }
  }
  const std::int64_t local = engine_.placement().local_experts(engine_.rank());
  const Tensor rows = engine_.local_tensor(launch_, {brought_, plan_->topk}, Dtype::i64);
  const Tensor offsets = engine_.local_tensor(launch_, {local + 1}, Dtype::i64);
  FanOutParameters parameters;
  parameters.group = engine_.view();
  parameters.plan = plan_->routed();
  parameters.after_dispatch = false;
  parameters.ids = plan_->gpu_routes.ids;
  // Only the places are wanted: the rows are as short as can be, and nobody reads them.
  constexpr std::size_t kLeastRow = 16;
  const auto scratch = [&](std::int64_t count) {
    return launch_.temporary(
        engine_.gpu().take_local(static_cast<std::size_t>(count) * kLeastRow, launch_.user()));
  };
  parameters.row_bytes = kLeastRow;
  parameters.rows = scratch(brought_);
  parameters.out = scratch(rows_.rows());
  parameters.capacity = brought_;
  parameters.alignment = options_.alignment;
  parameters.out_capacity = rows_.rows();
  parameters.slot_rows = rows.as<std::int64_t>();
  parameters.expert_offsets = offsets.as<std::int64_t>();
  parameters.scratch = reinterpret_cast<std::int32_t*>(launch_.temporary(
      engine_.gpu().take_local(fan_out_scratch_bytes(brought_, local), launch_.user())));
  parameters.sms = engine_.local_sms();
  launch_.run(launch_fan_out(parameters, launch_.stream()), "launch_fan_out");
  return rows;
}

PlanView CombineJob::view() const {
  return expert_major() ? plan_->routed() : plan_->view;
}

void CombineJob::prepare_sums() {
  sum_.group = engine_.view();
  sum_.plan = view();
  if (expert_major()) {
    slots_ = slot_rows();
    sum_.slot_rows = slots_.as<std::int64_t>();
  }
  sum_.rows = aligned(rows_);
  sum_.input_rows = rows_.rows();
  if (options_.apply_weights) {
    sum_.weights = static_cast<const float*>(options_.topk_weights->data);
  }
  sum_.dtype = rows_.dtype;
  sum_.columns = rows_.columns();
  sum_.capacity = brought_;
  sum_.out = sums_.data();
  share_sms();
}

void CombineJob::share_sms() {
  constexpr int kEnough = 48;  // more only crowd out those who read the rows
  const int share = engine_.local_sms(), least = std::clamp(share / 4, 1, kEnough);
  sum_.sms = std::clamp(share - sms_, least, kEnough);
  sms_ = std::min(sms_, std::max(1, share - sum_.sms));
}

const std::byte* CombineJob::aligned(const std::optional<ConstTensorView>& tensor) {
  if (!tensor) return nullptr;
  const auto* data = static_cast<const std::byte*>(tensor->data);
  if (is_aligned(data) || tensor->bytes() == 0) return data;
  return copied(data, tensor->bytes(), engine_.gpu().take_local(tensor->bytes(), launch_.user()))
      .data();
}

void CombineJob::pull(bool room) {
  if (halves_ == nullptr) {
    pull_tokens(room, 0, plan_->tokens);
  } else {
    pull_tokens(room, halves_->last, plan_->tokens);
    if (room) halves_->between(result_);
    sum_.sms = 0;  // the sums of slots are there
    pull_tokens(room, 0, halves_->last);
  }
  if (room && out_ != result_.x.data()) {
    check(cudaMemcpyAsync(result_.x.data(), out_, result_.x.view().bytes(),
                          cudaMemcpyDeviceToDevice, launch_.stream()),
          "cudaMemcpyAsync");
  }
}

void CombineJob::pull_tokens(bool room, std::int64_t begin, std::int64_t end) {
  const auto at = [&](auto* data, std::int64_t each) {
    return data == nullptr ? data : data + begin * each;
  };
  const auto row_bytes = static_cast<std::int64_t>(rows_.row_bytes());
  CombineParameters parameters;
  parameters.group = engine_.view();
  parameters.plan = some_tokens(view(), engine_.size(), begin, end);
  parameters.call = signature();
  parameters.segment = at_.segment;
  parameters.offset = at_.offset;
  parameters.side_segment = side_at_.segment;
  parameters.side_offset = side_at_.offset;
  parameters.rows = brought_;
  parameters.status = room ? StepStatus::ok : StepStatus::no_room;
  parameters.need_bytes = need_bytes_;
  parameters.has_weights = has_weights();
  parameters.dtype = rows_.dtype;
  parameters.columns = rows_.columns();
  parameters.bias0 = at(bias0_, row_bytes);
  parameters.bias1 = at(bias1_, row_bytes);
  parameters.out = room ? at(out_, row_bytes) : nullptr;
  parameters.out_weights =
      room && has_weights() ? at(result_.topk_weights.as<float>(), plan_->topk) : nullptr;
  parameters.failure = launch_.record()->failure;
  parameters.sms = sms_;
  const bool sums = room && sum_.sms > 0;
  parameters.after_sums = sums && !plan_->scattered;  // else it begins when they have ended
  launch_.enter(parameters.call);
  if (sums) {
    launch_.run(launch_sum_slots(sum_, launch_.stream()), "launch_sum_slots");
  }
  launch_.run(launch_combine(parameters, launch_.stream()), "launch_combine");
}

/// All memory of the call, before it is entered. False: there is none, which every rank must learn.
bool CombineJob::reserve() {
  try {
    const Extents own{plan_->tokens, rows_.columns()};
    if (options_.out) {
      result_.x = {*options_.out, std::shared_ptr<void>(options_.out->data, [](void*) {})};
    } else {
      result_.x = engine_.local_tensor(launch_, own, rows_.dtype);
    }
    if (has_weights()) {
      result_.topk_weights =
          engine_.local_tensor(launch_, {plan_->tokens, plan_->topk}, Dtype::f32);
    }
    bias0_ = aligned(options_.bias0);
    bias1_ = aligned(options_.bias1);
    out_ = static_cast<std::byte*>(result_.x.data());
    const std::size_t bytes = result_.x.view().bytes();
    if (!is_aligned(out_) && bytes > 0) {
      out_ = launch_.temporary(engine_.gpu().take_local(bytes, launch_.user()));
    }
    return place_rows();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::exhausted) throw;
    return false;
  }
}

Combined CombineJob::run() {
  launch_.outlives(plan_->slot);
  launch_.use(plan_->memory.data(), plan_->memory.owner);
  launch_.use(plan_->gpu_routes.side.data(), plan_->gpu_routes.side.owner);
  if (expert_major() && !plan_->captured && plan_->gpu_routes.carrier) {
    launch_.record()->needs.push_back(plan_->gpu_routes.carrier);
  }
  const bool room = reserve();
  pull(room);
  const bool blocking = launch_.blocking();
  result_.event = launch_.finish();
  if (blocking || !room) {
    engine_.finish(kCombine, result_.event);
    result_.event = {};
  }
  return result_;
}

Combined CudaEngine::combine(const ConstTensorView& rows, const Plan& plan,
                             const CombineOptions& options) {
  check_usable(kCombine);
  auto state = plan_of(plan, kCombine);
  check_combine(rows, state->tokens, state->topk, options, device());
  Launch launch(*this, kCombine, options.stream);
  if (options.order == RowOrder::expert_major && !state->routes_sent.load()) {
    refuse(kCombine, "plan", "a plan that no dispatch has used yet",
           "a dispatch first: it brings the routes that expert-major rows need");
  }
  return CombineJob(*this, launch, rows, std::move(state), options).run();
}

Combined CudaEngine::combine_in_halves(const ConstTensorView& rows, const Plan& plan,
                                       const CombineOptions& options, const CombineHalves& halves) {
  check_usable(kCombine);
  Launch launch(*this, kCombine, options.stream);
  CombineJob job(*this, launch, rows, plan_of(plan, kCombine), options);
  job.in_halves(halves);
  return job.run();
}

}  // namespace ferry::cuda

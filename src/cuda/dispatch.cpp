// Dispatch: regions, the push on the GPU, routes, the fan-out to expert-major order.
#include <algorithm>
#include <string>
#include <utility>

#include "core/check.hpp"
#include "cuda/cuda_engine.hpp"
#include "cuda/dispatch_job.hpp"

namespace ferry::cuda {

DispatchJob::DispatchJob(CudaEngine& engine, Launch& launch, const ConstTensorView& x,
                         std::shared_ptr<CudaPlan> plan, const DispatchOptions& options)
    : engine_(engine), launch_(launch), x_(x), plan_(std::move(plan)), options_(options) {
  sms_ = engine_.sms_for(kDispatch, options_.sms);
  carries_routes_ = !plan_->routes_sent.load();
  // Of an input without room for its copy nothing is used; it must only be readable.
  const auto* data = static_cast<const std::byte*>(x_.data);
  input_ = data - reinterpret_cast<std::uintptr_t>(data) % 16;
  if (options_.worst_case_rows > 0) {
    // Every row that arrives fills at least one expert-major row, so this bounds both.
    rank_rows_ = out_rows_ = options_.worst_case_rows;
  } else if (!guess_rows()) {
    know_rows();
  }
  if (options_.out && options_.out->rows() < out_rows_) {
    refuse(kDispatch, "out", std::to_string(options_.out->rows()) + " rows",
           "at least " + std::to_string(out_rows_));
  }
}

bool DispatchJob::take_regions(CudaEngine::Pieces pieces) {
  std::vector<std::size_t> sizes{
      make_receive_layout(rank_rows_, x_.row_bytes(), scale_columns()).bytes,
      make_side_layout(rank_rows_, plan_->topk, carries_routes_, has_weights()).bytes};
  if (expert_major()) {
    sizes.push_back(make_receive_layout(out_rows_, x_.row_bytes(), scale_columns()).bytes);
  }
  need_bytes_ = static_cast<std::int64_t>(engine::Regions::total(sizes));
  auto taken = engine_.take_registered(launch_, sizes, pieces);
  if (!taken) return false;
  granted_rows_ = rank_rows_;
  rank_ = std::move((*taken)[0]);
  side_ = std::move((*taken)[1]);
  if (expert_major()) expert_ = std::move((*taken)[2]);
  for (const Held& held : {rank_, side_, expert_}) launch_.outlives(held.owner);
  return true;
}

CallSignature DispatchJob::signature() const {
  CallSignature call;
  call.kind = CallKind::dispatch;
  call.dtype = static_cast<std::uint32_t>(x_.dtype);
  call.columns = x_.columns();
  call.scale_columns = scale_columns();
  call.topk = static_cast<std::uint32_t>(plan_->topk);
  call.order = static_cast<std::uint32_t>(options_.order);
  call.routes = carries_routes_ ? 1 : 0;
  call.weights = has_weights() ? 1 : 0;
  call.plan = plan_->number;
  return call;
}

void DispatchJob::push(StepStatus status) {
  DispatchParameters parameters;
  parameters.group = engine_.view();
  parameters.plan = carries_routes_ ? plan_->view : plan_->routed();
  parameters.call = signature();
  parameters.x = input_;
  parameters.row_bytes = static_cast<std::int64_t>(x_.row_bytes());
  if (options_.scales) {
    parameters.scales = static_cast<const float*>(options_.scales->data);
    parameters.scale_columns = scale_columns();
    parameters.scale_token_stride = options_.scales->strides[0];
    parameters.scale_column_stride = options_.scales->strides[1];
  }
  if (has_weights()) parameters.weights = static_cast<const float*>(options_.topk_weights->data);
  parameters.carries_routes = carries_routes_;
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
  parameters.failure = launch_.record()->failure;
  parameters.sms = sms_;
  launch_.enter(parameters.call);
  launch_.run(launch_dispatch(parameters, launch_.stream()), "launch_dispatch");
}

const std::byte* DispatchJob::input() {
  const auto* data = static_cast<const std::byte*>(x_.data);
  if (x_.bytes() == 0 || reinterpret_cast<std::uintptr_t>(data) % 16 == 0) return data;
  std::byte* copy = launch_.temporary(engine_.gpu().take_local(x_.bytes(), launch_.user()));
  check(cudaMemcpyAsync(copy, data, x_.bytes(), cudaMemcpyDeviceToDevice, launch_.stream()),
        "cudaMemcpyAsync");
  return copy;
}

void DispatchJob::make_slot_tensors() {
  const std::int64_t local = engine_.placement().local_experts(engine_.rank());
  result_.slot_rows = engine_.local_tensor(launch_, {rank_rows_, plan_->topk}, Dtype::i64);
  result_.expert_offsets = engine_.local_tensor(launch_, {local + 1}, Dtype::i64);
  scratch_ = launch_.temporary(
      engine_.gpu().take_local(fan_out_scratch_bytes(rank_rows_, local), launch_.user()));
}

/// All memory of the call, before it is entered. False: there is none, which every rank must learn.
bool DispatchJob::reserve(CudaEngine::Pieces pieces) {
  try {
    if (!take_regions(pieces)) return false;
    if (pieces != CudaEngine::Pieces::idle) input_ = input();  // else the kernel has it
    if (carries_routes_) place_routes();
    fills_routes_ = make_route_tensors();
    if (expert_major()) make_slot_tensors();
    return true;
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::exhausted) throw;
    return false;
  }
}

/// This dispatch brings the routes: where they will be.
void DispatchJob::place_routes() {
  const auto layout = make_side_layout(rank_rows_, plan_->topk, true, has_weights());
  routes_ = {};
  routes_.side = side_;
  routes_.ids = reinterpret_cast<const std::int32_t*>(side_.data() + layout.topk_idx);
  routes_.source_token = reinterpret_cast<std::int32_t*>(side_.data() + layout.source_token);
  routes_.rows = rank_rows_;
  routes_.carrier = launch_.record();
}

void DispatchJob::remember_routes() {
  if (lasting()) plan_->gpu_routes = routes_;
  if (!carries_routes_ || !lasting()) return;
  plan_->slot_rows.clear();
  plan_->carrier.store(routes_.carrier.get());
  plan_->routes_sent.store(true);
  launch_.record()->on_failure = [plan = std::weak_ptr(plan_), record = launch_.record().get()] {
    const auto state = plan.lock();
    if (state && state->carrier.load() == record) state->routes_sent.store(false);
  };
}

/// The tensors of the routes, of at least this dispatch's rows; true: they are to be filled.
bool DispatchJob::make_route_tensors() {
  if (routes_.topk_idx && routes_.topk_idx.rows() >= rank_rows_) return false;
  routes_.topk_idx = engine_.local_tensor(launch_, {rank_rows_, plan_->topk}, Dtype::i64);
  if (routes_.rows == rank_rows_) {  // the tensor is the registered memory itself
    routes_.tokens = {TensorView(routes_.source_token, Dtype::i32, {rank_rows_}, engine_.device()),
                      routes_.side.owner};
    return true;
  }
  routes_.tokens = engine_.local_tensor(launch_, {rank_rows_}, Dtype::i32);
  const std::size_t bytes =
      static_cast<std::size_t>(std::min(routes_.rows, rank_rows_)) * sizeof(std::int32_t);
  if (bytes > 0) {
    check(cudaMemcpyAsync(routes_.tokens.data(), routes_.source_token, bytes,
                          cudaMemcpyDeviceToDevice, launch_.stream()),
          "cudaMemcpyAsync");
  }
  return true;
}

void DispatchJob::bring_routes() {
  const auto layout = make_side_layout(granted_rows_, plan_->topk, carries_routes_, has_weights());
  auto* weights = has_weights() ? reinterpret_cast<float*>(side_.data() + layout.weights) : nullptr;
  const bool tail = options_.worst_case_rows > 0 && has_weights();
  if (fills_routes_ || tail) {
    RoutesParameters parameters;
    parameters.group = engine_.view();
    parameters.plan = plan_->view;
    parameters.capacity = rank_rows_;
    parameters.side_ids = routes_.ids;
    parameters.topk_idx = routes_.topk_idx.as<std::int64_t>();
    parameters.source_token = routes_.tokens.as<std::int32_t>();
    parameters.weights = weights;
    if (carries_routes_ && lasting()) {
      parameters.came = reinterpret_cast<std::uint64_t*>(plan_->view.data + plan_->routes_state);
    }
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
    result_.topk_weights = {TensorView(weights, Dtype::f32, shape, engine_.device()), side_.owner};
  }
}

void DispatchJob::fan_out() {
  const auto from = make_receive_layout(rank_rows_, x_.row_bytes(), scale_columns());
  const auto to = make_receive_layout(out_rows_, x_.row_bytes(), scale_columns());
  FanOutParameters parameters;
  parameters.group = engine_.view();
  parameters.plan = plan_->view;
  parameters.ids = routes_.ids;
  parameters.rows = rank_.data() + from.rows;
  parameters.row_bytes = static_cast<std::int64_t>(x_.row_bytes());
  parameters.scale_columns = scale_columns();
  parameters.capacity = rank_rows_;
  parameters.alignment = options_.alignment;
  parameters.out_capacity = out_rows_;
  parameters.out = expert_.data() + to.rows;
  if (options_.scales) {
    parameters.scales = reinterpret_cast<const float*>(rank_.data() + from.scales);
    parameters.out_scales = reinterpret_cast<float*>(expert_.data() + to.scales);
  }
  parameters.slot_rows = result_.slot_rows.as<std::int64_t>();
  parameters.expert_offsets = result_.expert_offsets.as<std::int64_t>();
  parameters.scratch = reinterpret_cast<std::int32_t*>(scratch_);
  parameters.sms = engine_.local_sms();
  launch_.run(launch_fan_out(parameters, launch_.stream()), "launch_fan_out");
  if (!lasting()) return;
  auto& known = plan_->slot_rows;
  std::erase_if(known, [&](const auto& old) { return old.alignment == options_.alignment; });
  known.push_back({options_.alignment, result_.slot_rows, launch_.record()});
}

void DispatchJob::make_rows() {
  const Held& rows = expert_major() ? expert_ : rank_;
  const std::int64_t held = expert_major() ? out_rows_ : granted_rows_;
  const auto layout = make_receive_layout(held, x_.row_bytes(), scale_columns());
  const Extents shape{out_rows_, x_.columns()};
  result_.x = {TensorView(rows.data(), x_.dtype, shape, engine_.device()), rows.owner};
  if (options_.scales) {
    result_.scales = {TensorView(rows.data() + layout.scales, Dtype::f32,
                                 {out_rows_, scale_columns()}, engine_.device()),
                      rows.owner};
  }
  if (!options_.out) return;
  void* data = options_.out->data;
  if (result_.x.view().bytes() > 0) {
    check(cudaMemcpyAsync(data, rows.data(), result_.x.view().bytes(), cudaMemcpyDeviceToDevice,
                          launch_.stream()),
          "cudaMemcpyAsync");
  }
  result_.x = {TensorView(data, x_.dtype, shape, engine_.device()),
               std::shared_ptr<void>(data, [](void*) {})};
}

/// Plans and routes may have been made on another stream than the one that uses them now.
void DispatchJob::use_of_others() {
  launch_.use(plan_->memory.data(), plan_->memory.owner);
  launch_.use(routes_.side.data(), routes_.side.owner);
  launch_.use(routes_.topk_idx.data(), routes_.topk_idx.owner());
  launch_.use(routes_.tokens.data(), routes_.tokens.owner());
}

Received DispatchJob::run() {
  if (!carries_routes_) {
    routes_ = plan_->gpu_routes;
    // In a graph the GPU alone knows how the run of a call ended.
    if (!plan_->captured) launch_.record()->needs.push_back(routes_.carrier);
  }
  launch_.outlives(plan_);
  launch_.record()->worst_case_rows = options_.worst_case_rows;
  if (plan_error_) fail_with_plan();
  bool room = guessed_ && reserve_guess();
  if (guessed_ && !room) know_rows();
  if (plan_error_) fail_with_plan();
  const bool countable = std::max(rank_rows_, out_rows_) <= kMaxRows;
  if (!guessed_) room = countable && reserve(CudaEngine::Pieces::any);
  use_of_others();
  push(!countable ? StepStatus::too_many : room ? StepStatus::ok : StepStatus::no_room);
  if (guessed_) room = settle_guess();
  if (!room) {
    const Event event = launch_.finish();  // every rank learns of it
    engine_.finish(kDispatch, event);
    throw Error(ErrorKind::exhausted,
                std::string(kDispatch) + ": no room for " + std::to_string(need_bytes_) + " bytes");
  }
  plan_->layouts.add({options_.order, options_.alignment, options_.worst_case_rows});
  remember_routes();
  bring_routes();
  if (expert_major()) fan_out();
  make_rows();
  // The rows' own region is the result's, or only the fan-out's.
  launch_.temporary(std::move(rank_));
  launch_.temporary(std::move(side_));
  const bool blocking = launch_.blocking();
  result_.event = launch_.finish();
  if (blocking) {
    engine_.finish(kDispatch, result_.event);
    result_.event = {};
  }
  return result_;
}

Received CudaEngine::dispatch(const ConstTensorView& x, const Plan& plan,
                              const DispatchOptions& options) {
  check_usable(kDispatch);
  auto state = plan_of(plan, kDispatch);
  check_dispatch(x, state->tokens, state->topk, options, device());
  Launch launch(*this, kDispatch, options.stream);
  return DispatchJob(*this, launch, x, std::move(state), options).run();
}

}  // namespace ferry::cuda

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
    : engine_(engine),
      launch_(launch),
      x_(x),
      row_(wire_row(x, options)),
      plan_(std::move(plan)),
      options_(options) {
  sms_ = engine_.sms_for(kDispatch, options_.sms);
  // Whether or not anybody has asked how their carrier ended: every rank sees that alike.
  const auto& carrier = plan_->gpu_routes.carrier;
  const bool lost = !plan_->captured && carrier && carrier->refused();
  carries_routes_ = !plan_->routes_sent.load() || lost;
  if (options_.worst_case_rows == 0) {
    learn_counts();
    rank_rows_ = plan_->exchange.recv_rows();
    out_rows_ =
        expert_major() ? plan_->exchange.expert_offsets(options_.alignment).back() : rank_rows_;
  } else {
    // Every row that arrives fills at least one expert-major row, so this bounds both.
    rank_rows_ = out_rows_ = options_.worst_case_rows;
  }
  if (options_.out && options_.out->rows() < out_rows_) {
    refuse(kDispatch, "out", std::to_string(options_.out->rows()) + " rows",
           "at least " + std::to_string(out_rows_));
  }
}

void DispatchJob::learn_counts() {
  if (plan_->counts_known()) return;
  if (launch_.capture().active) {
    throw Error(ErrorKind::unsupported,
                "dispatch: its stream is being captured into a CUDA graph, where the CPU cannot "
                "wait for the counts of the plan; give worst_case_rows, or a plan whose counts "
                "are known");
  }
  plan_->ready.wait(engine_.config().deadline, engine_.config().on_wait);
}

WideSideLayout DispatchJob::side_layout() const {
  return make_wide_side_layout(rank_rows_, plan_->topk, carries_routes_, has_weights());
}

bool DispatchJob::take_regions() {
  std::vector<std::size_t> sizes{receive_layout(rank_rows_).bytes, side_layout().bytes};
  if (expert_major()) {
    sizes.push_back(receive_layout(out_rows_).bytes);
  }
  need_bytes_ = static_cast<std::int64_t>(engine::Regions::total(sizes));
  auto taken = engine_.take_registered(launch_, sizes);
  if (!taken) return false;
  rank_ = std::move((*taken)[0]);
  side_ = std::move((*taken)[1]);
  if (expert_major()) expert_ = std::move((*taken)[2]);
  for (const Held& held : {rank_, side_, expert_}) launch_.outlives(held.owner);
  return true;
}

CallSignature DispatchJob::signature() const {
  CallSignature call;
  call.kind = CallKind::dispatch;
  call.dtype = static_cast<std::uint32_t>(row_.dtype);
  call.columns = row_.columns;
  call.scale_columns = row_.scale_columns;
  call.topk = static_cast<std::uint32_t>(plan_->topk);
  call.order = static_cast<std::uint32_t>(options_.order);
  call.routes = carries_routes_ ? 1 : 0;
  call.weights = has_weights() ? 1 : 0;
  call.plan = plan_->number;
  return call;
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

void DispatchJob::push(bool room) {
  DispatchParameters parameters;
  parameters.group = engine_.view();
  parameters.plan = carries_routes_ ? plan_->view : plan_->routed();
  parameters.call = signature();
  parameters.x = input_;
  parameters.row_bytes = static_cast<std::int64_t>(row_.bytes());
  parameters.scale_columns = row_.scale_columns;
  parameters.quantize = row_.quantized;
  parameters.round_scale = row_.round_scale;
  parameters.x_dtype = x_.dtype;
  if (options_.scales) {
    parameters.scales = static_cast<const float*>(options_.scales->data);
    parameters.scale_token_stride = options_.scales->strides[0];
    parameters.scale_column_stride = options_.scales->strides[1];
  }
  if (has_weights()) parameters.weights = static_cast<const float*>(options_.topk_weights->data);
  parameters.carries_routes = carries_routes_;
  if (carries_routes_ && lasting()) {
    parameters.came = reinterpret_cast<std::uint64_t*>(plan_->view.data + plan_->routes_state);
  }
  parameters.status = room ? StepStatus::ok : StepStatus::no_room;
  parameters.need_bytes = need_bytes_;
  parameters.segment = rank_.region.address.segment;
  parameters.offset = rank_.region.address.offset;
  parameters.side_segment = side_.region.address.segment;
  parameters.side_offset = side_.region.address.offset;
  parameters.capacity = rank_rows_;
  if (expert_major() && options_.worst_case_rows > 0) {
    parameters.out_capacity = out_rows_;
    parameters.out_alignment = options_.alignment;
  }
  parameters.tells_progress = tells_progress();
  parameters.steps = steps_;
  // A graph's memory is its own, so nobody has used it since the plan.
  parameters.early = launch_.follows_in_graph(plan_->number) && parameters.out_capacity == 0;
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
bool DispatchJob::reserve() {
  // Of an input without room for its copy nothing is used; it must only be readable.
  const auto* data = static_cast<const std::byte*>(x_.data);
  input_ = data - reinterpret_cast<std::uintptr_t>(data) % 16;
  try {
    if (!take_regions()) return false;
    input_ = input();
    if (carries_routes_) place_routes();
    more_routes_ = extend_routes();
    if (expert_major()) make_slot_tensors();
    return true;
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::exhausted) throw;
    return false;
  }
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
  launch_.record()->on_failure = [plan = std::weak_ptr(plan_), record = launch_.record().get()] {
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

void DispatchJob::make_rows() {
  const Held& rows = expert_major() ? expert_ : rank_;
  const auto layout = receive_layout(out_rows_);
  const Extents shape{out_rows_, row_.columns};
  result_.x = {TensorView(rows.data(), row_.dtype, shape, engine_.device()), rows.owner};
  if (row_.scale_columns > 0) {
    result_.scales = {TensorView(rows.data() + layout.scales, Dtype::f32,
                                 {out_rows_, row_.scale_columns}, engine_.device()),
                      rows.owner};
  }
  if (!options_.out) return;
  void* data = options_.out->data;
  if (result_.x.view().bytes() > 0) {
    check(cudaMemcpyAsync(data, rows.data(), result_.x.view().bytes(), cudaMemcpyDeviceToDevice,
                          launch_.stream()),
          "cudaMemcpyAsync");
  }
  result_.x = {TensorView(data, row_.dtype, shape, engine_.device()),
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
  const bool room = reserve();
  use_of_others();
  launch_.outlives(plan_);
  launch_.record()->worst_case_rows = options_.worst_case_rows;
  if (room && follows()) steps_ = engine_.next_steps();
  push(room);
  if (!room) {
    const Event event = launch_.finish();  // every rank learns of it
    engine_.finish(kDispatch, event);
    throw Error(ErrorKind::exhausted,
                std::string(kDispatch) + ": no room for " + std::to_string(need_bytes_) + " bytes");
  }
  if (steps_.count > 0) follow();
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

// Dispatch: regions, the push on the GPU, what the caller gets.
#include <algorithm>
#include <string>
#include <utility>

#include "core/check.hpp"
#include "cuda/throughput/dispatch_job.hpp"
#include "cuda/throughput/engine.hpp"

namespace ferry::cuda {

DispatchJob::DispatchJob(CudaEngine& engine, Launch& launch, const ConstTensorView& x,
                         std::shared_ptr<CudaPlan> plan, const DispatchOptions& options,
                         std::function<void()> make_plan)
    : engine_(engine),
      launch_(launch),
      x_(x),
      row_(wire_row(x, options)),
      plan_(std::move(plan)),
      options_(options),
      make_plan_(std::move(make_plan)),
      makes_plan_(static_cast<bool>(make_plan_)) {
  sms_ = engine_.sms_for(kDispatch, options_.sms);
  // Not sent, or sent in vain and the caller knows. A rank that knows better than others, or worse,
  // is told so by the GPU, which refuses the call on all of them.
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
}

/// Once the plan's call has been entered the peers make this one, too, so they must learn of it.
void DispatchJob::check_out() {
  if (!options_.out || options_.out->rows() >= out_rows_) return;
  if (makes_plan_ && !make_plan_) {
    push(StepStatus::too_many);
    const Event event = launch_.finish();
    try {
      engine_.finish(kDispatch, event);
    } catch (const Error&) {  // says no more
    }
  }
  refuse(kDispatch, "out", std::to_string(options_.out->rows()) + " rows",
         "at least " + std::to_string(out_rows_));
}

bool DispatchJob::take_regions(CudaEngine::Pieces pieces) {
  granted_rows_ = rank_rows_;
  std::vector<std::size_t> sizes{receive_layout(rank_rows_).bytes, side_layout().bytes};
  if (expert_major()) {
    sizes.push_back(receive_layout(out_rows_).bytes);
  }
  need_bytes_ = static_cast<std::int64_t>(engine::Regions::total(sizes));
  auto taken = engine_.take_registered(launch_, sizes, pieces);
  if (!taken) return false;
  rank_ = std::move((*taken)[0]);
  side_ = std::move((*taken)[1]);
  if (expert_major()) expert_ = std::move((*taken)[2]);
  for (const Held& held : {rank_, side_, expert_}) launch_.outlives(held.owner);
  return true;
}

const std::byte* DispatchJob::input() {
  const auto* data = static_cast<const std::byte*>(x_.data);
  if (x_.bytes() == 0 || reinterpret_cast<std::uintptr_t>(data) % 16 == 0) return data;
  std::byte* copy = launch_.temporary(engine_.gpu().take_local(x_.bytes(), launch_.user()));
  check(cudaMemcpyAsync(copy, data, x_.bytes(), cudaMemcpyDeviceToDevice, launch_.stream()),
        "cudaMemcpyAsync");
  return copy;
}

/// All memory of the call, before it is entered. False: there is none, which every rank must learn.
bool DispatchJob::reserve(CudaEngine::Pieces pieces) {
  try {
    if (!take_regions(pieces)) return false;
    if (pieces != CudaEngine::Pieces::idle) input_ = input();  // else the kernel has it
    if (carries_routes_) place_routes();
    more_routes_ = extend_routes();
    if (expert_major()) make_slot_tensors();
    return true;
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::exhausted) throw;
    return false;
  }
}

void DispatchJob::make_rows() {
  const Held& rows = expert_major() ? expert_ : rank_;
  const auto layout = receive_layout(expert_major() ? out_rows_ : granted_rows_);
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
  launch_.outlives(plan_->slot);
  launch_.record()->worst_case_rows = options_.worst_case_rows;
  launch_.record()->plan = plan_->made;
  launch_.record()->plan_failure = {plan_->slot, &plan_->counts->failure};
  if (plan_error_) fail_with_plan();
  check_out();
  bool room = guessed_ && reserve_guess();
  if (guessed_ && !room) know_rows();
  if (plan_error_) fail_with_plan();
  const bool countable = std::max(rank_rows_, out_rows_) <= kMaxRows;
  if (!guessed_) room = countable && reserve(CudaEngine::Pieces::any);
  use_of_others();
  followed_ = room && follows();
  push(!countable ? StepStatus::too_many : room ? StepStatus::ok : StepStatus::no_room);
  plan_->made->told_by_another();
  if (guessed_) room = settle_guess();
  if (!room) {
    const Event event = launch_.finish();  // every rank learns of it
    engine_.finish(kDispatch, event);
    throw Error(ErrorKind::exhausted,
                std::string(kDispatch) + ": no room for " + std::to_string(need_bytes_) + " bytes");
  }
  if (followed_) follow();  // directly after the dispatch: nothing of the stream comes between
  remember_layout();
  remember_routes();
  bring_routes();
  if (expert_major() && !followed_) fan_out();
  if (expert_major()) remember_slots();
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
  if (!state->memory.owner) {
    const bool carries = !state->routes_sent.load();
    refuse_without_plan(
        launch, *state,
        dispatch_signature(wire_row(x, options), state->topk, options, carries, state->number));
  }
  return DispatchJob(*this, launch, x, std::move(state), options).run();
}

Received CudaEngine::dispatch_in_halves(const ConstTensorView& x, const Plan& plan,
                                        const DispatchOptions& options,
                                        const DispatchHalves& halves) {
  check_usable(kDispatch);
  Launch launch(*this, kDispatch, options.stream);
  DispatchJob job(*this, launch, x, plan_of(plan, kDispatch), options);
  job.in_halves(halves);
  return job.run();
}

Received CudaEngine::plan_and_dispatch(const ConstTensorView& x, const ConstTensorView& topk_idx,
                                       const DispatchOptions& options) {
  check_usable(kDispatch);
  check_routes(kDispatch, topk_idx, device());
  const auto topk = static_cast<int>(topk_idx.shape[1]);
  check_dispatch(x, topk_idx.shape[0], topk, options, device());
  (void)sms_for(kDispatch, options.sms);
  Launch planning(*this, "plan", options.stream);
  Launch launch(planning, kDispatch);  // has the turn until both calls are made
  PlanParameters parameters;
  std::shared_ptr<CudaPlan> state;
  try {
    planning.record()->routes_of = kDispatch;
    state = prepare_plan(planning, topk_idx, parameters);
    DispatchJob job(*this, launch, x, state, options,
                    [&] { enter_plan(planning, state, parameters); });
    Received received = job.run();
    received.plan = Plan(state);
    return received;
  } catch (const std::exception& thrown) {
    const bool expected = planning.number() != 0 && launch.number() == 0;  // by the peers
    const bool captured = planning.capture().active;
    if (expected && !state && (captured || planning.record()->refused())) {
      // Without memory for the plan, which all ranks know: they are in the dispatch now.
      try {
        tell_no_room(
            launch,
            dispatch_signature(wire_row(x, options), topk, options, true, planning.number()), 0);
      } catch (const Error&) {  // says no more
      }
    } else if (expected && !captured) {
      give_up(kDispatch, thrown);
    }
    throw;
  }
}

}  // namespace ferry::cuda

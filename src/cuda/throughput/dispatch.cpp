// Dispatch, phase by phase: how many rows there will be, memory for them, the kernels, what the
// plan keeps and the caller gets.
//
// The count of an exact size is known, or guessed so that rows fly before the CPU has learnt the
// counts. What was guessed too much goes back; when it was too little, the kernels wait for a
// second grant (kernels/throughput/second_grant.cuh).
#include <algorithm>
#include <atomic>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/exchange_signature.hpp"
#include "cuda/runtime/event.hpp"
#include "cuda/throughput/dispatch_call.hpp"
#include "engine/regions.hpp"

namespace ferry::cuda {

namespace {

/// True: the plan's kernel has been launched just now.
bool enter_plan(const DispatchCall& call) {
  if (!call.enter_plan || call.plan->number != 0) return false;
  call.enter_plan();
  return true;
}

/// What a dispatch has before it takes memory.
DispatchBuffers no_buffers(const DispatchCall& call, const DispatchRows& rows, StepStatus status) {
  DispatchBuffers none;
  none.rows = rows;
  none.status = status;
  // Of an input without room for its copy nothing is used; it must only be readable.
  const auto* data = static_cast<const std::byte*>(call.x.data);
  none.input = data - reinterpret_cast<std::uintptr_t>(data) % 16;
  if (!call.carries_routes) none.routes = call.plan->gpu_routes;
  return none;
}

/// Long exchanges tell of progress, so that those who receive much may begin before the end.
int parts(const DispatchCall& call) {
  constexpr std::size_t kLeast = std::size_t{4} << 20;
  const bool tells = call.expert_major() && !call.plan->scattered &&
                     static_cast<std::size_t>(call.x.rows()) * call.row.bytes() >= kLeast;
  return tells ? kProgressParts / 2 : 0;  // telling of 16 costs three times as much
}

/// Tokens [begin, end).
void push_tokens(const DispatchCall& call, const DispatchBuffers& buffers, std::int64_t begin,
                 std::int64_t end) {
  const CudaPlan& plan = *call.plan;
  const DispatchOptions& options = call.options;
  DispatchParameters parameters;
  const bool behind_plan = enter_plan(call);
  parameters.group = call.engine.view();
  parameters.plan =
      some_tokens(call.carries_routes ? plan.view : plan.routed(), call.engine.size(), begin, end);
  parameters.call =
      dispatch_signature(call.row, plan.topk, options, call.carries_routes, plan.number);
  parameters.x = buffers.input + begin * static_cast<std::int64_t>(call.x.row_bytes());
  parameters.row_bytes = static_cast<std::int64_t>(call.row.bytes());
  parameters.scale_columns = call.row.scale_columns;
  parameters.quantize = call.row.quantized;
  parameters.round_scale = call.row.round_scale;
  parameters.x_dtype = call.x.dtype;
  if (options.scales) {
    parameters.scale_token_stride = options.scales->strides[0];
    parameters.scale_column_stride = options.scales->strides[1];
    parameters.scales =
        static_cast<const float*>(options.scales->data) + begin * parameters.scale_token_stride;
  }
  parameters.has_weights = call.has_weights();
  if (call.has_weights()) {
    parameters.weights = static_cast<const float*>(options.topk_weights->data) + begin * plan.topk;
  }
  parameters.carries_routes = call.carries_routes;
  if (plan.token_names != nullptr) parameters.token_names = plan.token_names + begin;
  if (call.carries_routes && call.lasting()) {
    parameters.came = reinterpret_cast<std::uint64_t*>(plan.view.data + plan.routes_state);
  }
  const DispatchRows& rows = buffers.rows;
  parameters.status = buffers.status;
  parameters.need_bytes =
      buffers.status == StepStatus::too_many ? std::max(rows.rank, rows.out) : buffers.need_bytes;
  parameters.segment = buffers.rank.region.address.segment;
  parameters.offset = buffers.rank.region.address.offset;
  parameters.side_segment = buffers.side.region.address.segment;
  parameters.side_offset = buffers.side.region.address.offset;
  parameters.capacity = rows.rank;
  if (rows.guessed) parameters.second = &call.launch.record()->pinned().second;
  if (call.expert_major() && options.max_recv_rows > 0) {
    parameters.out_capacity = rows.out;
    parameters.out_alignment = options.alignment;
  }
  parameters.parts = parts(call);
  parameters.followed = buffers.fan_out.beside;
  // A graph's memory is its own, so nobody has used it since the plan. Of a call that makes its
  // plan nothing lies between the two kernels, and memory was taken before both.
  const bool unused = behind_plan || call.launch.follows_in_graph(plan.made);
  parameters.early = unused && parameters.out_capacity == 0;
  parameters.glued = behind_plan && parameters.early;
  parameters.fixed = call.launch.capture().active;
  if (buffers.status == StepStatus::ok) call.launch.grant({buffers.rank, buffers.side});
  parameters.failure = call.launch.record()->failure;
  parameters.num_sms = pushing_sms(call, buffers.fan_out);
  call.launch.enter(parameters.call);
  call.launch.run(launch_dispatch(parameters, call.launch.stream()), "launch_dispatch");
}

void push(const DispatchCall& call, const DispatchBuffers& buffers) {
  const std::int64_t tokens = call.plan->tokens;
  if (call.split == nullptr) {
    call.launch.begin_timing();  // before its plan: a mark between would keep it from coming early
    push_tokens(call, buffers, 0, tokens);
    if (!call.expert_major()) call.launch.end_timing();  // the CPU may come late with the rest
    return;
  }
  push_tokens(call, buffers, 0, call.split->first);
  if (buffers.status == StepStatus::ok) call.split->between();
  push_tokens(call, buffers, call.split->first, tokens);
}

/// Of a call in which this rank only takes part.
void finish_in_vain(const DispatchCall& call) {
  const Event event = call.launch.finish();
  try {
    call.engine.finish(kDispatch, event);
  } catch (const Error&) {  // says no more than is known
  }
}

/// What the plan's call failed with, on all ranks; or none, and its counts are known.
std::exception_ptr learn_counts(const DispatchCall& call) {
  CudaPlan& plan = *call.plan;
  if (plan.counts_known()) return {};
  if (call.launch.capture().active) {
    throw Error(ErrorKind::unsupported,
                "dispatch: its stream is being captured into a CUDA graph, where the CPU cannot "
                "wait for the counts of the plan; give max_recv_rows, or a plan whose counts "
                "are known");
  }
  enter_plan(call);
  try {
    plan.ready.wait(kUntilItEnds, call.engine.config().on_wait);
  } catch (const Error&) {
    if (plan.captured || !plan.told()) throw;
    return std::current_exception();
  }
  return {};
}

DispatchRows known_rows(const DispatchCall& call) {
  // Every row that arrives fills at least one expert-major row, so this bounds both.
  const std::int64_t most = call.options.max_recv_rows;
  if (most > 0) return {most, most};
  if (const std::exception_ptr error = learn_counts(call)) {
    push(call, no_buffers(call, {}, StepStatus::ok));  // refused on every rank, as the plan was
    finish_in_vain(call);
    std::rethrow_exception(error);
  }
  const ExchangePlan& exchange = call.plan->exchange;
  const std::int64_t rows = exchange.recv_rows();
  if (call.carries_routes) call.engine.row_guess().learn(call.plan->tokens, rows);
  if (!call.expert_major()) return {rows, rows};
  return {rows, exchange.expert_offsets(call.options.alignment).back()};
}

/// Only for the first dispatch of a plan, which comes when its counts are not there yet. Every
/// rank's own choice.
std::optional<DispatchRows> guessed_rows(const DispatchCall& call) {
  const CudaPlan& plan = *call.plan;
  if (call.options.max_recv_rows > 0 || call.options.out) return {};
  if (!call.carries_routes || call.expert_major() || plan.scattered) return {};
  if (call.launch.capture().active || plan.captured || plan.told()) return {};
  const std::int64_t rows = call.engine.row_guess().rows(plan.tokens, call.engine.size());
  if (rows < 1 || rows > kMaxRows) return {};
  return DispatchRows{rows, rows, true};
}

/// Once the plan's call has been entered the peers make this one, too, so they must learn of it.
void check_out(const DispatchCall& call, const DispatchRows& rows) {
  if (!call.options.out || call.options.out->rows() >= rows.out) return;
  if (call.enter_plan && call.plan->number != 0) {
    push(call, no_buffers(call, rows, StepStatus::too_many));
    finish_in_vain(call);
  }
  refuse(kDispatch, "out", std::to_string(call.options.out->rows()) + " rows",
         "at least " + std::to_string(rows.out));
}

WideSideLayout side_layout(const DispatchCall& call, const DispatchBuffers& buffers) {
  return make_wide_side_layout(buffers.granted, call.plan->topk, call.carries_routes,
                               call.has_weights());
}

bool take_regions(const DispatchCall& call, CudaEngine::Pieces pieces, DispatchBuffers& to) {
  to.granted = to.rows.rank;
  std::vector<std::size_t> sizes{call.receive_layout(to.rows.rank).bytes,
                                 side_layout(call, to).bytes};
  if (call.expert_major()) sizes.push_back(call.receive_layout(to.rows.out).bytes);
  to.need_bytes = static_cast<std::int64_t>(engine::Regions::total(sizes));
  auto taken = call.engine.take_registered(call.launch, sizes, pieces);
  if (!taken) return false;
  to.rank = std::move((*taken)[0]);
  to.side = std::move((*taken)[1]);
  if (call.expert_major()) to.expert = std::move((*taken)[2]);
  for (const Held& held : {to.rank, to.side, to.expert}) call.launch.outlives(held.owner);
  return true;
}

const std::byte* aligned_input(const DispatchCall& call) {
  const std::size_t bytes = call.x.bytes();
  const auto* data = static_cast<const std::byte*>(call.x.data);
  if (bytes == 0 || reinterpret_cast<std::uintptr_t>(data) % 16 == 0) return data;
  std::byte* copy = call.launch.temporary(call.engine.gpu().take_local(bytes, call.launch.user()));
  check(cudaMemcpyAsync(copy, data, bytes, cudaMemcpyDeviceToDevice, call.launch.stream()),
        "cudaMemcpyAsync");
  return copy;
}

/// This dispatch brings the routes: where they will be.
CudaPlan::Routes placed_routes(const DispatchCall& call, const DispatchBuffers& buffers) {
  const WideSideLayout layout = side_layout(call, buffers);
  const Device device = call.engine.device();
  const Held& side = buffers.side;
  CudaPlan::Routes routes;
  routes.side = side;
  routes.ids = reinterpret_cast<const std::int32_t*>(side.data() + layout.topk_idx);
  routes.source_token = reinterpret_cast<std::int32_t*>(side.data() + layout.source_token);
  routes.rows = buffers.rows.rank;
  // The tensors are the registered memory itself.
  routes.topk_idx = {
      TensorView(side.data() + layout.wide_ids, Dtype::i64, {routes.rows, call.plan->topk}, device),
      side.owner};
  routes.tokens = {TensorView(routes.source_token, Dtype::i32, {routes.rows}, device), side.owner};
  routes.carrier = call.launch.record();
  return routes;
}

/// All memory of the call, before it is entered.
DispatchBuffers reserve(const DispatchCall& call, const DispatchRows& rows,
                        CudaEngine::Pieces pieces) {
  DispatchBuffers buffers = no_buffers(call, rows, StepStatus::no_room);
  try {
    if (!take_regions(call, pieces, buffers)) return buffers;
    // Of a kernel that runs already it has been taken.
    if (pieces != CudaEngine::Pieces::idle) buffers.input = aligned_input(call);
    if (call.carries_routes) buffers.routes = placed_routes(call, buffers);
    buffers.more_routes = buffers.routes.topk_idx.rows() < rows.rank;
    if (buffers.more_routes) {
      buffers.routes.topk_idx =
          call.engine.local_tensor(call.launch, {rows.rank, call.plan->topk}, Dtype::i64);
      buffers.routes.tokens = call.engine.local_tensor(call.launch, {rows.rank}, Dtype::i32);
    }
    if (call.expert_major()) buffers.fan_out = take_fan_out(call, rows.rank);
    if (call.options.row_weights) {
      buffers.fan_out.row_weights = call.engine.local_tensor(call.launch, {rows.out}, Dtype::f32);
    }
    buffers.status = StepStatus::ok;
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::exhausted) throw;
  }
  return buffers;
}

/// The first two phases.
DispatchBuffers prepare(const DispatchCall& call) {
  if (const auto guessed = guessed_rows(call)) {
    engine::RowGuess& guess = call.engine.row_guess();
    DispatchBuffers buffers = reserve(call, *guessed, CudaEngine::Pieces::spare);
    if (buffers.status == StepStatus::ok) return buffers;
    if (guess.worth_memory()) {
      buffers = reserve(call, *guessed, CudaEngine::Pieces::any);
      if (buffers.status == StepStatus::ok) return buffers;
      guess.found_no_memory();
    }
  }
  const DispatchRows rows = known_rows(call);
  check_out(call, rows);
  if (std::max(rows.rank, rows.out) > kMaxRows) return no_buffers(call, rows, StepStatus::too_many);
  return reserve(call, rows, CudaEngine::Pieces::any);
}

/// As if so many rows had been granted; but the places inside the regions stay.
DispatchBuffers narrowed(const DispatchCall& call, DispatchBuffers buffers, std::int64_t rows) {
  const auto used = static_cast<std::size_t>(rows);
  const auto columns = static_cast<std::size_t>(call.row.scale_columns);
  call.engine.gpu().shrink(buffers.rank, columns > 0 ? call.receive_layout(buffers.granted).scales +
                                                           used * columns * sizeof(float)
                                                     : used * call.row.bytes());
  buffers.rows = {rows, rows, true};
  CudaPlan::Routes& routes = buffers.routes;
  const auto first = [&](const Tensor& tensor, const Extents& shape) {
    return Tensor(TensorView(tensor.data(), tensor.dtype(), shape, call.engine.device()),
                  tensor.owner());
  };
  routes.rows = rows;
  routes.topk_idx = first(routes.topk_idx, {rows, call.plan->topk});
  routes.tokens = first(routes.tokens, {rows});
  return buffers;
}

/// What was granted stays until the call has ended, but nobody writes there.
DispatchBuffers granted_again(const DispatchCall& call, DispatchBuffers buffers,
                              std::int64_t rows) {
  call.engine.stay_in(CallKind::grow);
  ++call.engine.guesses().too_low;
  call.launch.temporary(std::move(buffers.rank));
  call.launch.temporary(std::move(buffers.side));
  const DispatchRows known{rows, rows, true};
  buffers = rows > kMaxRows ? no_buffers(call, known, StepStatus::too_many)
                            : reserve(call, known, CudaEngine::Pieces::idle);
  if (buffers.status == StepStatus::ok) call.launch.grant({buffers.rank, buffers.side});
  SecondGrant& grant = call.launch.record()->pinned().second;
  grant.status = buffers.status;
  grant.segment = buffers.rank.region.address.segment;
  grant.offset = buffers.rank.region.address.offset;
  grant.side_segment = buffers.side.region.address.segment;
  grant.side_offset = buffers.side.region.address.offset;
  grant.rows = rows;
  grant.detail = buffers.status == StepStatus::too_many ? rows : buffers.need_bytes;
  std::atomic_ref(grant.written).store(1, std::memory_order_release);
  return buffers;
}

/// The kernel runs; now the CPU learns how many rows there are.
DispatchBuffers settle_guess(const DispatchCall& call, DispatchBuffers buffers) {
  CudaEngine& engine = call.engine;
  engine.stay_in(CallKind::dispatch);
  std::exception_ptr refused;
  try {
    refused = learn_counts(call);
    if (!refused) {
      const std::int64_t rows = call.plan->exchange.recv_rows();
      engine.row_guess().learn(call.plan->tokens, rows);
      ++engine.guesses().made;
      return rows > buffers.granted ? granted_again(call, std::move(buffers), rows)
                                    : narrowed(call, std::move(buffers), rows);
    }
  } catch (const std::exception& thrown) {
    engine.give_up(kDispatch, thrown);  // the kernels may wait for this rank
    throw;
  }
  finish_in_vain(call);
  std::rethrow_exception(refused);
}

/// What later calls of the plan use. It goes when the refusal of this one is seen; of a call in a
/// graph one replay may be refused and the next not.
void remember(const DispatchCall& call, const DispatchBuffers& buffers) {
  CudaPlan& plan = *call.plan;
  const std::int64_t alignment = call.options.alignment;
  const std::shared_ptr<CallRecord>& record = call.launch.record();
  const RowLayouts::Count dispatches =
      plan.layouts.add({call.options.order, alignment, call.options.max_recv_rows});
  if (!call.lasting()) return;
  record->on_failure = [plan = std::weak_ptr(call.plan), dispatches, record = record.get()] {
    --*dispatches;
    const auto state = plan.lock();
    if (state && state->carrier.load() == record) state->routes_sent.store(false);
  };
  plan.gpu_routes = buffers.routes;
  if (call.carries_routes) {
    plan.slot_rows.clear();
    plan.carrier.store(buffers.routes.carrier.get());
    plan.routes_sent.store(true);
  }
  if (!call.expert_major()) return;
  std::erase_if(plan.slot_rows, [&](const auto& old) { return old.alignment == alignment; });
  const FanOut& slots = buffers.fan_out;
  plan.slot_rows.push_back({alignment, slots.slot_rows, slots.expert_offsets, slots.made, record});
}

void launch_routes(const DispatchCall& call, const DispatchBuffers& buffers) {
  RoutesParameters parameters;
  parameters.group = call.engine.view();
  parameters.plan = call.plan->routed();
  parameters.brought = buffers.routes.rows;
  parameters.capacity = buffers.rows.rank;
  parameters.ids = buffers.routes.ids;
  parameters.tokens = buffers.routes.source_token;
  parameters.topk_idx = buffers.routes.topk_idx.as<std::int64_t>();
  parameters.source_token = buffers.routes.tokens.as<std::int32_t>();
  parameters.num_sms = call.num_sms;
  call.launch.run(launch_routes(parameters, call.launch.stream()), "launch_routes");
}

Received results(const DispatchCall& call, const DispatchBuffers& buffers) {
  const Device device = call.engine.device();
  const DispatchRows& rows = buffers.rows;
  const Held& held = call.expert_major() ? buffers.expert : buffers.rank;
  const auto layout = call.receive_layout(call.expert_major() ? rows.out : buffers.granted);
  const Extents shape{rows.out, call.row.columns}, routes{rows.rank, call.plan->topk};
  Received result;
  result.x = {TensorView(held.data(), call.row.dtype, shape, device), held.owner};
  if (call.row.scale_columns > 0) {
    result.scales = {TensorView(held.data() + layout.scales, Dtype::f32,
                                {rows.out, call.row.scale_columns}, device),
                     held.owner};
  }
  const Tensor& ids = buffers.routes.topk_idx;
  const Tensor& tokens = buffers.routes.tokens;
  result.topk_idx = {TensorView(ids.data(), Dtype::i64, routes, device), ids.owner()};
  result.source_token = {TensorView(tokens.data(), Dtype::i32, {rows.rank}, device),
                         tokens.owner()};
  if (call.has_weights()) {
    std::byte* weights = buffers.side.data() + side_layout(call, buffers).weights;
    result.topk_weights = {TensorView(weights, Dtype::f32, routes, device), buffers.side.owner};
  }
  result.slot_rows = buffers.fan_out.slot_rows;
  result.expert_offsets = buffers.fan_out.expert_offsets;
  result.row_weights = buffers.fan_out.row_weights;
  if (!call.options.out) return result;
  void* out = call.options.out->data;
  if (const std::size_t bytes = result.x.view().bytes(); bytes > 0) {
    check(cudaMemcpyAsync(out, held.data(), bytes, cudaMemcpyDeviceToDevice, call.launch.stream()),
          "cudaMemcpyAsync");
  }
  result.x = {TensorView(out, call.row.dtype, shape, device),
              std::shared_ptr<void>(out, [](void*) {})};
  return result;
}

/// After the fan-out.
void launch_row_weights(const DispatchCall& call, const Received& result) {
  WeightsParameters parameters;
  parameters.slot_rows = result.slot_rows.as<std::int64_t>();
  parameters.from = result.topk_weights.as<float>();
  parameters.slots = result.topk_weights.view().shape.product();
  parameters.rows = result.row_weights.rows();
  parameters.to = result.row_weights.as<float>();
  parameters.num_sms = call.engine.local_sms();
  call.launch.run(launch_row_weights(parameters, call.launch.stream()), "launch_row_weights");
}

/// What the launch has to know of the plan.
void use_plan(const DispatchCall& call) {
  CallRecord& record = *call.launch.record();
  const std::shared_ptr<CudaPlan>& plan = call.plan;
  // In a graph the GPU alone knows how the run of a call ended.
  if (!call.carries_routes && !plan->captured) record.needs.push_back(plan->gpu_routes.carrier);
  call.launch.outlives(plan->slot);
  record.max_recv_rows = call.options.max_recv_rows;
  record.plan = plan->made;
  record.plan_failure = {plan->slot, &plan->counts->failure};
}

/// Plans and routes may have been made on another stream than the one that uses them now.
void use_of_others(const DispatchCall& call, const CudaPlan::Routes& routes) {
  call.launch.use(call.plan->memory.data(), call.plan->memory.owner);
  call.launch.use(routes.side.data(), routes.side.owner);
  call.launch.use(routes.topk_idx.data(), routes.topk_idx.owner());
  call.launch.use(routes.tokens.data(), routes.tokens.owner());
}

Received run(const DispatchCall& call) {
  CudaEngine& engine = call.engine;
  Launch& launch = call.launch;
  use_plan(call);
  DispatchBuffers buffers = prepare(call);
  use_of_others(call, buffers.routes);
  push(call, buffers);
  call.plan->made->told_by_another();
  if (buffers.rows.guessed) buffers = settle_guess(call, std::move(buffers));
  if (buffers.status != StepStatus::ok) {
    const Event event = launch.finish();  // every rank learns of it
    engine.finish(kDispatch, event);
    throw Error(ErrorKind::exhausted, std::string(kDispatch) + ": no room for " +
                                          std::to_string(buffers.need_bytes) + " bytes");
  }
  // Beside: directly after the dispatch, so nothing of the stream comes between.
  if (buffers.fan_out.beside) launch_fan_out(call, buffers);
  remember(call, buffers);
  if (buffers.more_routes) launch_routes(call, buffers);
  if (call.expert_major() && !buffers.fan_out.beside) launch_fan_out(call, buffers);
  Received result = results(call, buffers);
  if (call.options.row_weights) launch_row_weights(call, result);
  // The rows' own region is the result's, or only the fan-out's.
  launch.temporary(std::move(buffers.rank));
  launch.temporary(std::move(buffers.side));
  const bool blocking = launch.blocking();
  result.event = launch.finish();
  if (blocking) {
    engine.finish(kDispatch, result.event);
    result.event = {};
  }
  return result;
}

}  // namespace

Received dispatch(CudaEngine& engine, const ConstTensorView& x, const Plan& plan,
                  const DispatchOptions& options) {
  engine.check_usable(kDispatch);
  auto state = plan_of(engine, plan, kDispatch);
  check_dispatch(x, state->tokens, state->topk, options, engine.device());
  Launch launch(engine, kDispatch, options.stream);
  if (!state->memory.owner) {
    const bool carries = !state->routes_sent.load();
    refuse_without_plan(
        engine, launch, *state,
        dispatch_signature(wire_row(x, options), state->topk, options, carries, state->number));
  }
  return run({engine, launch, x, std::move(state), options});
}

Received dispatch_split(CudaEngine& engine, const ConstTensorView& x, const Plan& plan,
                        const DispatchOptions& options, const SplitDispatch& split) {
  engine.check_usable(kDispatch);
  Launch launch(engine, kDispatch, options.stream);
  return run({engine, launch, x, plan_of(engine, plan, kDispatch), options, {}, &split});
}

Received plan_and_dispatch(CudaEngine& engine, const ConstTensorView& x,
                           const ConstTensorView& topk_idx, const DispatchOptions& options) {
  engine.check_usable(kDispatch);
  check_routes(kDispatch, topk_idx, engine.device());
  const auto topk = static_cast<int>(topk_idx.shape[1]);
  check_dispatch(x, topk_idx.shape[0], topk, options, engine.device());
  (void)engine.sms_for(kDispatch, options.num_sms);
  Launch planning(engine, "plan", options.stream);
  Launch launch(planning, kDispatch);  // has the turn until both calls are made
  PlanParameters parameters;
  std::shared_ptr<CudaPlan> state;
  try {
    planning.record()->routes_of = kDispatch;
    state = prepare_plan(engine, planning, topk_idx, 0, parameters);
    Received received =
        run({engine, launch, x, state, options, [&] { enter_plan(planning, state, parameters); }});
    received.plan = Access::plan(state);
    return received;
  } catch (const std::exception& thrown) {
    const bool expected = planning.number() != 0 && launch.number() == 0;  // by the peers
    const bool captured = planning.capture().active;
    if (expected && !state && (captured || planning.record()->refused())) {
      // Without memory for the plan, which all ranks know: they are in the dispatch now.
      try {
        tell_no_room(
            engine, launch,
            dispatch_signature(wire_row(x, options), topk, options, true, planning.number()), 0);
      } catch (const Error&) {  // says no more
      }
    } else if (expected && !captured) {
      engine.give_up(kDispatch, thrown);
    }
    throw;
  }
}

}  // namespace ferry::cuda

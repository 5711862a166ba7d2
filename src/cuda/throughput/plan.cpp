// Plan: the count exchange on the GPU; the CPU learns the counts when they are there.
#include "cuda/throughput/plan.hpp"
#include <atomic>

#include "core/check.hpp"
#include "core/exchange_signature.hpp"
#include "core/layout.hpp"
#include "cuda/kernels/base/barrier.hpp"
#include "cuda/throughput/call_event.hpp"
#include "cuda/throughput/engine.hpp"

namespace ferry::cuda {

CudaPlan::~CudaPlan() {
  if (!made || !events) return;
  try {
    (void)made->end(*events);
  } catch (...) {  // the GPU has failed
  }
}

void CudaPlan::fill_exchange() {
  const auto ranks = static_cast<std::size_t>(view.placement.ranks);
  exchange.placement = view.placement;
  exchange.own.topk = topk;
  exchange.own.tokens = tokens;
  exchange.rank_tokens.assign(count_words, count_words + ranks * ranks);
  const std::size_t slots = ranks * static_cast<std::size_t>(exchange.local_experts());
  exchange.expert_slots.assign(count_words + ranks * ranks, count_words + ranks * ranks + slots);
  sum_rank_tokens(exchange);
  exchange.send_offset.assign(1, 0);
  for (const std::int32_t sent : exchange.tokens_of(exchange.rank)) {
    exchange.send_offset.push_back(exchange.send_offset.back() + sent);
  }
}

bool CudaPlan::counts_known() {
  if (captured || !told() || counts->failure.reason != Reason::none) return false;
  std::call_once(filled_, [this] { fill_exchange(); });
  return true;
}

std::shared_ptr<CudaPlan> plan_of(CudaEngine& engine, const Plan& plan, const char* call) {
  (void)checked(plan, call, engine);
  return std::static_pointer_cast<CudaPlan>(Access::state(plan));  // this engine made it
}

void tell_no_room(CudaEngine& engine, Launch& launch, const CallSignature& call,
                  std::size_t bytes) {
  BarrierParameters parameters;
  parameters.group = engine.view();
  parameters.call = call;
  parameters.stage = call.kind == CallKind::plan ? Stage::counts : Stage::grants;
  parameters.status = StepStatus::no_room;
  parameters.need_bytes = static_cast<std::int64_t>(bytes);
  parameters.failure = launch.record()->failure;
  launch.enter(call);
  launch.run(launch_barrier(parameters, launch.stream()), "launch_barrier");
  engine.finish(launch.name(), launch.finish());
}

void refuse_without_plan(CudaEngine& engine, Launch& launch, const CudaPlan& plan,
                         const CallSignature& call) {
  launch.record()->plan = plan.made;
  launch.record()->plan_failure = {plan.slot, &plan.counts->failure};
  tell_no_room(engine, launch, call, 0);
  throw refusal(engine, *plan.made, plan.counts->failure);
}

namespace {

/// A plan in a graph holds nothing before the graph has run; the memory was somebody else's.
void forget_states(CudaEngine& engine, const CudaPlan& plan) {
  const cudaStream_t own = engine.gpu().own().stream;
  for (const std::size_t state : {plan.view.layout.state, plan.routes_state}) {
    check(cudaMemsetAsync(plan.memory.data() + state, 0, sizeof(std::uint64_t), own),
          "cudaMemsetAsync");
  }
  const GpuEvent done = engine.gpu().events()->take();
  check(cudaEventRecord(done.get(), own), "cudaEventRecord");
  poll([&] { return is_done(done); }, engine.config().deadline, engine.config().on_wait);
}

/// All of a plan but its memory and its call.
std::shared_ptr<CudaPlan> new_plan(CudaEngine& engine, Launch& launch,
                                   const ConstTensorView& topk_idx) {
  const Placement& placement = engine.placement();
  const int rank = engine.rank();
  auto state = std::make_shared<CudaPlan>();
  state->engine = engine.weak_from_this();
  state->tokens = topk_idx.shape[0];
  state->topk = static_cast<int>(topk_idx.shape[1]);
  state->on_wait = engine.config().on_wait;
  state->captured = launch.capture().active;
  state->made = launch.record();
  state->events = engine.gpu().events();
  state->epoch = static_cast<std::uint32_t>(engine.epoch());
  state->exchange.rank = rank;
  state->exchange.placement = placement;
  state->view.tokens = state->tokens;
  state->view.topk = state->topk;
  state->view.placement = placement;
  state->view.layout =
      make_plan_layout(state->tokens, state->topk, engine.size(), placement.local_experts(rank));
  state->routes_state = round_up(state->view.layout.bytes, 16);
  state->slot = engine.pinned_words();
  state->counts = new (state->slot.get()) HostCounts();
  state->count_words =
      reinterpret_cast<std::int32_t*>(state->slot.get() + round_up(sizeof(HostCounts), 16));
  state->ready = Event(std::make_shared<CountsEvent>(engine.weak_from_this(), state, engine.words(),
                                                     engine.device().index));
  return state;
}

/// What all ranks have learnt of the plan's call, which this one had no memory for. On a stream the
/// others learn it later, and make a dispatch meanwhile: this rank must take part in it.
std::shared_ptr<CudaPlan> plan_without_memory(CudaEngine& engine, Launch& launch,
                                              const ConstTensorView& topk_idx) {
  auto state = new_plan(engine, launch, topk_idx);
  state->number = launch.number();
  state->counts->failure = *launch.record()->failure;
  std::atomic_ref(state->counts->done).store(1, std::memory_order_release);
  return state;
}

}  // namespace

std::shared_ptr<CudaPlan> prepare_plan(CudaEngine& engine, Launch& launch,
                                       const ConstTensorView& topk_idx,
                                       std::uint64_t placement_digest, PlanParameters& parameters) {
  auto state = new_plan(engine, launch, topk_idx);
  GpuMemory& gpu = engine.gpu();
  parameters.call = plan_signature(state->topk, placement_digest);
  const std::size_t bytes = state->routes_state + sizeof(std::uint64_t);
  const std::size_t scratch = plan_scratch_bytes(engine.config().experts);
  try {
    state->memory = gpu.take_local(bytes, launch.user());
    if (scratch > 0) {
      parameters.scratch =
          reinterpret_cast<std::int32_t*>(launch.temporary(gpu.take_local(scratch, launch.user())));
    }
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::exhausted) throw;
    tell_no_room(engine, launch, parameters.call, bytes + scratch);
    throw;
  }
  state->view.data = state->memory.data();
  state->rank_rows = TensorView(state->view.data + state->view.layout.rank_tokens, Dtype::i32,
                                {engine.size(), engine.size()}, engine.device());
  if (state->captured) forget_states(engine, *state);

  parameters.group = engine.view();
  parameters.topk_idx = topk_idx.data;
  parameters.wide = topk_idx.dtype == Dtype::i64;
  parameters.token_stride = topk_idx.strides[0];
  parameters.slot_stride = topk_idx.strides[1];
  parameters.plan = state->view;
  parameters.counts = state->counts;
  parameters.count_words = state->count_words;
  launch.outlives(state->slot);
  if (state->captured) launch.use(state->memory.data(), state->memory.owner);
  return state;
}

void enter_plan(Launch& launch, const std::shared_ptr<CudaPlan>& plan,
                const PlanParameters& parameters) {
  plan->number = launch.enter(parameters.call);
  launch.run(launch_plan(parameters, launch.stream()), "launch_plan");
  launch.keep(plan->slot);
  launch.tells_end(&plan->counts->done);
  CallRecord& record = *launch.record();
  record.asker = plan;
  if (!plan->captured) {  // of what a graph runs the dispatch tells
    record.fails_in = plan->slot;
    record.failure = &plan->counts->failure;
  }
  launch.finish();
}

Plan plan_routes(CudaEngine& engine, const ConstTensorView& topk_idx, const PlanOptions& options) {
  engine.check_usable("plan");
  check_stream("plan", options.stream, engine.device());
  check_routes("plan", topk_idx, engine.device());
  Launch launch(engine, "plan", options.stream);
  PlanParameters parameters;
  std::shared_ptr<CudaPlan> state;
  try {
    state = prepare_plan(engine, launch, topk_idx, options.placement_digest, parameters);
  } catch (const Error&) {
    const bool known = launch.record()->refused();
    if (!known || launch.blocking() || launch.capture().active) throw;
    try {
      return Access::plan(plan_without_memory(engine, launch, topk_idx));
    } catch (const std::exception& thrown) {
      engine.give_up("plan", thrown);  // the others will wait in the dispatch
      throw;
    }
  }
  enter_plan(launch, state, parameters);
  if (launch.blocking()) engine.finish("plan", state->ready);
  return Access::plan(state);
}

}  // namespace ferry::cuda

#include "host/throughput/engine.hpp"

#include <algorithm>
#include <chrono>
#include <exception>
#include <iterator>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include "base/log.hpp"
#include "base/process_limits.hpp"
#include "base/text.hpp"
#include "core/check.hpp"
#include "engine/counts.hpp"
#include "engine/gather.hpp"
#include "engine/membership/arbiter_creation.hpp"
#include "fabric/lobby.hpp"

namespace ferry::host {

Tensor heap_tensor(const Extents& shape, Dtype dtype) {
  const std::size_t bytes = checked_bytes("result", "shape", shape, dtype);
  constexpr std::size_t kAlign = 64;
  try {
    // One allocation, aligned by hand: the C library's aligned ones take several times as long.
    const auto block = std::make_shared_for_overwrite<std::byte[]>(bytes + kAlign - 1);
    void* data = block.get();
    std::size_t room = bytes + kAlign - 1;
    data = std::align(kAlign, bytes, data, room);
    return {TensorView(data, dtype, shape), std::shared_ptr<void>(block, data)};
  } catch (const std::bad_alloc&) {
    throw Error(ErrorKind::exhausted, "no memory for a result of " + std::to_string(bytes) +
                                          " bytes, shape " + to_string(shape) +
                                          memory_limit_text(bytes));
  }
}

std::size_t message_bytes(std::int64_t experts, const Domains& domains, std::size_t body_bytes) {
  const std::size_t counts = engine::counts_bytes({experts, domains.ranks()}, domains);
  return sizeof(StepMessage) + std::max({counts, fabric::kMaxHandleBytes, body_bytes});
}

HostEngine::HostEngine(std::shared_ptr<Memory> memory, const GroupConfig& config,
                       const Domains& domains, const fabric::Segment& control,
                       std::size_t body_bytes)
    : config_(config),
      domains_(domains),
      topology_(domains),
      memory_(std::move(memory)),
      placement_{config.experts, memory_->fabric->size()},
      channel_(memory_, config_, control,
               make_control_layout(memory_->fabric->size(),
                                   message_bytes(config.experts, domains, body_bytes))),
      tuner_(config_, placement_.ranks),
      control_bytes_(control.bytes),
      body_bytes_(body_bytes),
      carrier_(engine::Carrier::make(*memory_->fabric, domains, control.data, control_layout())),
      doors_(shared_doors_of(config_, *memory_->fabric)),
      now_(memory_->fabric->rank(), memory_->fabric->size()) {
  arbiter_ = engine::arbiter_of(config_, domains, *memory_->fabric);
}

HostEngine::~HostEngine() {
  destroy();
}

void HostEngine::destroy() {
  if (channel_.leave() && carrier_) {
    carrier_->leave();
    const GroupView view = group_view();
    engine::leave_arbiter(arbiter_, view, [doors = doors_, lost = view.lost] {
      if (doors) doors->leave(lost);
    });
  }
  if (auto* lobby = memory_->fabric->lobby()) lobby->close();
}

Tensor HostEngine::empty(const Extents& shape, Dtype dtype) {
  channel_.check_usable("empty");
  const std::size_t bytes = checked_bytes("empty", "shape", shape, dtype);
  const auto region = memory_->arena.allocate(bytes);
  if (!region) {
    throw Error(ErrorKind::exhausted,
                "empty: shape " + to_string(shape) + " of " + std::string(name_of(dtype)) +
                    " needs " + std::to_string(bytes) + " bytes, but " +
                    std::to_string(memory_->arena.used_bytes()) + " of the group's " +
                    std::to_string(memory_->arena.total_bytes()) +
                    " bytes of registered memory are used, and it holds the tensor in one piece; "
                    "use a smaller shape, drop tensors, or make the group with larger memory_bytes",
                {rank(), rank(), "empty", channel_.generation(), 0, 0});
  }
  return {TensorView(region->data, dtype, shape), lease(memory_, *region)};
}

bool HostEngine::is_registered(const void* pointer) const {
  return memory_->arena.find(pointer, 1) || latency_pool_.contains(pointer);
}

void HostEngine::barrier() {
  enter("barrier", nullptr, [this] {
    StepMessage head;
    head.call.kind = CallKind::barrier;
    channel_.swap("barrier", head);
    engine::check_same_call(channel_, "barrier", head.call);
  });
}

std::vector<std::vector<std::byte>> HostEngine::gather(std::span<const std::byte> mine) {
  std::vector<std::vector<std::byte>> all;
  enter("bootstrap", nullptr, [&] {
    CallSignature call;
    call.kind = CallKind::bootstrap;
    all = engine::gather(channel_, "bootstrap: all_gather", call, mine);
  });
  return all;
}

Plan HostEngine::plan(const ConstTensorView& topk_idx, const PlanOptions& options) {
  Call call(*this, "plan");
  check_stream("plan", options.stream);
  return enter_plan(topk_idx, options, &call);
}

Plan HostEngine::enter_plan(const ConstTensorView& topk_idx, const PlanOptions& options,
                            Call* inside) {
  std::vector<std::int32_t> routes = checked_routes("plan", topk_idx, config_.experts);
  now_.check_alive(routes, topk_idx.shape[1], placement_);
  auto state = std::make_shared<PlanState>();
  state->engine = weak_from_this();
  state->epoch = static_cast<std::uint32_t>(epoch());
  state->tokens = topk_idx.shape[0];
  state->topk = static_cast<int>(topk_idx.shape[1]);
  state->on_wait = config_.on_wait;
  state->ready = enter(
      "plan", options.stream,
      [this, state, ids = std::move(routes), digest = options.placement_digest]() mutable {
        RouteCounts own = count_routes(std::move(ids), state->tokens, state->topk, placement_);
        engine::swap_counts(channel_, config_, placement_, topology_, std::move(own), digest,
                            *state);
        state->number = ++plans_;  // only now: a plan that failed, failed on all ranks
      },
      inside);
  return Access::plan(state);
}

Received HostEngine::dispatch(const ConstTensorView& x, const Plan& plan,
                              const DispatchOptions& options) {
  return host::dispatch(*this, x, plan, options);
}

Received HostEngine::plan_and_dispatch(const ConstTensorView& x, const ConstTensorView& topk_idx,
                                       const DispatchOptions& options) {
  return host::plan_and_dispatch(*this, x, topk_idx, options);
}

Combined HostEngine::combine(const ConstTensorView& rows, const Plan& plan,
                             const CombineOptions& options) {
  return host::combine(*this, rows, plan, options);
}

bool HostEngine::commit(std::uint64_t step) {
  bool one_waits = false;
  if (carrier_) channel_.lose_silent();
  enter("commit", nullptr, [&] {
    StepMessage head;
    head.call.kind = CallKind::commit;
    head.call.commit.step = step;
    head.rows = regroup_ && regroup_->one_waits() ? 1 : 0;
    engine::agree_on_validity(channel_, "commit", head, now_.refusal_of(step));
    for (const int peer : channel_.ranks()) {
      one_waits = one_waits || channel_.head(peer).rows != 0;
    }
    now_.commit(step);
  });
  return one_waits;
}

ControlLayout HostEngine::control_layout() const {
  return make_control_layout(size(), message_bytes(config_.experts, domains_, body_bytes_));
}

engine::Regroup& HostEngine::membership(std::uint64_t ticket) {
  if (!regroup_) {
    regroup_ = std::make_unique<engine::Regroup>(memory_, carrier_, channel_, config_,
                                                 control_layout(), engine::asked(arbiter_), ticket);
    if (ticket != 0) regroup_->look_at(shared_cards(doors_));
  }
  return *regroup_;
}

void HostEngine::go_on(const engine::Epoch& next) {
  topology_ = domains_.among(next.ranks);
  tuner_.forget();
  plans_ = 0;  // ranks may have failed before and after they counted one
  now_.begin(next, regroup_->joined(next));
  for (const auto& each : outliving()) {
    each->begin_epoch(next, [this](int rank) { return regroup_->since(rank); });
  }
}

std::vector<std::shared_ptr<OutlivesEpoch>> HostEngine::outliving() {
  std::vector<std::shared_ptr<OutlivesEpoch>> all;
  std::erase_if(outliving_, [](const auto& each) { return each.expired(); });
  for (const auto& each : outliving_) {
    if (auto alive = each.lock()) all.push_back(std::move(alive));
  }
  return all;
}

bool HostEngine::wants_regroup(int peer) const {
  engine::Member::Said said;
  if (std::byte* control = channel_.pointer(peer, {Channel::kControl, 0})) {
    engine::read_statement(control, control_layout(), said);
  } else if (carrier_) {
    std::uint64_t seen = 0;
    said = carrier_->heard(peer, seen).value_or(said);
  }
  return said.epoch == epoch() && said.stopped != 0;
}

std::shared_ptr<VaultEngine> HostEngine::make_vault(std::size_t version_bytes) {
  channel_.check_usable("Vault");
  check_can_regroup("Vault");
  return vault_.open(*this, version_bytes);
}

void HostEngine::begin() {
  enter("regroup", nullptr, [this] { go_on(membership().begin_alone()); });
}

void HostEngine::join(std::uint64_t ticket) {
  enter(
      "regroup", nullptr, [this, ticket] { go_on(membership(ticket).join()); }, nullptr, {},
      Asks::existence);
}

void HostEngine::check_can_regroup(const char* call) const {
  engine::Regroup::check_possible(call, *memory_, carrier_ != nullptr, domains_.count());
}

GroupView HostEngine::regroup() {
  check_can_regroup("regroup");
  enter(
      "regroup", nullptr,
      [this] {
        // All that outlives the epoch goes on from one generation, beyond what each rank used.
        Generation used = channel_.generation();
        for (const auto& each : outliving()) used = std::max(used, each->leave_epoch());
        channel_.count(used);
        go_on(membership().run(now_.step()));
      },
      nullptr, {}, Asks::existence);
  return group_view();
}

MemoryStats HostEngine::memory() const {
  return {control_bytes_, memory_->arena.total_bytes(), memory_->arena.used_bytes(),
          latency_pool_.bytes()};
}

TimeStats HostEngine::time() const {
  return {exchange_ns_.load(std::memory_order_relaxed), channel_.wait_ns()};
}

}  // namespace ferry::host

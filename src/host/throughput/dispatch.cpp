// Dispatch, phase by phase: how many rows there will be, memory for them, grants, the push, what
// has arrived.
#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/exchange_signature.hpp"
#include "engine/regions.hpp"
#include "host/throughput/dispatch_call.hpp"

namespace ferry::host {

namespace {

constexpr const char* kDispatch = "dispatch";
constexpr const char* kDispatchGrants = "dispatch: grants";

/// From the caller's thread, which may learn the count and take memory, to the stream's, which runs
/// it.
class DispatchJob {
 public:
  explicit DispatchJob(DispatchCall call)
      : call_(std::move(call)), regions_(call_.engine.shared_memory()) {}

  /// Learns the count if the output is exact.
  void learn_rows();
  bool fits_out() const { return !call_.options.out || call_.options.out->rows() >= out_rows_; }
  [[noreturn]] void refuse_out() const;
  /// Allocates the result tensors if there is room now. False: `run` will make room.
  bool allocate();
  /// The dispatch will take place: if it is the plan's first, it brings the routes.
  void enter() {
    call_.plan->routes_sent.store(true);
    dispatches_ = call_.plan->layouts.add(
        {call_.options.order, call_.options.alignment, call_.options.max_recv_rows});
  }

  void run();
  /// Instead of `run`: takes part, so that all ranks learn that `out` is too small here.
  void run_in_vain();
  const Received& result() const { return result_; }

 private:
  /// Rows of the output that this plan fills.
  std::int64_t needed_rows() const {
    const ExchangePlan& plan = call_.exchange();
    return call_.expert_major() ? plan.expert_offsets(call_.options.alignment).back()
                                : plan.recv_rows();
  }
  std::vector<std::size_t> region_sizes() const;
  void make_tensors();
  void choose_crossing();
  void tune();
  StepMessage head() const;
  void agree();
  void check_grants() const;
  void finish_routes();
  void take_routes(const std::byte* came);
  void check_routes() const;
  void fan_out();
  void weigh_rows(const std::vector<std::int64_t>& slot_rows);

  DispatchCall call_;
  Regions regions_;
  Received result_{};
  Tensor landed_{};                            // x in registered memory
  RowLayouts::Count dispatches_{};             // of this layout
  Crossing plan_crossing_ = Crossing::direct;  // without a tuner
  std::optional<TuningKey> key_{};             // where there is one
  CallSettings settings_{};
  bool allocated_ = false;
  std::int64_t rank_rows_ = 0;  // of the rank-major region and tensors
  std::int64_t out_rows_ = 0;
  Region rank_region_{};
  Region side_region_{};
  Region expert_region_{};
  Region staging_{};  // hierarchical: rows that cross to this rank
};

std::vector<std::size_t> DispatchJob::region_sizes() const {
  std::vector<std::size_t> sizes{call_.receive_layout(rank_rows_).bytes,
                                 call_.side_layout(rank_rows_).bytes};
  if (call_.expert_major()) {
    sizes.push_back(call_.receive_layout(out_rows_).bytes);
  }
  return sizes;
}

void DispatchJob::learn_rows() {
  if (call_.options.max_recv_rows > 0) {
    // Every row that arrives fills at least one expert-major row, so this bounds both.
    rank_rows_ = out_rows_ = call_.options.max_recv_rows;
    return;
  }
  call_.plan->ready.wait(call_.engine.config().deadline, call_.engine.config().on_wait);
  rank_rows_ = call_.exchange().recv_rows();
  out_rows_ = needed_rows();
}

void DispatchJob::refuse_out() const {
  refuse(kDispatch, "out", std::to_string(call_.options.out->rows()) + " rows",
         "at least " + std::to_string(out_rows_));
}

bool DispatchJob::allocate() {
  const auto take = [&](Region& region, std::size_t bytes) {
    const auto taken = regions_.take({bytes});
    if (taken) region = taken->front();
    return taken.has_value();
  };
  if (!allocated_) {
    const auto taken = regions_.take(region_sizes());
    if (!taken) return false;
    rank_region_ = (*taken)[0];
    side_region_ = (*taken)[1];
    if (call_.expert_major()) expert_region_ = (*taken)[2];
    allocated_ = true;
    make_tensors();
  }
  // The dispatch before failed, so this one carries the routes, for which it has no room yet.
  const std::size_t side = region_sizes()[1];
  if (side > side_region_.bytes && !take(side_region_, side)) return false;
  return !call_.hierarchical() || staging_.data != nullptr ||
         take(staging_, make_staging_layout(call_.staging_shape(call_.engine.rank())).bytes);
}

void DispatchJob::make_tensors() {
  const std::int64_t columns = call_.row.columns;
  const Region& rows = call_.expert_major() ? expert_region_ : rank_region_;
  const auto layout = call_.receive_layout(out_rows_);
  const std::shared_ptr<void> owner = regions_.keep(rows);
  landed_ = {TensorView(rows.data, call_.row.dtype, {out_rows_, columns}), owner};
  result_.x = landed_;
  if (call_.options.out) {
    void* data = call_.options.out->data;
    result_.x = {TensorView(data, call_.row.dtype, {out_rows_, columns}),
                 std::shared_ptr<void>(data, [](void*) {})};
  }
  if (call_.row.scale_columns > 0) {
    result_.scales = {
        TensorView(rows.data + layout.scales, Dtype::f32, {out_rows_, call_.row.scale_columns}),
        owner};
  }
  const Extents routes{rank_rows_, call_.plan->topk};
  result_.topk_idx = heap_tensor(routes, Dtype::i64);
  result_.source_token = heap_tensor({rank_rows_}, Dtype::i32);
  if (call_.has_weights()) result_.topk_weights = heap_tensor(routes, Dtype::f32);
  if (call_.expert_major()) {
    const std::int64_t local = call_.engine.placement().local_experts(call_.engine.rank());
    result_.slot_rows = heap_tensor(routes, Dtype::i64);
    result_.expert_offsets = heap_tensor({local + 1}, Dtype::i64);
    if (call_.options.row_weights) result_.row_weights = heap_tensor({out_rows_}, Dtype::f32);
  }
}

void DispatchJob::choose_crossing() {
  const PlanState& plan = *call_.plan;
  const Crossing asked = call_.options.crossing;
  call_.crossing = asked == Crossing::automatic ? plan.crossing.chosen : asked;
  if (call_.engine.topology().count() == 1) call_.crossing = Crossing::direct;
  plan_crossing_ = call_.crossing;
  if (call_.engine.tuner().on() && call_.engine.topology().count() > 1) tune();
  call_.carries_forwards = call_.hierarchical() && !plan.forwards_known;
}

/// Both crossings bring the same rows. But sums come back as the plan's dispatches cross, whose
/// bits differ, and by what a hierarchical one has brought: so combines keep to `plan_crossing_`,
/// and what it needs comes first.
void DispatchJob::tune() {
  const bool asked = call_.options.crossing != Crossing::automatic ||
                     call_.engine.config().crossing != Crossing::automatic;
  key_ = {CallKind::dispatch,
          call_.row.dtype,
          call_.options.order,
          call_.row.columns,
          tokens_class_of(call_.plan->most_tokens),
          call_.carries_routes,
          plan_crossing_,
          true,
          !asked && (plan_crossing_ == Crossing::direct || call_.plan->forwards_known)};
  settings_ = call_.engine.tuner().next(*key_);
  call_.crossing = settings_.crossing;
  call_.chunk_bytes = index(settings_.chunk_bytes);
}

StepMessage DispatchJob::head() const {
  StepMessage head;
  head.call = dispatch_signature(call_.row, call_.plan->topk, call_.options, call_.carries_routes,
                                 call_.plan->number);
  head.call.exchange.crossing = static_cast<std::uint16_t>(call_.crossing);
  head.call.exchange.chunk_kib = static_cast<std::uint16_t>(settings_.chunk_bytes >> 10);
  head.report = call_.engine.tuner().report();
  return head;
}

void DispatchJob::agree() {
  StepMessage head = this->head();
  const std::int64_t needed = needed_rows();
  if (call_.options.max_recv_rows > 0 && needed > call_.options.max_recv_rows) {
    head.status = StepStatus::too_many;
    head.rows = call_.options.max_recv_rows;
    head.need_bytes = static_cast<std::uint64_t>(needed);
  } else {
    std::vector<std::size_t> sizes = region_sizes();
    if (call_.hierarchical())
      sizes.push_back(make_staging_layout(call_.staging_shape(call_.engine.rank())).bytes);
    head.need_bytes = Regions::total(sizes);
  }
  try {
    call_.engine.agree(kDispatchGrants, head, [&] {
      if (!allocate()) return false;
      head.segment = rank_region_.address.segment;
      head.offset = rank_region_.address.offset;
      head.side_segment = side_region_.address.segment;
      head.side_offset = side_region_.address.offset;
      head.staging_segment = staging_.address.segment;
      head.staging_offset = staging_.address.offset;
      head.rows = rank_rows_;
      return true;
    });
  } catch (const Error&) {
    --*dispatches_;
    if (call_.carries_routes) call_.plan->routes_sent.store(false);
    throw;
  }
}

void DispatchJob::run() {
  PlanState& plan = *call_.plan;
  call_.engine.await_counts(plan);
  // Now it is known what became of the dispatches before; all ranks find the same.
  call_.carries_routes = !plan.routes_known.load(std::memory_order_acquire);
  choose_crossing();
  agree();
  if (key_) call_.engine.tuner().met(call_.channel(), *key_, settings_, plan.most_tokens);
  check_grants();
  DispatchPush push(call_);
  if (!call_.hierarchical()) {
    push.direct();
    call_.channel().await_delivered("dispatch: rows");
  } else {
    push_hierarchical(call_, push, staging_.data);
    const Domains& domains = call_.engine.topology();
    for (const int member : domains.members(domains.of(call_.engine.rank()))) {
      call_.channel().await_delivered("dispatch: rows", member);
    }
  }
  call_.channel().record().moved(call_.exchange().recv_rows(), call_.row.bytes());
  plan.crossed = plan_crossing_;
  finish_routes();
  if (call_.expert_major()) fan_out();
  if (call_.options.out && landed_.view().bytes() > 0) {
    std::memcpy(call_.options.out->data, landed_.data(), landed_.view().bytes());
  }
  regions_.release_all();
  if (key_) call_.engine.tuner().ended();
}

void DispatchJob::run_in_vain() {
  choose_crossing();
  StepMessage head = this->head();
  head.status = StepStatus::too_many;
  head.rows = call_.options.out->rows();
  head.need_bytes = static_cast<std::uint64_t>(out_rows_);
  call_.engine.agree(kDispatchGrants, head, {});
}

void DispatchJob::check_grants() const {
  Channel& channel = call_.channel();
  const Domains& domains = call_.engine.topology();
  const int self = call_.engine.rank();
  for (const int peer : channel.ranks()) {
    const StepMessage theirs = channel.head(peer);
    const std::int64_t least = call_.exchange().peer_recv_rows[index(peer)];
    if (theirs.rows < least || theirs.rows > kMaxRows) {
      channel.throw_violation(kDispatchGrants, peer,
                              "granted room for " + std::to_string(theirs.rows) +
                                  " rows, expected at least " + std::to_string(least));
    }
    channel.checked(kDispatchGrants, peer, {theirs.segment, theirs.offset},
                    call_.receive_layout(theirs.rows).bytes);
    channel.checked(kDispatchGrants, peer, {theirs.side_segment, theirs.side_offset},
                    call_.side_layout(theirs.rows).bytes);
  }
  for (int domain = 0; call_.hierarchical() && domain < domains.count(); ++domain) {
    if (domain == domains.of(self)) continue;
    const int rail = domains.rail(self, domain);
    const StepMessage theirs = channel.head(rail);
    channel.checked(kDispatchGrants, rail, {theirs.staging_segment, theirs.staging_offset},
                    make_staging_layout(call_.staging_shape(rail)).bytes);
  }
}

void DispatchJob::finish_routes() {
  const std::int64_t rows = call_.exchange().recv_rows();
  const auto slots = static_cast<std::size_t>(rows) * static_cast<std::size_t>(call_.plan->topk);
  const auto side = call_.side_layout(rank_rows_);
  if (call_.carries_routes) {
    const auto* tokens =
        reinterpret_cast<const std::int32_t*>(side_region_.data + side.source_token);
    call_.plan->routes.source_token.assign(tokens, tokens + rows);
    take_routes(side_region_.data + side.topk_idx);
    check_routes();
    call_.plan->routes_known.store(true, std::memory_order_release);
  }
  auto* ids = result_.topk_idx.as<std::int64_t>();
  const std::int64_t all = rank_rows_ * call_.plan->topk;
  std::copy_n(call_.plan->routes.topk_idx.begin(), slots, ids);
  std::fill(ids + slots, ids + all, -1);
  auto* tokens = result_.source_token.as<std::int32_t>();
  std::copy_n(call_.plan->routes.source_token.begin(), rows, tokens);
  std::fill(tokens + rows, tokens + rank_rows_, -1);
  if (call_.has_weights()) {
    auto* weights = result_.topk_weights.as<float>();
    if (slots > 0) std::memcpy(weights, side_region_.data + side.weights, slots * sizeof(float));
    std::fill(weights + slots, weights + all, 0.0f);
  }
}

/// Those of a source in another domain lie packed where its rows begin.
void DispatchJob::take_routes(const std::byte* came) {
  const auto topk = static_cast<std::size_t>(call_.plan->topk);
  const auto& first = call_.exchange().recv_offset;
  std::vector<std::int32_t>& ids = call_.plan->routes.topk_idx;
  ids.resize(static_cast<std::size_t>(first.back()) * topk);
  for (std::size_t s = 0; s + 1 < first.size(); ++s) {
    const auto at = static_cast<std::size_t>(first[s]) * topk;
    const auto rows = static_cast<std::size_t>(first[s + 1] - first[s]);
    const std::byte* from = came + at * sizeof(std::int32_t);
    if (rows == 0) continue;
    if (const auto form = call_.packed_routes(static_cast<int>(s), call_.engine.rank())) {
      form->unpack(from, rows, ids.data() + at);
    } else {
      std::memcpy(ids.data() + at, from, rows * topk * sizeof(std::int32_t));
    }
  }
}

void DispatchJob::check_routes() const {
  // What came in decides where rows are written from here on: it must be what the counts said.
  const auto local = static_cast<std::size_t>(call_.exchange().local_experts());
  const auto topk = static_cast<std::size_t>(call_.plan->topk);
  std::vector<std::int32_t> slots(local);
  for (int source = 0; source < call_.engine.size(); ++source) {
    const auto s = static_cast<std::size_t>(source);
    std::fill(slots.begin(), slots.end(), 0);
    bool possible = true;
    for (auto i = static_cast<std::size_t>(call_.exchange().recv_offset[s]) * topk;
         i < static_cast<std::size_t>(call_.exchange().recv_offset[s + 1]) * topk; ++i) {
      const std::int32_t id = call_.plan->routes.topk_idx[i];
      if (id == -1) continue;
      possible = possible && id >= 0 && static_cast<std::size_t>(id) < local;
      if (possible) ++slots[static_cast<std::size_t>(id)];
    }
    if (!possible || !std::equal(slots.begin(), slots.end(),
                                 call_.exchange().expert_slots.begin() +
                                     static_cast<std::ptrdiff_t>(s * local))) {
      call_.channel().throw_violation("dispatch: rows", source,
                                      "sent routes that are not those it counted");
    }
  }
}

void DispatchJob::fan_out() {
  const auto offsets = call_.exchange().expert_offsets(call_.options.alignment);
  const auto slot_rows = place_slots(call_.plan->routes.topk_idx, offsets);
  auto* places = result_.slot_rows.as<std::int64_t>();
  std::copy(slot_rows.begin(), slot_rows.end(), places);
  std::fill(places + slot_rows.size(), places + rank_rows_ * call_.plan->topk, -1);
  std::copy(offsets.begin(), offsets.end(), result_.expert_offsets.as<std::int64_t>());

  const std::size_t row_bytes = call_.row.bytes();
  const std::size_t scale_bytes = static_cast<std::size_t>(call_.row.scale_columns) * sizeof(float);
  const auto from = call_.receive_layout(rank_rows_);
  const auto to = call_.receive_layout(out_rows_);
  const std::byte* rows = rank_region_.data + from.rows;
  const std::byte* scales = rank_region_.data + from.scales;
  std::byte* out_rows = expert_region_.data + to.rows;
  std::byte* out_scales = expert_region_.data + to.scales;
  const auto topk = static_cast<std::size_t>(call_.plan->topk);
  for (std::size_t i = 0; i < slot_rows.size(); ++i) {
    if (slot_rows[i] < 0) continue;
    const auto source = i / topk;
    const auto target = static_cast<std::size_t>(slot_rows[i]);
    std::memcpy(out_rows + target * row_bytes, rows + source * row_bytes, row_bytes);
    std::memcpy(out_scales + target * scale_bytes, scales + source * scale_bytes, scale_bytes);
  }
  const auto zero = [&](std::int64_t begin, std::int64_t end) {
    const auto b = static_cast<std::size_t>(begin), n = static_cast<std::size_t>(end - begin);
    std::memset(out_rows + b * row_bytes, 0, n * row_bytes);
    std::memset(out_scales + b * scale_bytes, 0, n * scale_bytes);
  };
  const auto slots = call_.exchange().slots_per_expert();
  for (std::size_t e = 0; e < slots.size(); ++e) zero(offsets[e] + slots[e], offsets[e + 1]);
  zero(offsets.back(), out_rows_);
  if (call_.options.row_weights) weigh_rows(slot_rows);
}

void DispatchJob::weigh_rows(const std::vector<std::int64_t>& slot_rows) {
  const auto* given = result_.topk_weights.as<float>();
  auto* weights = result_.row_weights.as<float>();
  std::fill_n(weights, out_rows_, 0.0f);
  for (std::size_t i = 0; i < slot_rows.size(); ++i) {
    if (slot_rows[i] >= 0) weights[slot_rows[i]] = given[i];
  }
}

Received enter_dispatch(HostEngine& engine, const std::shared_ptr<DispatchJob>& job, bool room,
                        Stream* stream, HostEngine::Call& inside) {
  const Event event =
      engine.enter(kDispatch, stream, [job] { job->run(); }, &inside, [job] { job->enter(); });
  // An exact size blocks the caller for the count only; without room now, for the whole call.
  if (!room) engine.finish(kDispatch, event);
  Received result = job->result();
  result.event = event;
  return result;
}

}  // namespace

Received dispatch(HostEngine& engine, const ConstTensorView& x, const Plan& plan,
                  const DispatchOptions& options) {
  HostEngine::Call call(engine, kDispatch);
  PlanState& state = checked(plan, kDispatch, engine);
  check_dispatch(x, state.tokens, state.topk, options);
  auto job = std::make_shared<DispatchJob>(DispatchCall{engine, Access::state(plan), x, options});
  job->learn_rows();
  if (!job->fits_out()) job->refuse_out();
  const bool room = job->allocate();
  return enter_dispatch(engine, job, room, options.stream, call);
}

Received plan_and_dispatch(HostEngine& engine, const ConstTensorView& x,
                           const ConstTensorView& topk_idx, const DispatchOptions& options) {
  HostEngine::Call call(engine, kDispatch);
  check_routes(kDispatch, topk_idx);
  check_dispatch(x, topk_idx.shape[0], static_cast<int>(topk_idx.shape[1]), options);
  const Plan made = engine.enter_plan(topk_idx, {options.stream}, nullptr);
  // From here on the peers count the plan, and wait for this rank in the dispatch.
  auto job = std::make_shared<DispatchJob>(DispatchCall{engine, Access::state(made), x, options});
  bool counted = false, room = false;
  try {
    job->learn_rows();
    counted = true;
    room = job->fits_out() && job->allocate();
  } catch (const std::exception& thrown) {
    // A plan that failed without failing the group failed on all ranks.
    if (counted || !Access::state(made)->ready.ready())
      engine.channel().fail(kDispatch, thrown.what());
    throw;
  }
  if (!job->fits_out()) {
    try {
      engine.finish(kDispatch,
                    engine.enter(kDispatch, options.stream, [job] { job->run_in_vain(); }, &call));
    } catch (const Error&) {  // says no more
    }
    job->refuse_out();
  }
  Received received = enter_dispatch(engine, job, room, options.stream, call);
  received.plan = made;
  return received;
}

}  // namespace ferry::host

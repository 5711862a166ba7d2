// Dispatch: regions, grants, the order of its steps.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "core/check.hpp"
#include "host/throughput/dispatch_job.hpp"

namespace ferry::host {

namespace {

constexpr const char* kStage = "dispatch: grants";

}  // namespace

std::vector<std::size_t> DispatchJob::region_sizes() const {
  std::vector<std::size_t> sizes{
      receive_layout(rank_rows_).bytes,
      make_side_layout(rank_rows_, plan_->topk, carries_routes_, has_weights()).bytes};
  if (expert_major()) {
    sizes.push_back(receive_layout(out_rows_).bytes);
  }
  return sizes;
}

void DispatchJob::learn_rows() {
  if (options_.worst_case_rows > 0) {
    // Every row that arrives fills at least one expert-major row, so this bounds both.
    rank_rows_ = out_rows_ = options_.worst_case_rows;
    return;
  }
  plan_->ready.wait(engine_.config().deadline, engine_.config().on_wait);
  rank_rows_ = plan().recv_rows();
  out_rows_ = needed_rows();
}

void DispatchJob::refuse_out() const {
  refuse(kDispatch, "out", std::to_string(options_.out->rows()) + " rows",
         "at least " + std::to_string(out_rows_));
}

bool DispatchJob::allocate_regions() {
  if (allocated_) return allocate_side();
  const auto taken = regions_.take(region_sizes());
  if (!taken) return false;
  rank_region_ = (*taken)[0];
  side_region_ = (*taken)[1];
  if (expert_major()) expert_region_ = (*taken)[2];
  allocated_ = true;
  make_tensors();
  return true;
}

/// The dispatch before failed, so this one carries the routes, for which it has no room yet.
bool DispatchJob::allocate_side() {
  const std::size_t bytes = region_sizes()[1];
  if (bytes <= side_region_.bytes) return true;
  const auto taken = regions_.take({bytes});
  if (taken) side_region_ = taken->front();
  return taken.has_value();
}

void DispatchJob::make_tensors() {
  const std::int64_t columns = row_.columns;
  const Region& rows = expert_major() ? expert_region_ : rank_region_;
  const auto layout = receive_layout(out_rows_);
  const std::shared_ptr<void> owner = regions_.keep(rows);
  landed_ = {TensorView(rows.data, row_.dtype, {out_rows_, columns}), owner};
  result_.x = landed_;
  if (options_.out) {
    void* data = options_.out->data;
    result_.x = {TensorView(data, row_.dtype, {out_rows_, columns}),
                 std::shared_ptr<void>(data, [](void*) {})};
  }
  if (row_.scale_columns > 0) {
    result_.scales = {
        TensorView(rows.data + layout.scales, Dtype::f32, {out_rows_, row_.scale_columns}), owner};
  }
  const Extents routes{rank_rows_, plan_->topk};
  result_.topk_idx = heap_tensor(routes, Dtype::i64);
  result_.source_token = heap_tensor({rank_rows_}, Dtype::i32);
  if (has_weights()) result_.topk_weights = heap_tensor(routes, Dtype::f32);
  if (expert_major()) {
    const std::int64_t local = engine_.placement().local_experts(engine_.rank());
    result_.slot_rows = heap_tensor(routes, Dtype::i64);
    result_.expert_offsets = heap_tensor({local + 1}, Dtype::i64);
  }
}

StepMessage DispatchJob::grant() const {
  StepMessage head;
  head.call.kind = CallKind::dispatch;
  head.call.dtype = static_cast<std::uint32_t>(row_.dtype);
  head.call.columns = row_.columns;
  head.call.scale_columns = row_.scale_columns;
  head.call.topk = static_cast<std::uint32_t>(plan_->topk);
  head.call.order = static_cast<std::uint16_t>(options_.order);
  head.call.routes = carries_routes_ ? 1 : 0;
  head.call.weights = has_weights() ? 1 : 0;
  head.call.plan = plan_->number;
  head.call.crossing = static_cast<std::uint16_t>(crossing_);
  return head;
}

void DispatchJob::agree() {
  StepMessage head = grant();
  const std::int64_t needed = needed_rows();
  if (options_.worst_case_rows > 0 && needed > options_.worst_case_rows) {
    head.status = StepStatus::too_many;
    head.rows = options_.worst_case_rows;
    head.need_bytes = static_cast<std::uint64_t>(needed);
  } else {
    std::vector<std::size_t> sizes = region_sizes();
    if (hierarchical()) sizes.push_back(make_stage_layout(stage_shape(engine_.rank())).bytes);
    head.need_bytes = Regions::total(sizes);
  }
  try {
    engine_.agree(kStage, head, [&] {
      if (!allocate_regions() || !allocate_stage()) return false;
      head.segment = rank_region_.address.segment;
      head.offset = rank_region_.address.offset;
      head.side_segment = side_region_.address.segment;
      head.side_offset = side_region_.address.offset;
      head.stage_segment = stage_.address.segment;
      head.stage_offset = stage_.address.offset;
      head.rows = rank_rows_;
      return true;
    });
  } catch (const Error&) {
    --*dispatches_;
    if (carries_routes_) plan_->routes_sent.store(false);
    throw;
  }
}

void DispatchJob::run() {
  engine_.await_counts(*plan_);
  // Now it is known what became of the dispatches before; all ranks find the same.
  carries_routes_ = !plan_->routes_known.load(std::memory_order_acquire);
  resolve_crossing();
  agree();
  check_grants();
  if (hierarchical()) check_stages();
  regions_.promise();
  push();
  if (hierarchical()) {
    await_domain();
  } else {
    channel().await_delivered("dispatch: rows");
  }
  regions_.settle();
  plan_->crossed = crossing_;
  finish_side();
  if (expert_major()) fan_out();
  if (options_.out && landed_.view().bytes() > 0) {
    std::memcpy(options_.out->data, landed_.data(), landed_.view().bytes());
  }
  regions_.release_all();
}

void DispatchJob::run_in_vain() {
  resolve_crossing();
  StepMessage head = grant();
  head.status = StepStatus::too_many;
  head.rows = options_.out->rows();
  head.need_bytes = static_cast<std::uint64_t>(out_rows_);
  engine_.agree(kStage, head, {});
}

void DispatchJob::check_grants() {
  for (int peer = 0; peer < engine_.size(); ++peer) {
    const StepMessage theirs = channel().head(peer);
    if (theirs.rows < plan().recv_rows_of(peer) || theirs.rows > kMaxRows) {
      channel().throw_violation(kStage, peer,
                                "granted room for " + std::to_string(theirs.rows) +
                                    " rows, expected at least " +
                                    std::to_string(plan().recv_rows_of(peer)));
    }
    const auto rows = receive_layout(theirs.rows);
    const auto side = make_side_layout(theirs.rows, plan_->topk, carries_routes_, has_weights());
    channel().checked(kStage, peer, {theirs.segment, theirs.offset}, rows.bytes);
    channel().checked(kStage, peer, {theirs.side_segment, theirs.side_offset}, side.bytes);
  }
}

Received HostEngine::dispatch(const ConstTensorView& x, const Plan& plan,
                              const DispatchOptions& options) {
  Call call(*this, kDispatch);
  PlanState& state = checked(plan, kDispatch);
  if (state.engine.lock().get() != this) {
    refuse(kDispatch, "plan", "a plan of another group", "one of this group");
  }
  check_dispatch(x, state.tokens, state.topk, options);
  auto job = std::make_shared<DispatchJob>(*this, x, plan.state(), options);
  job->learn_rows();
  if (!job->fits_out()) job->refuse_out();
  const bool room = job->allocate();
  return enter_dispatch(job, room, options.stream, call);
}

Received HostEngine::enter_dispatch(const std::shared_ptr<DispatchJob>& job, bool room,
                                    Stream* stream, Call& inside) {
  const Event event =
      enter(kDispatch, stream, [job] { job->run(); }, &inside, [job] { job->enter(); });
  // An exact size blocks the caller for the count only; without room now, for the whole call.
  if (!room) finish(kDispatch, event);
  Received result = job->result();
  result.event = event;
  return result;
}

Received HostEngine::plan_and_dispatch(const ConstTensorView& x, const ConstTensorView& topk_idx,
                                       const DispatchOptions& options) {
  Call call(*this, kDispatch);
  check_routes(kDispatch, topk_idx);
  check_dispatch(x, topk_idx.shape[0], static_cast<int>(topk_idx.shape[1]), options);
  const Plan made = enter_plan(topk_idx, options.stream, nullptr);
  // From here on the peers count the plan, and wait for this rank in the dispatch.
  auto job = std::make_shared<DispatchJob>(*this, x, made.state(), options);
  bool counted = false, room = false;
  try {
    job->learn_rows();
    counted = true;
    room = job->fits_out() && job->allocate();
  } catch (const std::exception& thrown) {
    // A plan that failed without failing the group failed on all ranks.
    if (counted || !made.state()->ready.ready()) channel_.fail(kDispatch, thrown.what());
    throw;
  }
  if (!job->fits_out()) {
    try {
      finish(kDispatch, enter(kDispatch, options.stream, [job] { job->run_in_vain(); }, &call));
    } catch (const Error&) {  // says no more
    }
    job->refuse_out();
  }
  Received received = enter_dispatch(job, room, options.stream, call);
  received.plan = made;
  return received;
}

}  // namespace ferry::host

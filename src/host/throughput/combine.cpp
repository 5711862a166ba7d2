// Combine: every rank says where its rows are; owners read them in place inside the domain, and
// get them pushed from outside; sums in ascending rank order.
#include <utility>

#include "core/check.hpp"
#include "core/exchange_signature.hpp"
#include "host/throughput/combine_job.hpp"

namespace ferry::host {
namespace {

constexpr const char* kCall = "combine";
constexpr const char* kStage = "combine: rows";

}  // namespace

void CombineJob::check() const {
  check_combine_rows(plan(), dispatched_, rows_.rows(), {options_.order, options_.alignment});
  if (has_weights()) {
    check_combine_weights(plan(), dispatched_, options_.topk_weights->shape, plan_->topk);
  }
}

void CombineJob::run() {
  engine_.await_counts(*plan_);
  if (expert_major() && !plan_->routes_known.load(std::memory_order_acquire)) {
    engine_.all_ranks_throw();  // that dispatch failed on all of them
    refuse(kCall, "plan", "a plan whose first dispatch failed", "one more dispatch, or a new plan");
  }
  check();  // too late to refuse now: the peers are in this call, so it fails the group
  for (int peer = 0; peer < engine_.size(); ++peer) outsiders_ |= !in_domain(peer);
  resolve_crossing();
  if (hierarchical() && !plan_->forwards_known) refuse_crossing();
  agree();
  check_places();
  regions_.promise();
  if (hierarchical()) {
    push_sums();
    wait_for_sums();
    sum_domains();
  } else {
    find_rows();
    exchange_rows();
    if (has_weights()) sum_weights();
  }
  give_back();
  regions_.settle();
  regions_.release_all();
}

StepMessage CombineJob::head() const {
  StepMessage head;
  head.call = combine_signature(rows_, plan_->topk, options_, plan_->number);
  head.call.crossing = static_cast<std::uint16_t>(crossing_);
  return head;
}

void CombineJob::agree() {
  const std::size_t row_bytes = rows_.row_bytes();
  const auto received = static_cast<std::size_t>(plan().recv_rows());
  const std::size_t staged = staged_rows();
  const auto registered =
      expert_major() ? std::nullopt
                     : engine_.shared_memory()->arena.find(rows_.data, received * row_bytes);
  StepMessage head = this->head();
  const std::vector<std::size_t> sizes{registered ? 0 : received * row_bytes,
                                       received * weight_bytes(), staged * row_bytes,
                                       staged * weight_bytes()};
  head.need_bytes = Regions::total(sizes);
  bool taken = false;
  engine_.agree(kStage, head, [&] {
    if (taken) return true;
    const auto regions = regions_.take(sizes);
    if (!regions) return false;
    taken = true;
    const Region& rows = (*regions)[0];
    const Region& weights = (*regions)[1];
    const Region& stage = (*regions)[2];
    const Region& stage_weights = (*regions)[3];
    mine_ = registered ? static_cast<std::byte*>(const_cast<void*>(rows_.data)) : rows.data;
    mine_weights_ = weights.data;
    stage_ = stage.data;
    stage_weights_ = stage_weights.data;
    const fabric::Address at = registered ? *registered : rows.address;
    head.segment = at.segment;
    head.offset = at.offset;
    head.side_segment = weights.address.segment;
    head.side_offset = weights.address.offset;
    head.stage_segment = stage.address.segment;
    head.stage_offset = stage.address.offset;
    head.stage_side_segment = stage_weights.address.segment;
    head.stage_side_offset = stage_weights.address.offset;
    place_rows();  // before the message says that they are there
    return true;
  });
}

void CombineJob::check_places() {
  const std::size_t row_bytes = rows_.row_bytes();
  for (int peer = 0; peer < engine_.size(); ++peer) {
    const StepMessage theirs = channel().head(peer);
    const auto check = [&](std::uint32_t segment, std::uint64_t offset, std::int64_t rows,
                           std::size_t bytes) {
      channel().checked(kStage, peer, {segment, offset}, static_cast<std::uint64_t>(rows) * bytes);
    };
    if (in_domain(peer)) {  // read in place
      const std::int64_t rows = plan().recv_rows_of(peer);
      check(theirs.segment, theirs.offset, rows, row_bytes);
      check(theirs.side_segment, theirs.side_offset, rows, weight_bytes());
    } else {
      const std::int64_t rows = staged_rows_of(peer);
      check(theirs.stage_segment, theirs.stage_offset, rows, row_bytes);
      check(theirs.stage_side_segment, theirs.stage_side_offset, rows, weight_bytes());
    }
  }
}

void CombineJob::give_back() {
  for (int peer = 0; peer < engine_.size(); ++peer) {
    if (in_domain(peer)) channel().give_back(peer);
  }
  // Rows that cross were copied when they were pushed; inside, the readers may still be at it.
  for (int peer = 0; peer < engine_.size(); ++peer) {
    if (in_domain(peer)) channel().await_given_back("combine: readers", peer);
  }
}

Combined HostEngine::combine(const ConstTensorView& rows, const Plan& plan,
                             const CombineOptions& options) {
  Call call(*this, kCall);
  PlanState& state = checked(plan, kCall);
  if (state.engine.lock().get() != this) {
    refuse(kCall, "plan", "a plan of another group", "one of this group");
  }
  check_combine(rows, state.tokens, state.topk, options);
  if (options.order == RowOrder::expert_major && !state.routes_sent.load()) {
    refuse(kCall, "plan", "a plan that no dispatch has used yet",
           "a dispatch first: it brings the routes that expert-major rows need");
  }
  auto job = std::make_shared<CombineJob>(*this, rows, plan.state(), options);
  if (state.ready.ready()) {
    state.ready.wait();  // throws what the plan's work threw
    job->check();
  }
  const Event event = enter(kCall, options.stream, [job] { job->run(); }, &call);
  Combined result = job->result();
  result.event = event;
  return result;
}

}  // namespace ferry::host

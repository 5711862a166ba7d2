// Combine: every rank says where its rows are; owners read them in place inside the domain, and
// get them pushed from outside; sums in ascending rank order.
#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <utility>

#include "core/check.hpp"
#include "host/engine.hpp"
#include "host/kernels/kernels.hpp"
#include "host/regions.hpp"

namespace ferry::host {
namespace {

constexpr const char* kCall = "combine";
constexpr const char* kStage = "combine: rows";

/// One combine, from its arguments to its results.
class CombineJob {
 public:
  CombineJob(HostEngine& engine, const ConstTensorView& rows, std::shared_ptr<PlanState> plan,
             const CombineOptions& options)
      : engine_(engine),
        plan_(std::move(plan)),
        rows_(rows),
        options_(options),
        regions_(engine.shared_memory()) {
    options_.stream = nullptr;
    const Extents own{plan_->tokens, rows_.columns()};
    if (options_.out) {
      result_.x = {*options_.out, std::shared_ptr<void>(options_.out->data, [](void*) {})};
    } else {
      result_.x = heap_tensor(own, rows_.dtype);
    }
    if (has_weights()) result_.topk_weights = heap_tensor({plan_->tokens, plan_->topk}, Dtype::f32);
  }

  /// Throws when the rows do not fit the plan. Needs the counts.
  void check() const;
  void run();
  const Combined& result() const { return result_; }

 private:
  bool expert_major() const { return options_.order == RowOrder::expert_major; }
  bool has_weights() const { return options_.topk_weights.has_value(); }
  Channel& channel() { return engine_.channel(); }
  const ExchangePlan& plan() const { return plan_->exchange; }
  bool in_domain(int peer) { return channel().pointer(peer, {0, 0}) != nullptr; }
  std::size_t weight_bytes() const {
    return has_weights() ? static_cast<std::size_t>(plan_->topk) * sizeof(float) : 0;
  }

  void agree();
  void check_places();
  void place_rows();
  void reduce_slots();
  void push();
  void wait_for_pushed();
  void find_rows();
  void sum_tokens();
  void sum_weights();
  void give_back();

  HostEngine& engine_;
  std::shared_ptr<PlanState> plan_;
  ConstTensorView rows_;
  CombineOptions options_;
  Regions regions_;
  Combined result_{};
  bool outsiders_ = false;             // some peer is outside the domain
  std::byte* mine_ = nullptr;          // rank-major rows, in registered memory
  std::byte* mine_weights_ = nullptr;  // their weights, likewise
  std::byte* stage_ = nullptr;         // rows pushed from outside, then their weights
  std::byte* stage_weights_ = nullptr;
  std::vector<const std::byte*> row_base_{};  // for each rank: its first row of mine
  std::vector<const std::byte*> weight_base_{};
};

void CombineJob::check() const {
  const std::int64_t needed =
      expert_major() ? plan().expert_offsets(options_.alignment).back() : plan().recv_rows();
  if (rows_.rows() < needed) {
    refuse(kCall, "rows", std::to_string(rows_.rows()) + " rows",
           std::to_string(needed) + (expert_major() ? ", the plan's expert-major rows"
                                                    : ", the rows that the plan brought"));
  }
  if (has_weights()) {
    const ConstTensorView& weights = *options_.topk_weights;
    if (weights.shape[0] < plan().recv_rows()) {
      refuse(
          kCall, "topk_weights", "shape " + to_string(weights.shape),
          to_string(Extents{plan().recv_rows(), plan_->topk}) + ", one row for each received row");
    }
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
  agree();
  check_places();
  regions_.promise();
  if (outsiders_) {
    push();
    wait_for_pushed();
  }
  find_rows();
  sum_tokens();
  if (has_weights()) sum_weights();
  give_back();
  regions_.settle();
  regions_.release_all();
}

void CombineJob::agree() {
  const std::size_t row_bytes = rows_.row_bytes();
  const auto received = static_cast<std::size_t>(plan().recv_rows());
  const auto sent = plan().lanes.size();
  const auto registered =
      expert_major() ? std::nullopt
                     : engine_.shared_memory()->arena.find(rows_.data, received * row_bytes);
  StepMessage head;
  head.call.kind = CallKind::combine;
  head.call.dtype = static_cast<std::uint32_t>(rows_.dtype);
  head.call.columns = rows_.columns();
  head.call.topk = static_cast<std::uint32_t>(plan_->topk);
  head.call.order = static_cast<std::uint32_t>(options_.order);
  head.call.weights = has_weights() ? 1 : 0;
  head.call.plan = plan_->number;
  const std::vector<std::size_t> sizes{registered ? 0 : received * row_bytes,
                                       received * weight_bytes(), outsiders_ ? sent * row_bytes : 0,
                                       outsiders_ ? sent * weight_bytes() : 0};
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
  const auto ranks = static_cast<std::size_t>(engine_.size());
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
    } else {  // pushed to its stage: all rows that it sent to anybody
      const auto first = plan().rank_tokens.begin() +
                         static_cast<std::ptrdiff_t>(static_cast<std::size_t>(peer) * ranks);
      const std::int64_t rows =
          std::accumulate(first, first + static_cast<std::ptrdiff_t>(ranks), std::int64_t{0});
      check(theirs.stage_segment, theirs.stage_offset, rows, row_bytes);
      check(theirs.stage_side_segment, theirs.stage_side_offset, rows, weight_bytes());
    }
  }
}

void CombineJob::place_rows() {
  const auto received = static_cast<std::size_t>(plan().recv_rows());
  if (expert_major()) {
    reduce_slots();
  } else if (mine_ != rows_.data && received > 0) {
    std::memcpy(mine_, rows_.data, received * rows_.row_bytes());
  }
  if (has_weights() && received > 0) {
    std::memcpy(mine_weights_, options_.topk_weights->data, received * weight_bytes());
  }
}

void CombineJob::reduce_slots() {
  const auto offsets = plan().expert_offsets(options_.alignment);
  const auto slot_rows = place_slots(plan_->routes.topk_idx, offsets);
  const auto topk = static_cast<std::size_t>(plan_->topk);
  const auto* from = static_cast<const std::byte*>(rows_.data);
  const auto* weights =
      options_.apply_weights ? static_cast<const float*>(options_.topk_weights->data) : nullptr;
  const Kernels& run = kernels();
  std::array<const void*, kMaxTopk> rows{};
  std::array<float, kMaxTopk> factors{};
  SumRows sum;
  sum.rows = rows.data();
  sum.weights = weights == nullptr ? nullptr : factors.data();
  sum.columns = rows_.columns();
  sum.dtype = rows_.dtype;
  for (std::size_t i = 0; i < static_cast<std::size_t>(plan().recv_rows()); ++i) {
    sum.count = 0;
    for (std::size_t k = 0; k < topk; ++k) {
      const std::int64_t row = slot_rows[i * topk + k];
      if (row < 0) continue;
      const auto n = static_cast<std::size_t>(sum.count++);
      rows[n] = from + static_cast<std::size_t>(row) * rows_.row_bytes();
      if (weights != nullptr) factors[n] = weights[i * topk + k];
    }
    sum.out = mine_ + i * rows_.row_bytes();
    run.sum_rows(sum);
  }
}

void CombineJob::push() {
  const std::size_t row_bytes = rows_.row_bytes();
  const std::uint64_t tag = channel().delivery_tag();
  for (int owner = 0; owner < engine_.size(); ++owner) {
    if (in_domain(owner)) continue;
    const StepMessage theirs = channel().head(owner);
    const auto s = static_cast<std::size_t>(owner);
    const auto first = static_cast<std::size_t>(plan().recv_offset[s]);
    const auto rows = static_cast<std::size_t>(plan().recv_offset[s + 1]) - first;
    // At the owner, rows lie by expert rank: before mine come those of lower ranks.
    std::size_t before = 0;
    for (int d = 0; d < engine_.rank(); ++d) {
      before +=
          static_cast<std::size_t>(plan().rank_tokens[s * static_cast<std::size_t>(engine_.size()) +
                                                      static_cast<std::size_t>(d)]);
    }
    if (rows > 0) {
      channel().reach().write(owner,
                              {theirs.stage_segment, theirs.stage_offset + before * row_bytes},
                              mine_ + first * row_bytes, rows * row_bytes, tag);
      if (has_weights()) {
        channel().reach().write(
            owner, {theirs.stage_side_segment, theirs.stage_side_offset + before * weight_bytes()},
            mine_weights_ + first * weight_bytes(), rows * weight_bytes(), tag);
      }
    }
    channel().deliver(owner, rows * (row_bytes + weight_bytes()));
  }
}

void CombineJob::wait_for_pushed() {
  for (int peer = 0; peer < engine_.size(); ++peer) {
    if (!in_domain(peer)) channel().await_delivered("combine: rows", peer);
  }
}

void CombineJob::find_rows() {
  const std::size_t row_bytes = rows_.row_bytes();
  for (int peer = 0; peer < engine_.size(); ++peer) {
    const auto d = static_cast<std::size_t>(peer);
    const StepMessage theirs = channel().head(peer);
    const auto first = static_cast<std::size_t>(plan().peer_row[d]);
    const std::byte* rows = channel().pointer(peer, {theirs.segment, theirs.offset});
    if (rows != nullptr) {
      const std::byte* weights = channel().pointer(peer, {theirs.side_segment, theirs.side_offset});
      row_base_.push_back(rows + first * row_bytes);
      weight_base_.push_back(weights + first * weight_bytes());
    } else {
      const auto staged = static_cast<std::size_t>(plan().send_offset[d]);
      row_base_.push_back(stage_ + staged * row_bytes);
      weight_base_.push_back(stage_weights_ + staged * weight_bytes());
    }
  }
}

void CombineJob::sum_tokens() {
  const std::size_t row_bytes = rows_.row_bytes();
  const auto at = [&](const std::optional<ConstTensorView>& bias, std::size_t token) {
    return bias ? static_cast<const std::byte*>(bias->data) + token * row_bytes : nullptr;
  };
  const auto tokens = static_cast<std::size_t>(plan_->tokens);
  // Two sets of pointers in turn: while one token is summed, the rows of the next are fetched.
  std::array<std::array<const void*, kMaxTopk>, 2> rows{};
  const auto find = [&](std::size_t token) {
    std::int64_t count = 0;
    if (token == tokens) return count;
    for (std::int64_t l = plan().lane_offset[token]; l < plan().lane_offset[token + 1]; ++l) {
      const Lane lane = plan().lanes[static_cast<std::size_t>(l)];
      rows[token % 2][static_cast<std::size_t>(count++)] =
          row_base_[static_cast<std::size_t>(lane.rank)] +
          static_cast<std::size_t>(lane.row) * row_bytes;
    }
    return count;
  };
  const Kernels& run = kernels();
  SumRows sum;
  sum.columns = rows_.columns();
  sum.dtype = rows_.dtype;
  sum.next_count = find(0);
  auto* out = static_cast<std::byte*>(result_.x.data());
  for (std::size_t token = 0; token < tokens; ++token) {
    sum.rows = rows[token % 2].data();
    sum.count = sum.next_count;
    sum.next_rows = rows[(token + 1) % 2].data();
    sum.next_count = find(token + 1);
    sum.bias0 = at(options_.bias0, token);
    sum.bias1 = at(options_.bias1, token);
    sum.out = out + token * row_bytes;
    run.sum_rows(sum);
  }
}

void CombineJob::sum_weights() {
  const auto topk = static_cast<std::size_t>(plan_->topk);
  auto* out = result_.topk_weights.as<float>();
  std::fill(out, out + static_cast<std::size_t>(plan_->tokens) * topk, 0.0f);
  for (std::size_t token = 0; token < static_cast<std::size_t>(plan_->tokens); ++token) {
    for (std::int64_t l = plan().lane_offset[token]; l < plan().lane_offset[token + 1]; ++l) {
      const Lane lane = plan().lanes[static_cast<std::size_t>(l)];
      const auto* weights =
          reinterpret_cast<const float*>(weight_base_[static_cast<std::size_t>(lane.rank)] +
                                         static_cast<std::size_t>(lane.row) * weight_bytes());
      for (std::size_t k = 0; k < topk; ++k) out[token * topk + k] += weights[k];
    }
  }
}

void CombineJob::give_back() {
  for (int peer = 0; peer < engine_.size(); ++peer) {
    if (in_domain(peer)) channel().give_back(peer);
  }
  // Outside the domain rows were copied by `push`; inside, the readers may still be at it.
  for (int peer = 0; peer < engine_.size(); ++peer) {
    if (in_domain(peer)) channel().await_given_back("combine: readers", peer);
  }
}

}  // namespace

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

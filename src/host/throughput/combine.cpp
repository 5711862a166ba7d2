// Combine, phase by phase: every rank puts its rows where the peers read them and says where; sums
// in ascending rank order, in combine_direct.cpp or domains/combine.cpp; then the rows go back.
#include <array>
#include <cstring>
#include <optional>
#include <utility>

#include "core/check.hpp"
#include "core/exchange_signature.hpp"
#include "engine/regions.hpp"
#include "host/kernels/kernels.hpp"
#include "host/throughput/combine_call.hpp"

namespace ferry::host {
namespace {

constexpr const char* kCombine = "combine";
constexpr const char* kCombineRows = "combine: rows";

class CombineJob {
 public:
  explicit CombineJob(CombineCall call)
      : call_(std::move(call)), regions_(call_.engine.shared_memory()) {
    const std::int64_t tokens = call_.plan->tokens;
    const auto& out = call_.options.out;
    result_.x = out ? Tensor{*out, std::shared_ptr<void>(out->data, [](void*) {})}
                    : heap_tensor({tokens, call_.rows.columns()}, call_.rows.dtype);
    if (call_.has_weights()) {
      result_.topk_weights = heap_tensor({tokens, call_.plan->topk}, Dtype::f32);
    }
  }

  /// Throws when the rows do not fit the plan. Needs the counts.
  void check() const;
  void run();
  const Combined& result() const { return result_; }

 private:
  /// What all ranks must have in common.
  StepMessage head() const;
  [[noreturn]] void refuse_crossing();
  void tune();
  /// Rows that are pushed to this rank, and those that this rank may push to `peer`'s staging
  /// buffer.
  std::size_t staged_rows() const;
  std::int64_t staged_rows_of(int peer) const;
  void agree();
  void check_places() const;
  void place_rows() const;
  void copy_rows() const;
  void reduce_slots(const std::vector<std::int64_t>& slot_rows, const float* weights) const;
  void give_back() const;

  CombineCall call_;
  Regions regions_;
  CombineMemory memory_{};
  Combined result_{};
  std::optional<TuningKey> key_{};  // where there is a tuner
  CallSettings settings_{};
};

void CombineJob::check() const {
  check_combine_rows(call_.exchange(), call_.dispatched, call_.rows.rows(),
                     {call_.options.order, call_.options.alignment});
  if (call_.has_weights()) {
    check_combine_weights(call_.exchange(), call_.dispatched, call_.options.topk_weights->shape,
                          call_.plan->topk);
  }
}

void CombineJob::run() {
  call_.engine.await_counts(*call_.plan);
  if (call_.expert_major() && !call_.plan->routes_known.load(std::memory_order_acquire)) {
    call_.engine.all_ranks_throw();  // that dispatch failed on all of them
    refuse(kCombine, "plan", "a plan whose first dispatch failed",
           "one more dispatch, or a new plan");
  }
  check();  // too late to refuse now: the peers are in this call, so it fails the group
  for (const int peer : call_.channel().ranks()) call_.outsiders |= !call_.in_domain(peer);
  const Crossing asked = call_.options.crossing;
  call_.crossing = asked == Crossing::automatic ? call_.plan->crossed : asked;
  if (call_.engine.topology().count() == 1) call_.crossing = Crossing::direct;
  if (call_.hierarchical() && !call_.plan->forwards_known) refuse_crossing();
  if (call_.engine.tuner().on() && call_.engine.topology().count() > 1) tune();
  agree();
  if (key_) {
    call_.engine.tuner().met(call_.channel(), *key_, settings_, call_.plan->most_tokens);
  }
  check_places();
  if (call_.hierarchical()) {
    combine_domains(call_, memory_, result_);
  } else {
    combine_direct(call_, memory_, result_);
  }
  give_back();
  call_.channel().record().moved(call_.plan->tokens, call_.rows.row_bytes());
  regions_.release_all();
  if (key_) call_.engine.tuner().ended();
}

void CombineJob::tune() {
  key_ = {CallKind::combine,
          call_.rows.dtype,
          call_.options.order,
          call_.rows.columns(),
          tokens_class_of(call_.plan->most_tokens),
          false,
          call_.crossing,
          true,
          false};  // the other crossing has other bits
  settings_ = call_.engine.tuner().next(*key_);
  call_.chunk_bytes = index(settings_.chunk_bytes);
}

/// The same is known of the plan on all ranks, but not all need to have asked for this crossing:
/// they hear of each other before they throw.
void CombineJob::refuse_crossing() {
  call_.channel().swap(kCombineRows, head());
  engine::check_same_call(call_.channel(), kCombineRows, head().call);
  call_.engine.all_ranks_throw();
  refuse(kCombine, "crossing", "hierarchical with a plan that no hierarchical dispatch has used",
         "such a dispatch first: it brings what the sums inside a domain need");
}

std::size_t CombineJob::staged_rows() const {
  if (call_.hierarchical()) return static_cast<std::size_t>(call_.plan->crossing.offset.back());
  return call_.outsiders ? call_.exchange().destinations.size() : 0;
}

std::int64_t CombineJob::staged_rows_of(int peer) const {
  const CrossingPlan& crossing = call_.plan->crossing;
  if (call_.hierarchical()) {
    const int feeder = crossing.feeder(peer);
    return feeder < 0 ? 0 : crossing.feeder_sums[index(feeder)];
  }
  return call_.exchange().peer_sent_rows[index(peer)];
}

StepMessage CombineJob::head() const {
  StepMessage head;
  head.call = combine_signature(call_.rows, call_.plan->topk, call_.options, call_.plan->number);
  head.call.exchange.crossing = static_cast<std::uint16_t>(call_.crossing);
  head.call.exchange.chunk_kib = static_cast<std::uint16_t>(settings_.chunk_bytes >> 10);
  head.report = call_.engine.tuner().report();
  return head;
}

void CombineJob::agree() {
  const std::size_t row_bytes = call_.rows.row_bytes();
  const auto received = static_cast<std::size_t>(call_.exchange().recv_rows());
  const std::size_t staged = staged_rows();
  const auto registered = call_.expert_major() ? std::nullopt
                                               : call_.engine.shared_memory()->arena.find(
                                                     call_.rows.data, received * row_bytes);
  StepMessage head = this->head();
  const std::vector<std::size_t> sizes{registered ? 0 : received * row_bytes,
                                       received * call_.weight_bytes(), staged * row_bytes,
                                       staged * call_.weight_bytes()};
  head.need_bytes = Regions::total(sizes);
  bool taken = false;
  call_.engine.agree(kCombineRows, head, [&] {
    if (taken) return true;
    const auto regions = regions_.take(sizes);
    if (!regions) return false;
    taken = true;
    const Region& rows = (*regions)[0];
    const Region& weights = (*regions)[1];
    const Region& staging = (*regions)[2];
    const Region& staging_weights = (*regions)[3];
    memory_.mine =
        registered ? static_cast<std::byte*>(const_cast<void*>(call_.rows.data)) : rows.data;
    memory_.rows =
        call_.expert_major() ? memory_.mine : static_cast<const std::byte*>(call_.rows.data);
    memory_.mine_weights = weights.data;
    memory_.stage = staging.data;
    memory_.staging_weights = staging_weights.data;
    const fabric::Address at = registered ? *registered : rows.address;
    head.segment = at.segment;
    head.offset = at.offset;
    head.side_segment = weights.address.segment;
    head.side_offset = weights.address.offset;
    head.staging_segment = staging.address.segment;
    head.staging_offset = staging.address.offset;
    head.staging_side_segment = staging_weights.address.segment;
    head.staging_side_offset = staging_weights.address.offset;
    place_rows();  // before the message says that they are there
    return true;
  });
}

void CombineJob::place_rows() const {
  const auto received = static_cast<std::size_t>(call_.exchange().recv_rows());
  const float* weights =
      call_.has_weights() ? static_cast<const float*>(call_.options.topk_weights->data) : nullptr;
  std::vector<float> of_slots;
  if (call_.expert_major()) {
    const auto slot_rows = place_slots(call_.plan->routes.topk_idx,
                                       call_.exchange().expert_offsets(call_.options.alignment));
    if (weights_of_rows(call_.options)) {
      for (const std::int64_t row : slot_rows) of_slots.push_back(row < 0 ? 0.0f : weights[row]);
      weights = of_slots.data();
    }
    reduce_slots(slot_rows, call_.options.apply_weights ? weights : nullptr);
  } else if (memory_.mine != call_.rows.data) {
    copy_rows();
  }
  if (call_.has_weights() && received > 0) {
    std::memcpy(memory_.mine_weights, weights, received * call_.weight_bytes());
  }
}

/// Rows that peers read in registered memory. Of a direct combine these are those for the other
/// ranks of the domain; of a hierarchical one any other rank of the domain may read any row.
void CombineJob::copy_rows() const {
  const Domains& domains = call_.engine.topology();
  const bool all =
      call_.hierarchical() && domains.members(domains.of(call_.engine.rank())).size() > 1;
  const std::vector<std::int64_t>& from = call_.exchange().recv_offset;
  const std::size_t row_bytes = call_.rows.row_bytes();
  const bool stream = index(from.back()) * row_bytes > kStreamBytes;
  const Kernels& run = kernels();
  for (const int peer : call_.channel().ranks()) {
    const bool read = peer != call_.engine.rank() && call_.in_domain(peer);
    const std::size_t at = index(from[index(peer)]) * row_bytes;
    const std::size_t bytes = index(from[index(peer) + 1]) * row_bytes - at;
    if (bytes == 0 || (!read && !all)) continue;
    if (stream) {
      run.copy_stream(memory_.mine + at, memory_.rows + at, bytes);
    } else {
      std::memcpy(memory_.mine + at, memory_.rows + at, bytes);
    }
  }
  if (stream) run.stream_fence();  // before the message says that they are there
}

/// `weights`: of the slots, or null.
void CombineJob::reduce_slots(const std::vector<std::int64_t>& slot_rows,
                              const float* weights) const {
  const auto topk = static_cast<std::size_t>(call_.plan->topk);
  const auto* from = static_cast<const std::byte*>(call_.rows.data);
  const Kernels& run = kernels();
  std::array<const void*, kMaxTopk> rows{};
  std::array<float, kMaxTopk> factors{};
  SumRows sum;
  sum.rows = rows.data();
  sum.weights = weights == nullptr ? nullptr : factors.data();
  sum.columns = call_.rows.columns();
  sum.dtype = call_.rows.dtype;
  for (std::size_t i = 0; i < static_cast<std::size_t>(call_.exchange().recv_rows()); ++i) {
    sum.count = 0;
    for (std::size_t k = 0; k < topk; ++k) {
      const std::int64_t row = slot_rows[i * topk + k];
      if (row < 0) continue;
      const auto n = static_cast<std::size_t>(sum.count++);
      rows[n] = from + static_cast<std::size_t>(row) * call_.rows.row_bytes();
      if (weights != nullptr) factors[n] = weights[i * topk + k];
    }
    sum.out = memory_.mine + i * call_.rows.row_bytes();
    run.sum_rows(sum);
  }
}

void CombineJob::check_places() const {
  const std::size_t row_bytes = call_.rows.row_bytes();
  for (const int peer : call_.channel().ranks()) {
    const StepMessage theirs = call_.channel().head(peer);
    const auto check = [&](std::uint32_t segment, std::uint64_t offset, std::int64_t rows,
                           std::size_t bytes) {
      call_.channel().checked(kCombineRows, peer, {segment, offset},
                              static_cast<std::uint64_t>(rows) * bytes);
    };
    if (call_.in_domain(peer)) {  // read in place
      const std::int64_t rows = call_.exchange().peer_recv_rows[index(peer)];
      check(theirs.segment, theirs.offset, rows, row_bytes);
      check(theirs.side_segment, theirs.side_offset, rows, call_.weight_bytes());
    } else {
      const std::int64_t rows = staged_rows_of(peer);
      check(theirs.staging_segment, theirs.staging_offset, rows, row_bytes);
      check(theirs.staging_side_segment, theirs.staging_side_offset, rows, call_.weight_bytes());
    }
  }
}

void CombineJob::give_back() const {
  for (const int peer : call_.channel().ranks()) {
    if (call_.in_domain(peer)) call_.channel().give_back(peer);
  }
  // Rows that cross were copied when they were pushed; inside, the readers may still be at it.
  for (const int peer : call_.channel().ranks()) {
    if (call_.in_domain(peer)) call_.channel().await_given_back("combine: readers", peer);
  }
}

}  // namespace

Combined combine(HostEngine& engine, const ConstTensorView& rows, const Plan& plan,
                 const CombineOptions& options) {
  HostEngine::Call call(engine, kCombine);
  PlanState& state = checked(plan, kCombine, engine);
  check_combine(rows, state.tokens, state.topk, options);
  if (options.order == RowOrder::expert_major && !state.routes_sent.load()) {
    refuse(kCombine, "plan", "a plan that no dispatch has used yet",
           "a dispatch first: it brings the routes that expert-major rows need");
  }
  auto job = std::make_shared<CombineJob>(CombineCall{engine, Access::state(plan), rows, options});
  if (state.ready.ready()) {
    state.ready.wait();  // throws what the plan's work threw
    job->check();
  }
  const Event event = engine.enter(kCombine, options.stream, [job] { job->run(); }, &call);
  Combined result = job->result();
  result.event = event;
  return result;
}

}  // namespace ferry::host

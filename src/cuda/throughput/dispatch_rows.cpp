// How many rows a dispatch of exact size has: known, or guessed so that rows fly before the CPU has
// learnt the counts. What was guessed too much goes back; when it was too little, the kernels wait
// for a second grant (kernels/throughput/second_grant.cuh).
#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "core/check.hpp"
#include "cuda/runtime/event.hpp"
#include "cuda/throughput/dispatch_job.hpp"

namespace ferry::cuda {

void DispatchJob::learn_counts() {
  if (plan_->counts_known()) return;
  if (launch_.capture().active) {
    throw Error(ErrorKind::unsupported,
                "dispatch: its stream is being captured into a CUDA graph, where the CPU cannot "
                "wait for the counts of the plan; give worst_case_rows, or a plan whose counts "
                "are known");
  }
  make_plan();
  try {
    plan_->ready.wait(kUntilItEnds, engine_.config().on_wait);
  } catch (const Error&) {
    if (plan_->captured || !plan_->told()) throw;
    plan_error_ = std::current_exception();
  }
}

void DispatchJob::know_rows() {
  guessed_ = false;
  rank_rows_ = out_rows_ = 0;
  learn_counts();
  if (plan_error_) return;
  rank_rows_ = plan_->exchange.recv_rows();
  out_rows_ =
      expert_major() ? plan_->exchange.expert_offsets(options_.alignment).back() : rank_rows_;
  if (carries_routes_) engine_.row_guess().learn(plan_->tokens, rank_rows_);
}

/// Only for the first dispatch of a plan, which comes when its counts are not there yet. Every
/// rank's own choice.
bool DispatchJob::guess_rows() {
  if (!carries_routes_ || expert_major() || options_.out || plan_->scattered) return false;
  if (launch_.capture().active || plan_->captured || plan_->told()) return false;
  const std::int64_t guess = engine_.row_guess().rows(plan_->tokens, engine_.size());
  if (guess < 1 || guess > kMaxRows) return false;
  rank_rows_ = out_rows_ = guess;
  guessed_ = true;
  return true;
}

bool DispatchJob::reserve_guess() {
  engine::RowGuess& guess = engine_.row_guess();
  if (reserve(CudaEngine::Pieces::spare)) return true;
  if (!guess.worth_memory()) return false;
  if (reserve(CudaEngine::Pieces::any)) return true;
  guess.found_no_memory();
  return false;
}

/// The kernel runs. False: there is no room for what arrives, which every rank learns.
bool DispatchJob::settle_guess() {
  engine_.stay_in(CallKind::dispatch);
  try {
    learn_counts();
    if (plan_error_) fail_with_plan();
    const std::int64_t rows = plan_->exchange.recv_rows();
    engine_.row_guess().learn(plan_->tokens, rows);
    ++engine_.guesses().made;
    if (rows > granted_rows_) return grant_again(rows);
    narrow(rows);
    return true;
  } catch (const std::exception& thrown) {
    if (!plan_error_) engine_.give_up(kDispatch, thrown);  // the kernels may wait for this rank
    throw;
  }
}

/// As if so many rows had been granted; but the places inside the regions stay.
void DispatchJob::narrow(std::int64_t rows) {
  const auto used = static_cast<std::size_t>(rows);
  const auto columns = static_cast<std::size_t>(row_.scale_columns);
  engine_.gpu().shrink(
      rank_, columns > 0 ? receive_layout(granted_rows_).scales + used * columns * sizeof(float)
                         : used * row_.bytes());
  rank_rows_ = out_rows_ = rows;
  routes_.rows = rows;
  const auto first = [&](const Tensor& tensor, const Extents& shape) {
    return Tensor(TensorView(tensor.data(), tensor.dtype(), shape, engine_.device()),
                  tensor.owner());
  };
  routes_.topk_idx = first(routes_.topk_idx, {rows, plan_->topk});
  routes_.tokens = first(routes_.tokens, {rows});
}

/// What was granted stays until the call has ended, but nobody writes there.
bool DispatchJob::grant_again(std::int64_t rows) {
  engine_.stay_in(CallKind::grow);
  ++engine_.guesses().too_low;
  launch_.temporary(std::exchange(rank_, {}));
  launch_.temporary(std::exchange(side_, {}));
  rank_rows_ = out_rows_ = rows;
  const bool countable = rows <= kMaxRows;
  const bool room = countable && reserve(CudaEngine::Pieces::idle);
  SecondGrant& grant = launch_.record()->pinned().second;
  grant.status = !countable ? StepStatus::too_many : room ? StepStatus::ok : StepStatus::no_room;
  grant.segment = rank_.region.address.segment;
  grant.offset = rank_.region.address.offset;
  grant.side_segment = side_.region.address.segment;
  grant.side_offset = side_.region.address.offset;
  grant.rows = rows;
  grant.detail = countable ? need_bytes_ : rows;
  std::atomic_ref(grant.written).store(1, std::memory_order_release);
  return room;
}

/// The plan's call was refused on every rank, and so is this one: all take part in it.
void DispatchJob::fail_with_plan() {
  if (!guessed_) {
    rank_rows_ = out_rows_ = 0;
    push(StepStatus::ok);
  }
  const Event event = launch_.finish();
  try {
    engine_.finish(kDispatch, event);
  } catch (const Error&) {  // says no more than the plan's
  }
  std::rethrow_exception(plan_error_);
}

}  // namespace ferry::cuda

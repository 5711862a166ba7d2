// What kernels tell of a failure becomes a ferry::Error with the host engine's words.
#include <string>
#include <utility>

#include "core/check.hpp"
#include "cuda/throughput/engine.hpp"
#include "cuda/throughput/failure.hpp"

namespace ferry::cuda {

using std::to_string;

namespace {

/// What a rank that receives too many rows has given.
std::string most_rows(const CallRecord& record, const Failure& failure, bool own) {
  if (failure.detail > kMaxRows && (!own || record.worst_case_rows == 0)) {
    return "no worst_case_rows, and a rank has at most " + to_string(kMaxRows) +
           " (topk_idx and alignment give this number)";
  }
  return own ? "worst_case_rows = " + to_string(record.worst_case_rows)
             : std::string("a smaller worst_case_rows or out");
}

std::string size_of_what(Stage stage) {
  return stage == Stage::counts ? "tokens and topk" : "rows, columns and worst_case_rows";
}

}  // namespace

const char* stage_name(Stage stage) {
  switch (stage) {
    case Stage::counts: return "plan: counts";
    case Stage::grants: return "dispatch: grants";
    case Stage::rows: return "dispatch: rows";
    case Stage::descriptors: return "combine: rows";
    case Stage::sums: return "combine: sums";
    case Stage::loans: return "combine: readers";
    case Stage::barrier: return "barrier";
    case Stage::latency_open: return "LatencyExchange: buffers";
    case Stage::latency_rejoin: return "latency rejoin";
    case Stage::latency_credit: return "latency dispatch: credit";
    case Stage::latency_headers:
    case Stage::latency_rows: return "latency dispatch: rows";
    case Stage::latency_weights: return "latency combine: weights";
    case Stage::latency_sums: return "latency combine: rows";
    case Stage::none: break;
  }
  return "exchange";
}

Error CudaEngine::fatal_error() {
  std::scoped_lock lock(fatal_mutex_);
  if (fatal_) return *fatal_;
  Failure failure = *words_.fatal;
  const char* stage = stage_name(failure.stage);
  if (channel_.left()) {
    fatal_ = Error(ErrorKind::destroyed,
                   "rank " + to_string(rank()) + ": " + stage +
                       ": the group was destroyed during the exchange",
                   {rank(), -1, stage, failure.written, failure.expected, failure.seen});
    return *fatal_;
  }
  channel_.count(failure.written);
  // What the peers said comes first: they may know who really died.
  if (auto told = channel_.look(
          stage, [] { return engine::Channel::kUnknownEnd; }, [](int) { return true; })) {
    fatal_ = *told;
    return *fatal_;
  }
  if (fail_beyond(failure) && fatal_) return *fatal_;
  switch (failure.reason) {
    case Reason::deadline:
      fatal_ = channel_.late(stage, failure.peer, failure.expected, failure.seen);
      break;
    case Reason::violation:
      try {
        channel_.throw_violation(stage, failure.peer,
                                 "said what cannot be (expected " + to_string(failure.expected) +
                                     ", seen " + to_string(failure.seen) + ", detail " +
                                     to_string(failure.detail) + ")");
      } catch (const Error& error) {
        fatal_ = error;
      }
      break;
    case Reason::mismatch:  // of latency mode, where nothing is agreed on before rows move
      fatal_ = latency_mismatch(failure, rank());
      channel_.fail(stage, fatal_->what(), ErrorKind::mismatch);
      break;
    default:
      channel_.fail(stage, "the exchange was told to stop", ErrorKind::interrupted);
      fatal_ = channel_.dead();
      break;
  }
  if (!fatal_) fatal_ = Error(ErrorKind::system, std::string(stage) + ": the exchange failed");
  return *fatal_;
}

Error CudaEngine::refusal(const CallRecord& record, const Failure& failure) const {
  const int peer = failure.peer;
  const char* stage = stage_name(failure.stage);
  const ErrorContext context{rank(), peer, stage, failure.written, 0, 0};
  const std::string who = "rank " + to_string(peer);
  if (failure.stage == Stage::latency_rejoin) return rejoin_refusal(failure);
  if (failure.stage == Stage::latency_headers) return latency_refusal(record, failure);
  switch (failure.reason) {
    case Reason::mismatch:
      return Error(
          ErrorKind::mismatch,
          std::string(stage) + ": rank " + to_string(rank()) + " and " + who +
              " made different calls: " + difference(failure.theirs, peer, record.signature),
          context);
    case Reason::no_room:
      return Error(ErrorKind::exhausted,
                   std::string(stage) + ": " + who + " could not register " +
                       to_string(failure.detail) + " more bytes (" + size_of_what(failure.stage) +
                       " give this size); nothing was sent",
                   context);
    case Reason::too_many:
      return Error(ErrorKind::exhausted,
                   std::string(stage) + ": " + who + " would receive " + to_string(failure.detail) +
                       " rows but gave " + most_rows(record, failure, peer == rank()) +
                       "; nothing was sent",
                   context);
    case Reason::bad_route: {
      const std::string at =
          "[" + to_string(failure.detail / 64) + ", " + to_string(failure.detail % 64) + "]";
      if (peer == rank()) {
        return Error(ErrorKind::invalid_argument,
                     std::string(record.routes_of) + ": topk_idx: got an id that is no expert at " +
                         at + "; expected -1 (unused) or 0 … " + to_string(config_.experts - 1),
                     context);
      }
      return Error(ErrorKind::peer_failed,
                   std::string(stage) + ": " + who + " was given an id that is no expert, at " +
                       at + " of its topk_idx; nothing was sent",
                   context);
    }
    case Reason::bad_plan:
      return Error(ErrorKind::invalid_argument,
                   std::string(record.call) +
                       ": plan: got a plan whose own call failed, or whose routes did not come "
                       "because the dispatch that carried them failed; expected a new plan, or a "
                       "dispatch that brings its routes",
                   context);
    default: break;
  }
  return Error(ErrorKind::system, std::string(record.call) + ": the call failed", context);
}

void CallRecord::tell() {
  if (!told.exchange(true, std::memory_order_acq_rel) && on_failure) on_failure();
}

/// Of a dispatch that was refused for its plan: why the plan was.
Error CudaEngine::refusal(const CallRecord& record) const {
  const bool by_plan = record.failure->reason == Reason::bad_plan && record.plan_failure &&
                       record.plan_failure->reason != Reason::none;
  return by_plan ? refusal(*record.plan, *record.plan_failure) : refusal(record, *record.failure);
}

void CudaEngine::check_ended(CallRecord& record) {
  if (words_.failed() && !record.ended_before(*words_.fatal)) throw fatal_error();
  const bool refused = record.refused();
  if (refused) record.tell();
  if (refused && record.failure->reason != Reason::bad_plan) {
    throw refusal(record, *record.failure);
  }
  if (refused && record.plan_failure && record.plan_failure->reason != Reason::none) {
    throw refusal(*record.plan, *record.plan_failure);
  }
  for (const auto& needed : record.needs) {
    if (!needed->refused()) continue;
    needed->tell();
    const Error error = refusal(*needed, *needed->failure);
    throw Error(error.kind(),
                std::string(record.call) +
                    ": the dispatch that was to bring the plan's routes failed: " + error.what(),
                error.context());
  }
  if (refused) throw refusal(record, *record.failure);
}

void CudaEngine::throw_untold(const char* call) {
  std::shared_ptr<CallRecord> refused;
  {
    std::scoped_lock lock(flight_mutex_);
    std::erase_if(untold_, [&](const std::shared_ptr<CallRecord>& record) {
      if (record->told.load(std::memory_order_acquire)) return true;
      if (refused || !record->asker.expired()) return false;
      refused = record;
      return true;
    });
  }
  std::erase_if(captured_, [](const auto& weak) { return weak.expired(); });
  for (const auto& weak : captured_) {
    const auto record = weak.lock();
    if (refused || !record || !record->refused()) continue;
    if (std::exchange(record->told_replay, record->failure->written) != record->failure->written) {
      refused = record;
    }
  }
  if (!refused) return;
  refused->tell();
  const Error error = refusal(*refused);
  throw Error(error.kind(),
              std::string(call) +
                  ": an earlier call failed, and nobody waited for its event: " + error.what(),
              error.context());
}

}  // namespace ferry::cuda

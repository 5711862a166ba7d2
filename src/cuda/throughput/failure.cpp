// What kernels tell of a failure becomes a ferry::Error with the host engine's words. Those of
// latency mode count ranks as their exchange does, whose group may be larger than the engine.
#include "cuda/throughput/failure.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include "base/text.hpp"
#include "core/check.hpp"
#include "cuda/throughput/engine.hpp"

namespace ferry::cuda {

using std::to_string;

namespace {

/// What a rank that would receive too many rows exceeds.
std::string row_limit(const CallRecord& record, const Failure& failure, bool own) {
  if (failure.detail > kMaxRows && (!own || record.max_recv_rows == 0)) {
    return "the limit of " + to_string(kMaxRows) +
           " rows per rank; use fewer tokens, a smaller topk or a smaller alignment";
  }
  return own ? "its max_recv_rows = " + to_string(record.max_recv_rows)
             : std::string("its max_recv_rows, or the rows of its out");
}

std::string size_of_what(Stage stage) {
  return stage == Stage::counts ? "tokens and topk" : "rows, columns and max_recv_rows";
}

/// Of a dispatch: the GPU has refused its plan, and says why.
bool plan_failed(const CallRecord& record) {
  return record.plan_failure && record.plan_failure->reason != Reason::none;
}

/// Whether a kernel of a latency exchange gave up, which counts ranks as the exchange does.
bool is_of_exchange(Stage stage) {
  switch (stage) {
    case Stage::latency_rejoin:
    case Stage::latency_credit:
    case Stage::latency_headers:
    case Stage::latency_rows:
    case Stage::latency_weights:
    case Stage::latency_sums: return true;
    default: return false;
  }
}

Error latency_mismatch(const Failure& failure, int self) {
  const bool combine = failure.stage == Stage::latency_sums;
  const char* call = combine ? "latency combine" : "latency dispatch";
  return Error(ErrorKind::mismatch,
               "rank " + to_string(self) + ": " + call + ": rank " + to_string(failure.peer) +
                   (combine ? " called with another path or format; expected the same on all ranks"
                            : " called with another format or scale_format, or only one of the two "
                              "gave topk_weights; expected the same on all ranks"),
               {self, failure.peer, call, failure.written, failure.expected, failure.seen});
}

Error rejoin_refusal(const Failure& failure, int self) {
  if (failure.reason == Reason::aborted) {
    return Error(ErrorKind::interrupted,
                 "rank " + to_string(self) + ": latency rejoin: the exchange was told to stop",
                 {self, failure.peer, "latency rejoin", failure.written, 0, 0});
  }
  const bool late = failure.reason == Reason::deadline;
  return Error(late ? ErrorKind::deadline : ErrorKind::mismatch,
               "rank " + to_string(self) + ": latency rejoin: rank " + to_string(failure.peer) +
                   (late ? " did not come within the deadline; expected rejoin() on all ranks"
                         : " saw other ranks than this one; rejoin again"),
               {self, failure.peer, "latency rejoin", failure.written, 0, 0});
}

Error latency_refusal(const CallRecord& record, const Failure& failure, int self,
                      std::int64_t experts) {
  if (failure.reason == Reason::stale) {
    return Error(ErrorKind::invalid_argument,
                 std::string(record.call) + ": received: a result that was kept over " +
                     to_string(failure.detail) +
                     " later dispatches, those of graphs included; its rows may still be read, but "
                     "neither received nor combined. Expected at most one dispatch between",
                 {self, self, record.call, failure.written, 0, 0});
  }
  const std::string at = failure.reason == Reason::bad_route
                             ? "an id that is no expert at [" + to_string(failure.detail / 64) +
                                   ", " + to_string(failure.detail % 64) + "]"
                             : std::string("more slots for one expert than the capacity");
  const ErrorContext context{self, failure.peer, "latency dispatch", failure.written, 0, 0};
  if (failure.peer == self) {
    return Error(ErrorKind::invalid_argument,
                 std::string(record.call) + ": topk_idx: got " + at +
                     "; expected -1 (unused) or 0 … " + to_string(experts - 1) +
                     ", each at most as often as the capacity",
                 context);
  }
  return Error(ErrorKind::peer_failed,
               std::string(record.call) + ": rank " + to_string(failure.peer) + " was given " + at +
                   "; it sent nothing",
               context);
}

/// The peer was given experts of a rank that is lost.
Error lost_route(const CudaEngine& engine, const CallRecord& record, const Failure& failure,
                 const ErrorContext& context) {
  const std::string experts = "experts of rank " + to_string(failure.detail - kLostRoute) +
                              ", which is not in epoch " + to_string(engine.epoch()) +
                              " of the group";
  if (context.peer == context.rank) {
    return Error(ErrorKind::invalid_argument,
                 std::string(record.routes_of) + ": topk_idx: got " + experts +
                     "; expected those of " + spell_ranks(engine.group_view().ranks) + ", or -1",
                 context);
  }
  return Error(ErrorKind::peer_failed,
               std::string(context.stage) + ": rank " + to_string(context.peer) + " was given " +
                   experts + "; nothing was sent",
               context);
}

bool is_transfer(Stage stage) {
  return stage == Stage::send || stage == Stage::recv;
}

/// Of send and recv: both know it.
Error bytes_refusal(const Failure& failure, int self) {
  const char* call = stage_name(failure.stage);
  const bool sends = failure.stage == Stage::send;
  const std::string own = "rank " + to_string(self), peer = "rank " + to_string(failure.peer);
  return Error(ErrorKind::mismatch,
               own + ": " + call + ": " + (sends ? own : peer) + " sends " +
                   to_string(failure.seen) + " bytes to " + (sends ? peer : own) + " (tag " +
                   to_string(failure.detail) + "), which expects " + to_string(failure.expected) +
                   " bytes; nothing was received",
               {self, failure.peer, call, failure.written, failure.expected, failure.seen});
}

/// Counts of all_to_all that do not fit together: every rank knows all.
Error counts_refusal(const Failure& failure, int self) {
  if (is_transfer(failure.stage)) return bytes_refusal(failure, self);
  const auto target = static_cast<int>(failure.detail);
  return Error(
      ErrorKind::mismatch,
      "all_to_all: rank " + to_string(failure.peer) + " sends " + to_string(failure.seen) +
          " elements to rank " + to_string(target) + ", which expects " +
          to_string(failure.expected),
      {self, failure.peer == self ? target : failure.peer, "all_to_all", failure.written, 0, 0});
}

Error late_transfer(CudaEngine& engine, const Failure& failure) {
  const std::string what = std::string(failure.stage == Stage::send ? "receive " : "send ") +
                           to_string(failure.expected) + " bytes (tag " +
                           to_string(failure.detail) + ")";
  return engine.channel().late_transfer(stage_name(failure.stage), failure.peer, what,
                                        engine.config().deadline);
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
    case Stage::all_reduce: return "all_reduce";
    case Stage::reduce_scatter: return "reduce_scatter";
    case Stage::all_gather: return "all_gather";
    case Stage::broadcast: return "broadcast";
    case Stage::all_to_all: return "all_to_all";
    case Stage::copy_rows: return "copy_rows";
    case Stage::add_rows: return "add_rows";
    case Stage::send: return "send";
    case Stage::recv: return "recv";
    case Stage::none: break;
  }
  return "exchange";
}

Error refusal(const CudaEngine& engine, const CallRecord& record, const Failure& failure) {
  const int self = engine.rank();
  const int peer = failure.peer;
  const char* stage = stage_name(failure.stage);
  const ErrorContext context{self, peer, stage, failure.written, 0, 0};
  const std::string who = "rank " + to_string(peer);
  const int in_group = engine.group_rank(self);
  if (failure.stage == Stage::latency_rejoin) return rejoin_refusal(failure, in_group);
  if (failure.stage == Stage::latency_headers) {
    return latency_refusal(record, failure, in_group, engine.config().experts);
  }
  switch (failure.reason) {
    case Reason::mismatch:
      return Error(
          ErrorKind::mismatch,
          std::string(stage) + ": rank " + to_string(self) + " and " + who +
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
                       " rows, more than " + row_limit(record, failure, peer == self) +
                       "; nothing was sent",
                   context);
    case Reason::bad_route: {
      if (failure.detail >= kLostRoute) return lost_route(engine, record, failure, context);
      const std::string at =
          "[" + to_string(failure.detail / 64) + ", " + to_string(failure.detail % 64) + "]";
      if (peer == self) {
        return Error(ErrorKind::invalid_argument,
                     std::string(record.routes_of) + ": topk_idx: got an id that is no expert at " +
                         at + "; expected -1 (unused) or 0 … " +
                         to_string(engine.config().experts - 1),
                     context);
      }
      return Error(ErrorKind::peer_failed,
                   std::string(stage) + ": " + who + " was given an id that is no expert, at " +
                       at + " of its topk_idx; nothing was sent",
                   context);
    }
    case Reason::bad_plan:
      return Error(
          ErrorKind::invalid_argument,
          std::string(record.call) +
              ": plan: got a plan whose own call failed, whose routes did not come "
              "because the dispatch that carried them failed, or which was made before "
              "the last regroup; expected a new plan, or a dispatch that brings its routes",
          context);
    case Reason::bad_counts: return counts_refusal(failure, self);
    default: break;
  }
  return Error(ErrorKind::system, std::string(record.call) + ": the call failed", context);
}

Error refusal(const CudaEngine& engine, const CallRecord& record) {
  const bool by_plan = record.failure->reason == Reason::bad_plan && plan_failed(record);
  return by_plan ? refusal(engine, *record.plan, *record.plan_failure)
                 : refusal(engine, record, *record.failure);
}

void check_ended(CudaEngine& engine, CallRecord& record) {
  if (record.was_lost(engine.words())) {
    if (record.is_over()) throw Error(*record.epoch->error);
    throw engine.fatal_error();
  }
  if (!record.is_over()) engine.channel().check_evicted(record.call);
  const bool refused = record.refused();
  if (refused) record.tell();
  if (refused && (record.failure->reason != Reason::bad_plan || plan_failed(record))) {
    throw refusal(engine, record);
  }
  for (const auto& needed : record.needs) {
    if (!needed->refused()) continue;
    needed->tell();
    const Error error = refusal(engine, *needed, *needed->failure);
    throw Error(error.kind(),
                std::string(record.call) +
                    ": the dispatch that was to bring the plan's routes failed: " + error.what(),
                error.context());
  }
  if (refused) throw refusal(engine, record);
}

/// What comes before all that the kernels say: peers may know who really died.
std::optional<Error> FatalFailure::told(CudaEngine& engine, const Failure& failure) const {
  engine::Channel& channel = engine.channel();
  const char* stage = stage_name(failure.stage);
  if (channel.left()) {
    return Error(ErrorKind::destroyed,
                 "rank " + to_string(engine.rank()) + ": " + stage +
                     ": the group was destroyed during the exchange",
                 {engine.rank(), -1, stage, failure.written, failure.expected, failure.seen});
  }
  channel.count(failure.written);
  try {
    channel.check_evicted(stage);
  } catch (const Error& evicted) {
    return evicted;
  }
  if (cut_off_) return failure.reason == Reason::aborted ? cut_off_ : std::nullopt;
  return channel.poll(stage, [] { return engine::Channel::kUnknownEnd; }, [](int) { return true; });
}

Error FatalFailure::error(CudaEngine& engine) {
  std::scoped_lock lock(mutex_);
  if (error_) return *error_;
  engine::Channel& channel = engine.channel();
  if (!engine.words().failed()) {
    return Error(ErrorKind::peer_failed, "the group has gone on in another epoch",
                 {engine.rank(), -1, "regroup", channel.generation(), 0, 0});
  }
  Failure failure = *engine.words().fatal;
  const int self = engine.rank();
  const char* stage = stage_name(failure.stage);
  error_ = told(engine, failure);
  if (error_) return *error_;
  if (is_beyond(engine, failure) && error_) return *error_;
  switch (failure.reason) {
    case Reason::deadline:
      error_ = is_transfer(failure.stage)
                   ? late_transfer(engine, failure)
                   : channel.late(stage, failure.peer, failure.expected, failure.seen);
      break;
    case Reason::violation:
      try {
        channel.throw_violation(stage, failure.peer,
                                "said what cannot be (expected " + to_string(failure.expected) +
                                    ", seen " + to_string(failure.seen) + ", detail " +
                                    to_string(failure.detail) + ")");
      } catch (const Error& error) {
        error_ = error;
      }
      break;
    case Reason::mismatch:  // of latency mode, where nothing is agreed on before rows move
      error_ = latency_mismatch(failure, self);
      channel.fail(stage, error_->what(), ErrorKind::mismatch);
      break;
    default:
      channel.fail(stage, "the exchange was told to stop", ErrorKind::interrupted);
      error_ = channel.dead();
      break;
  }
  if (!error_) error_ = Error(ErrorKind::system, std::string(stage) + ": the exchange failed");
  return *error_;
}

void FatalFailure::cut_off(CudaEngine& engine) {
  std::scoped_lock lock(mutex_);
  if (cut_off_) return;  // this is another try
  cut_off_ = engine.channel().dead();
  if (cut_off_) return;
  cut_off_ = Error(ErrorKind::peer_failed,
                   "rank " + to_string(engine.rank()) + ": regroup has ended the call",
                   {engine.rank(), -1, "regroup", engine.channel().generation(), 0, 0});
}

void FatalFailure::begin_epoch(const GroupWords& words) {
  std::scoped_lock lock(mutex_);
  error_.reset();
  cut_off_.reset();
  beyond_.reset();
  std::atomic_ref(*words.abort).store(0, std::memory_order_relaxed);  // before a kernel is launched
  words.fatal->reason = Reason::none;
  // Release: whoever sees it finds that the epoch before is over.
  std::atomic_ref(words.fatal->written).store(0, std::memory_order_release);
}

/// Of an exchange of a larger group: `failure` names a rank of this engine from here on. True: the
/// rank is beyond, and this engine has failed on its account; the group's engine says how.
bool FatalFailure::is_beyond(CudaEngine& engine, Failure& failure) {
  const std::vector<int>& members = engine.members();
  if (members.empty() || !is_of_exchange(failure.stage)) return false;
  const auto found = std::lower_bound(members.begin(), members.end(), failure.peer);
  if (found != members.end() && *found == failure.peer) {
    failure.peer = static_cast<std::int32_t>(found - members.begin());
    return false;
  }
  if (failure.reason == Reason::aborted || failure.peer < 0) return false;
  beyond_ = failure;
  const ErrorKind kind = failure.reason == Reason::deadline   ? ErrorKind::deadline
                         : failure.reason == Reason::mismatch ? ErrorKind::mismatch
                                                              : ErrorKind::peer_failed;
  const std::string text =
      failure.reason == Reason::mismatch
          ? latency_mismatch(failure, engine.group_rank(engine.rank())).what()
          : "rank " + to_string(failure.peer) + " of another domain " +
                (kind == ErrorKind::deadline ? "did not answer in time" : "said what cannot be");
  engine.channel().fail(stage_name(failure.stage), text, kind);
  error_ = engine.channel().dead();
  return true;
}

}  // namespace ferry::cuda

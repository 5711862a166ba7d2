// What kernels of latency mode tell of a failure becomes a ferry::Error. They count ranks as their
// exchange does, whose group may be larger than the engine.
#include <algorithm>
#include <string>

#include "cuda/throughput/engine.hpp"
#include "cuda/throughput/failure.hpp"

namespace ferry::cuda {

using std::to_string;

namespace {

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

}  // namespace

Error CudaEngine::latency_mismatch(const Failure& failure, int self) const {
  const bool combine = failure.stage == Stage::latency_sums;
  const char* call = combine ? "latency combine" : "latency dispatch";
  return Error(ErrorKind::mismatch,
               "rank " + to_string(self) + ": " + call + ": rank " + to_string(failure.peer) +
                   (combine ? " takes another path or format"
                            : " used another format or scale_format, or differs in having "
                              "topk_weights,") +
                   " in this call",
               {self, failure.peer, call, failure.written, failure.expected, failure.seen});
}

Error CudaEngine::rejoin_refusal(const Failure& failure) const {
  const int self = group_rank(rank());
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

Error CudaEngine::latency_refusal(const CallRecord& record, const Failure& failure) const {
  if (failure.reason == Reason::stale) {
    return Error(ErrorKind::invalid_argument,
                 std::string(record.call) + ": received: a result that was kept over " +
                     to_string(failure.detail) +
                     " later dispatches, those of graphs included; its rows may still be read, but "
                     "neither received nor combined. Expected at most one dispatch between",
                 {group_rank(rank()), group_rank(rank()), record.call, failure.written, 0, 0});
  }
  const std::string at = failure.reason == Reason::bad_route
                             ? "an id that is no expert at [" + to_string(failure.detail / 64) +
                                   ", " + to_string(failure.detail % 64) + "]"
                             : std::string("more slots for one expert than the capacity");
  const int self = group_rank(rank());
  const ErrorContext context{self, failure.peer, "latency dispatch", failure.written, 0, 0};
  if (failure.peer == self) {
    return Error(ErrorKind::invalid_argument,
                 std::string(record.call) + ": topk_idx: got " + at +
                     "; expected -1 (unused) or 0 … " + to_string(config_.experts - 1) +
                     ", each at most as often as the capacity",
                 context);
  }
  return Error(ErrorKind::peer_failed,
               std::string(record.call) + ": rank " + to_string(failure.peer) + " was given " + at +
                   "; it sent nothing",
               context);
}

/// Of an exchange of a larger group: `failure` names a rank of this engine from here on. True: the
/// rank is beyond, and this engine has failed on its account; the group's engine says how.
bool CudaEngine::fail_beyond(Failure& failure) {
  if (members_.empty() || !is_of_exchange(failure.stage)) return false;
  const auto found = std::lower_bound(members_.begin(), members_.end(), failure.peer);
  if (found != members_.end() && *found == failure.peer) {
    failure.peer = static_cast<std::int32_t>(found - members_.begin());
    return false;
  }
  if (failure.reason == Reason::aborted || failure.peer < 0) return false;
  beyond_ = failure;
  const ErrorKind kind = failure.reason == Reason::deadline   ? ErrorKind::deadline
                         : failure.reason == Reason::mismatch ? ErrorKind::mismatch
                                                              : ErrorKind::peer_failed;
  const std::string text =
      failure.reason == Reason::mismatch
          ? latency_mismatch(failure, group_rank(rank())).what()
          : "rank " + to_string(failure.peer) + " of another domain " +
                (kind == ErrorKind::deadline ? "did not answer in time" : "said what cannot be");
  channel_.fail(stage_name(failure.stage), text, kind);
  fatal_ = channel_.dead();
  return true;
}

}  // namespace ferry::cuda

// A failed exchange: the words of its error, which rank it names, the failure broadcast to the
// peers. channel_watch.cpp detects the failure in a wait of this CPU; `poll`, `late` and `beat` are
// for an engine whose waits run on a GPU, where the CPU only watches the peers.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <set>

#include "base/log.hpp"
#include "engine/channel.hpp"

namespace ferry::engine {

namespace {

using protocol::FailureBroadcast;
using protocol::Status;

std::string seconds(std::chrono::nanoseconds time) {
  std::string text = std::to_string(static_cast<double>(time.count()) * 1e-9);
  return text.substr(0, text.find('.') + 3) + " s";
}

std::string rank_text(int rank) {
  return "rank " + std::to_string(rank);
}

ErrorKind kind_of(FailureBroadcast::Kind kind) {
  switch (kind) {
    case FailureBroadcast::Kind::kLate: return ErrorKind::deadline;
    case FailureBroadcast::Kind::kLeft: return ErrorKind::peer_left;
    default: return ErrorKind::peer_failed;
  }
}

std::string told(const FailureBroadcast& broadcast, int self) {
  const std::string culprit = rank_text(broadcast.culprit);
  const std::string by = broadcast.reporter == self || broadcast.reporter == broadcast.culprit
                             ? std::string()
                             : " (reported by " + rank_text(broadcast.reporter) + ")";
  switch (broadcast.kind) {
    case FailureBroadcast::Kind::kLate: return culprit + " missed the deadline" + by;
    case FailureBroadcast::Kind::kLeft:
      return culprit + " destroyed its group while others still exchange" + by;
    case FailureBroadcast::Kind::kFailed: return culprit + " failed and gave up" + by;
    case FailureBroadcast::Kind::kStopped: return culprit + " called regroup";
    default: return culprit + " died" + by;
  }
}

}  // namespace

void Channel::check_usable(const char* call) const {
  if (left()) {
    throw Error(ErrorKind::destroyed, std::string(call) + ": the group is destroyed");
  }
  std::scoped_lock lock(dead_mutex_);
  if (dead_) {
    const bool for_good =
        dead_->kind() == ErrorKind::evicted || given_up_.load(std::memory_order_relaxed);
    throw Error(dead_->kind(),
                std::string(call) + ": the group failed earlier" +
                    (for_good ? ". "
                              : "; make a new one, or, where that is possible, call regroup on all "
                                "ranks that are left. ") +
                    "It failed with: " + dead_->what(),
                dead_->context());
  }
}

bool Channel::mark_dead(const Error& error, bool for_good) {
  std::scoped_lock lock(dead_mutex_);
  if (dead_ && !for_good) return false;
  dead_ = error;
  memory_->arena.hold_back();
  return true;
}

void Channel::die(const Error& error, bool for_good) {
  if (!mark_dead(error, for_good)) return;
  record_.failed();
  if (!logs(LogLevel::warn)) return;
  const ErrorContext& context = error.context();
  log(LogLevel::warn, rank_, "failure",
      {{"kind", name_of(error.kind())},
       {"peer", context.peer},
       {"stage", context.stage},
       {"generation", context.generation},
       {"what", error.what()}});
}

void Channel::give_up(const Error& error) {
  given_up_.store(true, std::memory_order_relaxed);  // read by this rank alone, in leave()
  die(error, true);
}

void Channel::fail(const char* stage, const std::string& reason, ErrorKind kind) {
  if (left()) return;  // who destroyed the group tells the peers so
  broadcast(FailureBroadcast::Kind::kFailed, rank_);
  const bool says_where = reason.find(stage) != std::string::npos;
  die(Error(kind, (says_where ? std::string() : std::string(stage) + ": ") + reason,
            {rank_, rank_, stage, generation(), 0, 0}));
}

bool Channel::leave() {
  {
    const std::scoped_lock lock(leaving_);
    if (left_.exchange(true, std::memory_order_acq_rel)) return false;
  }
  if (process_id() != owner_pid_)
    return false;  // a forked child: its parent is the rank, and stays
  broadcast(FailureBroadcast::Kind::kLeft, rank_);
  if (given_up_.load(std::memory_order_relaxed)) return false;
  say_left();
  return true;
}

FailureBroadcast Channel::broadcast(FailureBroadcast::Kind kind, int culprit) {
  return broadcast(kind, culprit, generation());
}

FailureBroadcast Channel::broadcast(FailureBroadcast::Kind kind, int culprit,
                                    Generation generation) {
  const FailureBroadcast told =
      broadcasts_.raise(reach_, kind, culprit, generation, since_.load(std::memory_order_relaxed));
  // Its waits look at once; in this domain they look before long.
  for (int peer = 0; peer < size_; ++peer) {
    if (own_word(peer, 0) == nullptr) memory_->fabric->send_text(peer, {});
  }
  return told;
}

bool Channel::unless_left(const std::function<void()>& say) {
  const std::scoped_lock lock(leaving_);
  if (left()) return false;
  say();
  return true;
}

void Channel::stop(bool ended) {
  if (dead()) return;
  // `generation()` also counts latency exchanges; beside calls no swap says which call it is of.
  const Generation none = since_.load(std::memory_order_relaxed);
  broadcast(FailureBroadcast::Kind::kStopped, rank_,
            ended && !beside_calls_ ? std::max(none, swapped_) : none);
  mark_dead(Error(ErrorKind::peer_failed,
                  rank_text(rank_) + ": regroup did not end: the group waits for another regroup",
                  {rank_, rank_, "regroup", generation(), 0, 0}),
            false);
}

void Channel::throw_violation(const char* stage, int peer, const std::string& what) {
  const std::string text = rank_text(rank_) + ": " + stage + " (generation " +
                           std::to_string(generation()) + "): " + rank_text(peer) + " " + what +
                           ". Its memory is damaged, or it runs another version of Ferry";
  fail(stage, text, ErrorKind::mismatch);
  throw Error(ErrorKind::mismatch, text, {rank_, peer, stage, generation(), 0, 0});
}

std::string Channel::whereabouts(std::initializer_list<int> ranks) const {
  std::string text;
  std::set<int> named;
  for (const int peer : ranks) {
    const auto call = call_of(peer);
    if (!call || !named.insert(peer).second) continue;
    text += text.empty() ? "; " : ", ";
    text += peer == rank_ ? "this rank" : rank_text(peer);
    text += std::string(waits(peer) ? " waits in " : " is in ") + to_string(*call);
  }
  return text;
}

void Channel::raise(const char* stage, const Status& status,
                    const std::optional<FailureBroadcast>& heard, std::chrono::nanoseconds waited) {
  ErrorContext context{rank_, status.peer, stage, generation(), status.expected, status.seen};
  const std::string where =
      rank_text(rank_) + ": " + stage + " (generation " + std::to_string(generation()) + "): ";
  ErrorKind kind = ErrorKind::peer_failed;
  std::string text;
  switch (status.code) {
    case Status::Code::kInterrupted:
      throw Error(ErrorKind::destroyed, where + "the group was destroyed during the exchange",
                  context);
    case Status::Code::kEvicted: throw_evicted(stage);
    case Status::Code::kDeadline: {
      kind = ErrorKind::deadline;
      context.peer = status.peer;
      const FailureBroadcast spread = broadcast(FailureBroadcast::Kind::kLate, context.peer);
      context.peer = spread.culprit;
      text = rank_text(context.peer) + " did not come within " + seconds(waited) + " (expected " +
             std::to_string(status.expected) + ", seen " + std::to_string(status.seen) + ")" +
             whereabouts({context.peer, rank_}) +
             ". Is it running, and does it make the same calls in the same order?";
      break;
    }
    case Status::Code::kPeerFailed:
      if (heard) {
        kind = kind_of(heard->kind);
        context.peer = heard->culprit;
        text = told(*heard, rank_) + ", seen after " + seconds(waited);
        if (heard->kind == FailureBroadcast::Kind::kLate) {
          text += whereabouts({context.peer, heard->reporter, rank_});
          if (context.peer == rank_) text += ". Was this rank stopped, or kept from the CPU?";
        }
        broadcast(heard->kind, context.peer);
      } else {
        broadcast(FailureBroadcast::Kind::kDied, context.peer);
        const bool near = memory_->fabric->pointer(context.peer, kControl) != nullptr;
        text = rank_text(context.peer) +
               (near ? " died: its process has ended"
                     : " died, or the network to it: it is not heard and takes nothing") +
               ", seen after " + seconds(waited);
      }
      break;
    default:
      kind = ErrorKind::mismatch;
      broadcast(FailureBroadcast::Kind::kFailed, rank_);
      text = rank_text(context.peer) + " is ahead: this rank was overtaken (expected " +
             std::to_string(status.expected) + ", seen " + std::to_string(status.seen) + ")";
      break;
  }
  if (kind == ErrorKind::peer_failed) memory_->fabric->forget(context.peer);
  const Error error(kind, where + text, context);
  die(error);
  throw error;
}

bool Channel::told_dead(int peer) const {
  return scan([peer](const FailureBroadcast& told) {
           return told.kind == FailureBroadcast::Kind::kDied && told.culprit == peer;
         })
      .has_value();
}

std::optional<Error> Channel::dead() const {
  std::scoped_lock lock(dead_mutex_);
  return dead_;
}

std::optional<Error> Channel::poll(const char* stage, const std::function<Generation()>& ended,
                                   const std::function<bool(int)>& awaits) {
  if (auto error = dead()) return error;
  int lost = -1;
  for (const int peer : ranks_) {
    if (peer == rank_ || lost >= 0) continue;
    if (memory_->fabric->peer_ends(peer) && awaits(peer)) lost = peer;
  }
  // After looking at the processes, as in GroupWatch.
  bool left_in_peace = false;
  const auto broadcast = scan([&](const FailureBroadcast& told) {
    if (told.reporter == rank_) return false;
    // Ranks that are not awaited may leave: those that have ended more calls than this rank, and
    // all while none runs here.
    const bool peace =
        told.kind == FailureBroadcast::Kind::kLeft &&
        (told.generation > ended() || (!awaits(told.reporter) && !awaits(told.culprit)));
    left_in_peace = left_in_peace || (peace && told.reporter == lost);
    return !peace;
  });
  if (!broadcast && (lost < 0 || left_in_peace)) return std::nullopt;
  if (broadcast && broadcast->kind == FailureBroadcast::Kind::kLeft) {
    // The news goes on with it: to a rank that has ended fewer calls, this rank owes nothing
    // either.
    const Generation mine = ended();
    if (mine != kUnknownEnd) count(mine);
  }
  try {
    Status status;
    status.code = Status::Code::kPeerFailed;
    status.peer = broadcast ? broadcast->culprit : lost;
    raise(stage, status, broadcast, std::chrono::nanoseconds(0));
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

Error Channel::late(const char* stage, int peer, std::uint64_t expected, std::uint64_t seen) {
  Status status;
  status.code = Status::Code::kDeadline;
  status.peer = peer;
  status.expected = expected;
  status.seen = seen;
  // A rank that waits itself is held up by another one.
  if (waits(peer)) {
    for (const int other : ranks_) {
      if (other == rank_ || own_word(other, 0) == nullptr || waits(other)) continue;
      status.peer = other;
      break;
    }
  }
  try {
    raise(stage, status, std::nullopt, config_.deadline);
  } catch (const Error& error) {
    return error;
  }
}

Error Channel::late_transfer(const char* call, int peer, const std::string& what,
                             std::chrono::nanoseconds waited) {
  const FailureBroadcast spread = broadcast(FailureBroadcast::Kind::kLate, peer);
  const std::string text =
      spread.culprit == peer
          ? rank_text(peer) + " did not " + what + " within " + seconds(waited) +
                ". Is it running, and does it make the call that belongs to this one?"
          : told(spread, rank_);
  const Error error(ErrorKind::deadline, rank_text(rank_) + ": " + call + ": " + text,
                    {rank_, spread.culprit, call, generation(), 0, 0});
  die(error);
  return error;
}

void Channel::throw_evicted(const char* stage) {
  const Error error(ErrorKind::evicted,
                    rank_text(rank_) + ": " + stage +
                        ": the other ranks called regroup and went on without this one, which was "
                        "late or seemed to be; its group cannot be used any more",
                    {rank_, -1, stage, generation(), 0, 0});
  die(error, true);
  throw error;
}

void Channel::check_evicted(const char* stage) {
  if (evicted() != 0) throw_evicted(stage);
}

void Channel::beat(bool waiting) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
  // relaxed: a time stamp for the peers' blame; nothing is read on the strength of it.
  std::atomic_ref(*own_word(rank_, 0))
      .store(waiting ? static_cast<std::uint64_t>(now) : 0, std::memory_order_relaxed);
}

}  // namespace ferry::engine

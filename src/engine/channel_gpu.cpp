// What a channel does for an engine whose waits run on a GPU: the CPU only looks after the peers.
#include <atomic>
#include <chrono>

#include "engine/channel.hpp"

namespace ferry::engine {
namespace {

using protocol::FailureBroadcast;
using protocol::Status;

}  // namespace

std::optional<Error> Channel::dead() const {
  std::scoped_lock lock(dead_mutex_);
  return dead_;
}

std::optional<Error> Channel::look(const char* stage, const std::function<Generation()>& ended,
                                   const std::function<bool(int)>& awaits) {
  if (auto error = dead()) return error;
  int lost = -1;
  for (int peer = 0; peer < size_ && lost < 0; ++peer) {
    if (peer == rank_) continue;
    if (memory_->fabric->peer_state(peer) == fabric::PeerState::dead && awaits(peer)) lost = peer;
  }
  // After looking at the processes, as in GroupWatch.
  bool left_in_peace = false;
  const auto broadcast = broadcasts_.scan([&](const FailureBroadcast& told) {
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
    for (int other = 0; other < size_; ++other) {
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

void Channel::beat(bool waiting) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
  // relaxed: a time stamp for the peers' blame; nothing is read on the strength of it.
  std::atomic_ref(*own_word(rank_, 0))
      .store(waiting ? static_cast<std::uint64_t>(now) : 0, std::memory_order_relaxed);
}

}  // namespace ferry::engine

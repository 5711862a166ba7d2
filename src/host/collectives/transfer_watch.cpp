// What a rank with transfers under way can see of its peers: who has died, left, or is late.
#include <algorithm>
#include <string>

#include "host/collectives/point_to_point.hpp"
#include "platform/death_watch.hpp"

namespace ferry::host {
namespace {

/// A network may bring the news that a rank left before the last packets of that rank.
constexpr std::chrono::nanoseconds kLastPackets = std::chrono::seconds(1);
/// For a rank of another domain to say who holds it up.
constexpr std::chrono::nanoseconds kUnseenGrace = std::chrono::milliseconds(500);

}  // namespace

void PointToPoint::look_after_peers() {
  last_look_ = Clock::now();
  deaths_ = DeathWatch::count();
  if (open_.empty()) return;
  engine::Channel& channel = engine_->channel();
  const Transfer& first = *open_.front();
  const auto since = std::max(first.start, peers_[index(first.peer)].data_moved);
  channel.beat_transfers(first.peer, last_look_ - since);
  std::optional<Error> error;
  if (channel.left()) {
    error = Error(ErrorKind::destroyed, "send, recv: the group is destroyed");
  } else {
    error = channel.poll(
        open_.front()->call(), [] { return engine::Channel::kUnknownEnd; },
        [this](int rank) { return is_gone(rank); });
  }
  if (!error) error = late();
  if (!error) return;
  step();  // what came before counts
  fail_all(KeptError::of(*error));
}

/// Of a rank that has died or left: whether a transfer with it cannot end any more.
bool PointToPoint::is_gone(int rank) {
  Peer& peer = peers_[index(rank)];
  if (peer.open == 0) return false;
  step();  // what it sent before may end the last transfer with it
  if (peer.open == 0) return false;
  if (engine_->topology().together(rank, engine_->rank())) return true;
  if (engine_->channel().gone(rank)) return true;
  if (!peer.left_since) peer.left_since = last_look_;
  return last_look_ - *peer.left_since >= kLastPackets;
}

std::optional<Error> PointToPoint::late() {
  const auto deadline = engine_->config().deadline;
  for (const Held& transfer : open_) {
    // Data that move, of this transfer or of those before it, begin the wait anew.
    const Peer& peer = peers_[index(transfer->peer)];
    if (transfer->accepted && last_look_ < peer.data_moved + deadline) continue;
    if (last_look_ < transfer->deadline || extended(*transfer)) continue;
    const std::string what = std::string(transfer->sends ? "receive" : "send") + " " +
                             std::to_string(transfer->bytes) + " bytes (tag " +
                             std::to_string(transfer->tag) + ")";
    return engine_->channel().late_transfer(transfer->call(), transfer->peer, what,
                                            last_look_ - transfer->start);
  }
  return std::nullopt;
}

/// Once: a peer that waits for transfers itself may be held up by another rank, and knows by whom.
bool PointToPoint::extended(Transfer& transfer) const {
  if (transfer.extended) return false;
  transfer.extended = true;
  const auto deadline = engine_->config().deadline;
  if (engine_->topology().together(transfer.peer, engine_->rank())) {
    if (!engine_->channel().transfers(transfer.peer)) return false;
    transfer.deadline += deadline;
  } else if (engine_->channel().held_up(transfer.peer)) {
    transfer.deadline += deadline;
  } else {
    transfer.deadline += std::min(deadline / 4, kUnseenGrace);
  }
  return true;
}

}  // namespace ferry::host

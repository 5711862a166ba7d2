// Between domains, ranks that rejoin: what the kernels tell each other, and what becomes of
// everything that is still on its way when they have agreed.
#include "cuda/latency/proxy/crossing.hpp"

namespace ferry::cuda {
namespace {

constexpr CrossingKind kKinds[kCrossingKinds]{CrossingKind::rows, CrossingKind::weights,
                                              CrossingKind::sums};

/// In a flag of `generation`, on the line of its half.
constexpr std::uint64_t rejoined_flag(Generation generation) {
  return generation << kCrossingShift | kRejoined;
}

}  // namespace

bool LatencyCrossing::forward_rejoin(Peer& peer) {
  bool active = forward_rejoin(peer, v_.layout.offers, protocol::Channel::kOffer, peer.offered);
  active |= forward_rejoin(peer, v_.layout.answers, protocol::Channel::kAnswer, peer.answered);
  return active;
}

bool LatencyCrossing::forward_rejoin(Peer& peer, std::size_t lines, protocol::Channel channel,
                                     std::uint64_t& told) {
  const std::uint64_t word = load_word(LatencyPlaces::line_of(outbox(), lines, peer.rank));
  if (word <= told) return false;
  told = word;
  if (peer.dead) return true;
  parts_.reach.publish(peer.rank, {there(LatencyPlaces::line_of(inbox(), lines, rank_)), word,
                                   make_tag(channel, word), 0});
  return true;
}

/// The kernel has rejoined: it makes dispatches after the agreed generation, and waits for such.
bool LatencyCrossing::follow_rejoin() {
  const std::uint64_t word = load_word(LatencyPlaces{v_, 0}.rejoined(inbox()));
  if (word == rejoined_) return false;
  rejoined_ = word;
  for (Peer& peer : peers_) leave_behind(peer);
  return true;
}

/// Every line in which a peer is told of puts gets one word more, behind all before it: when the
/// peer sees them, nothing of this rank is on its way there. No dispatch is half put: its kernel
/// had ended when the offer crossed.
void LatencyCrossing::leave_behind(Peer& peer) {
  const Generation agreed = generation_in(rejoined_);
  for (const Generation g : {agreed - 1, agreed}) {
    const std::size_t half = g % 2;
    if (!peer.dead) cut_sums(peer, half);
    for (const CrossingKind kind : kKinds) {
      if (!peer.dead) tell(peer, kind, g, kRejoined, 0);
    }
    peer.out[half] = peer.in[half] = {g, {}};
    for (auto* ways : {&peer.weights_out, &peer.weights_in, &peer.sums_out, &peer.sums_in}) {
      (*ways)[half] = {};
      (*ways)[half].flagged = g;
    }
  }
  peer.dispatch = {};
  peer.sent = agreed;
  peer.gone_word = round_of(rejoined_) << kRejoinShift;  // the kernel has taken its masks back
  peer.settled = false;
}

/// Once the peer has rejoined, too, and all that it sent before has landed. A word of a later
/// rejoin does not count: this rank's kernel is in that one, then, or has missed it.
bool LatencyCrossing::settle(Peer& peer) {
  const Generation agreed = generation_in(rejoined_);
  for (const Generation g : {agreed - 1, agreed}) {
    for (const CrossingKind kind : kKinds) {
      if (load_word(flag(kind, g % 2, peer.rank)) != rejoined_flag(g)) return false;
    }
  }
  for (const Generation g : {agreed - 1, agreed}) {
    acknowledge(peer, CrossingKind::weights, g);
    acknowledge(peer, CrossingKind::sums, g);
  }
  peer.came = agreed;
  peer.settled = true;
  return true;
}

}  // namespace ferry::cuda

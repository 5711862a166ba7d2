// What crosses between domains, in both directions: the rounds of the proxy, credits, masks, and
// what becomes of everything that is still on its way when ranks rejoin.
#include "cuda/latency/proxy/crossing.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "core/number/quantize.hpp"

namespace ferry::cuda {

namespace {

constexpr CrossingKind kKinds[kCrossingKinds]{CrossingKind::rows, CrossingKind::weights,
                                              CrossingKind::sums};

/// In a flag of `generation`, on the line of its parity.
constexpr std::uint64_t rejoined_flag(Generation generation) {
  return generation << kCrossingShift | kRejoined;
}

}  // namespace

LatencyCrossing::LatencyCrossing(CrossingParts parts)
    : parts_(std::move(parts)), v_(parts_.view), rank_(v_.group.rank) {
  for (const int rank : parts_.beyond) {
    Peer& peer = peers_.emplace_back();
    peer.rank = rank;
  }
}

/// What has come goes first: kernels wait for it.
bool LatencyCrossing::poll() {
  bool active = follow_rejoin();
  for (Peer& peer : peers_) {
    active |= take_mask(peer);
    if (!peer.settled) active |= settle(peer);
    if (peer.settled) active |= take_dispatch(peer);
    for (std::size_t parity = 0; parity < 2 && peer.settled; ++parity) {
      active |= take_weights(peer, parity);
      active |= take_sums(peer, parity);
    }
    for (std::size_t parity = 0; parity < 2; ++parity) {
      active |= send_weights(peer, parity);
      active |= send_sums(peer, parity);
    }
    // Sums of a peer for a dispatch would take the place of its word that it has rejoined.
    if (peer.settled) active |= send_dispatch(peer);
    active |= forward_credit(peer);
    active |= forward_mask(peer);
    active |= forward_rejoin(peer);
  }
  return active;
}

/// A result that was dropped unread is free when its rows have landed, no sooner.
bool LatencyCrossing::forward_credit(Peer& peer) {
  const LatencyPlaces at{v_, 0};
  const std::uint64_t upto = std::min(load_word(at.released(outbox(), peer.rank)), peer.came);
  if (upto <= peer.released) return false;
  peer.released = upto;
  parts_.reach.publish(peer.rank, {there(at.released(inbox(), rank_)), upto,
                                   make_tag(protocol::Channel::kCredit, upto), 0});
  return true;
}

/// A mask comes and goes, and what crosses must grow: the number of the change stands above it, and
/// above that the round of the last rejoin, for masks of before do not count.
bool LatencyCrossing::forward_mask(Peer& peer) {
  const std::uint32_t now = load_word(LatencyPlaces{v_, 0}.gone(outbox(), peer.rank));
  if (now == (peer.gone_word & 3)) return false;
  peer.gone_word = ((peer.gone_word >> 2) + 1) << 2 | (now & 3);
  parts_.reach.publish(peer.rank, {there(mask_line(rank_)), peer.gone_word,
                                   make_tag(protocol::Channel::kMask, peer.gone_word), 0});
  return true;
}

bool LatencyCrossing::take_mask(Peer& peer) {
  const std::uint64_t word = load_word(mask_line(peer.rank));
  if (word == peer.gone_seen) return false;
  // Once this rank has offered, its kernel may take masks back at any moment.
  if (round_of(peer.offered) != round_of(rejoined_)) return false;
  peer.gone_seen = word;
  if (round_of(word) != round_of(rejoined_)) return true;
  const bool masked = (word & 3) == static_cast<std::uint32_t>(Gone::without_us);
  if (peer.dead) return true;
  store_word(LatencyPlaces{v_, 0}.gone(inbox(), peer.rank),
             static_cast<std::uint32_t>(masked ? Gone::without_us : Gone::no));
  return true;
}

void LatencyCrossing::look_after_peers() {
  for (Peer& peer : peers_) {
    if (peer.dead || !parts_.is_gone || !parts_.is_gone(peer.rank)) continue;
    peer.dead = true;
    store_word(LatencyPlaces{v_, 0}.gone(inbox(), peer.rank),
               static_cast<std::uint32_t>(Gone::dead));
  }
}

std::size_t LatencyCrossing::row_bytes(std::uint32_t format) const {
  const auto hidden = static_cast<std::size_t>(v_.hidden);
  const bool plain = (format & 0xff) == static_cast<std::uint32_t>(LatencyFormat::as_is);
  return plain ? hidden * size_of(v_.dtype)
               : v_.layout.scale_at + scale_count(hidden) * sizeof(float);
}

// Places of the words between proxies.

std::uint64_t* LatencyCrossing::flag(CrossingKind kind, std::size_t parity, int source) const {
  const std::size_t line = static_cast<std::size_t>(kind) * 2 + parity;
  return LatencyPlaces::line_of(parts_.data, parts_.layout.flags,
                                static_cast<int>(line) * v_.group.ranks + source);
}
std::uint64_t* LatencyCrossing::acknowledged(CrossingKind kind, std::size_t parity,
                                             int rank) const {
  const std::size_t line = static_cast<std::size_t>(kind) * 2 + parity;
  return LatencyPlaces::line_of(parts_.data, parts_.layout.acknowledged,
                                static_cast<int>(line) * v_.group.ranks + rank);
}
std::uint64_t* LatencyCrossing::mask_line(int rank) const {
  return LatencyPlaces::line_of(parts_.data, parts_.layout.masks, rank);
}
float* LatencyCrossing::weights_of(std::size_t parity, int source) const {
  const auto slots = static_cast<std::size_t>(v_.capacity) * static_cast<std::size_t>(v_.topk);
  const std::size_t block =
      parity * static_cast<std::size_t>(v_.group.ranks) + static_cast<std::size_t>(source);
  return reinterpret_cast<float*>(parts_.data + parts_.layout.weights) + block * slots;
}

std::uint64_t LatencyCrossing::tag(CrossingKind kind, Generation generation) {
  switch (kind) {
    case CrossingKind::rows: return make_tag(protocol::Channel::kArrival, generation);
    case CrossingKind::weights: return make_tag(protocol::Channel::kAnnounced, generation);
    case CrossingKind::sums: break;
  }
  return make_tag(protocol::Channel::kDelivery, generation);
}

/// All that belongs to `generation` is put: `bytes`.
void LatencyCrossing::tell(const Peer& peer, CrossingKind kind, Generation generation,
                           std::uint32_t what, std::uint64_t bytes) {
  parts_.reach.publish(
      peer.rank, {there(flag(kind, generation % 2, rank_)), generation << kCrossingShift | what,
                  tag(kind, generation), bytes});
}

void LatencyCrossing::acknowledge(const Peer& peer, CrossingKind kind, Generation generation) {
  parts_.reach.publish(peer.rank, {there(acknowledged(kind, generation % 2, rank_)), generation,
                                   make_tag(protocol::Channel::kLoan, generation), 0});
}

/// Whether what the peer was sent into this buffer before has landed.
bool LatencyCrossing::may_put(const Peer& peer, CrossingKind kind, const Way& way,
                              Generation generation) const {
  return load_word(acknowledged(kind, generation % 2, peer.rank)) >= way.flagged;
}

void LatencyCrossing::throw_violation(const Peer& peer, const std::string& what) const {
  if (parts_.violation) parts_.violation(peer.rank, what);
  throw std::runtime_error("rank " + std::to_string(peer.rank) + " " + what);
}

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
    const std::size_t parity = g % 2;
    if (!peer.dead) cut_sums(peer, parity);
    for (const CrossingKind kind : kKinds) {
      if (!peer.dead) tell(peer, kind, g, kRejoined, 0);
    }
    peer.out[parity] = peer.in[parity] = {g, {}};
    for (auto* ways : {&peer.weights_out, &peer.weights_in, &peer.sums_out, &peer.sums_in}) {
      (*ways)[parity] = {};
      (*ways)[parity].flagged = g;
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

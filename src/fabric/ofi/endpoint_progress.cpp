// What an endpoint does whenever somebody looks at its network: completions, what arrives, signs of
// life.
#include <algorithm>
#include <array>

#include "fabric/ofi/endpoint.hpp"

namespace ferry::fabric::ofi {
namespace {

constexpr auto kBeat = std::chrono::milliseconds(100);
/// A peer that is silent and takes nothing, not even a first message, for so long; and one that has
/// taken something before: its connection was closed.
constexpr std::chrono::nanoseconds kRefused = std::chrono::milliseconds(400);
constexpr std::chrono::nanoseconds kClosed = std::chrono::milliseconds(150);
/// So often this is polled.
constexpr std::chrono::nanoseconds kLossPollPeriod = std::chrono::milliseconds(20);
/// A peer that leaves unanswered that this rank leaves, with nothing under way to it.
constexpr std::chrono::nanoseconds kGoodbye = std::chrono::seconds(1);
/// More time for peers that this rank may have to blame itself for: others tell meanwhile.
constexpr std::chrono::nanoseconds kIsolatedGrace = std::chrono::seconds(1);
constexpr std::size_t kBatch = 32;
}  // namespace

bool Endpoint::progress(Clock::time_point now) {
  now_ = now;
  bool any = read_completions();
  for (std::size_t waiting = refused_receives_.size(); waiting-- > 0;) {
    Op* op = refused_receives_.front();
    refused_receives_.pop_front();
    receive(op);
  }
  for (int rank = 0; rank < setting_.size; ++rank) {
    if (!peer_of(rank).linked) continue;
    send_held(rank);
    if (!peer_of(rank).backlog.empty()) any = post_backlog(peer_of(rank)) || any;
  }
  if (now - last_beat_ >= kLossPollPeriod) {
    last_beat_ = now;
    beat(now);
  }
  return any;
}

bool Endpoint::read_completions() {
  std::array<fi_cq_data_entry, kBatch> entries;
  const ssize_t got = fi_cq_read(fi_endpoint_.cq(), entries.data(), entries.size());
  if (got == -FI_EAVAIL) {
    std::array<std::byte, 256> why{};
    fi_cq_err_entry entry{};
    entry.err_data = why.data();
    entry.err_data_size = why.size();
    if (fi_cq_readerr(fi_endpoint_.cq(), &entry, 0) > 0) failed(entry);
    return true;
  }
  for (ssize_t i = 0; i < got; ++i) complete(entries[static_cast<std::size_t>(i)]);
  return got > 0;
}

void Endpoint::complete(const fi_cq_data_entry& entry) {
  if ((entry.flags & FI_REMOTE_CQ_DATA) != 0 && (entry.flags & FI_RECV) == 0) {
    piece(entry.data);
    return;
  }
  auto* op = static_cast<Op*>(entry.op_context);
  if (op == nullptr) return;
  if (op->kind == OpKind::receive) {
    std::span<const std::byte> rest(op->buffer.data, std::min(entry.len, kMessageRoom));
    while (const auto came = message_in(rest)) {
      message(*came, rest.data() + sizeof(Message));
      rest = rest.subspan(sizeof(Message) + came->payload);
    }
    receive(op);
    return;
  }
  Peer& peer = *op->peer;
  peer.under_way--;
  peer.moved = now_;
  recycle(op);
}

void Endpoint::failed(const fi_cq_err_entry& entry) {
  auto* op = static_cast<Op*>(entry.op_context);
  if (op == nullptr) return;  // of what a stranger tried
  if (op->kind == OpKind::receive) {
    if (entry.err != FI_ECANCELED) receive(op);  // a stranger's message was too long
    return;
  }
  Peer& peer = *op->peer;
  peer.under_way--;
  recycle(op);
  // The transport is reliable: what failed is lost, and with it every signal that counts it.
  lose(peer);
}

void Endpoint::receive(Op* op) {
  const ssize_t code = fi_recv(fi_endpoint_.ep(), op->buffer.data, kMessageRoom, op->buffer.desc,
                               FI_ADDR_UNSPEC, &op->context);
  if (code == 0) return;
  if (code == -FI_EAGAIN) {
    refused_receives_.push_back(op);
  } else {
    recycle(op);  // one receive fewer: the endpoint is closing
  }
}

void Endpoint::piece(std::uint64_t data) {
  const int source = source_of(data);
  if (source >= setting_.size || !peer_of(source).linked) return;
  Peer& peer = peer_of(source);
  const std::uint32_t stream = stream_of(data);
  const std::uint64_t expected = piece_data(peer.from_key, source, stream);
  const bool wide = fi_endpoint_.info().domain_attr->cq_data_size >= sizeof data;
  if (data != (wide ? expected : expected & 0xffffffffull)) return;  // not of this job
  heard_from(peer);
  arrivals_.piece(source, stream & kStreamMask);
  if ((stream & kWithCompanion) != 0) {
    arrivals_.piece(source, (stream & kStreamMask) | kCompanion);
  }
}

void Endpoint::message(const Message& message, const std::byte* payload) {
  const int source = message.source;
  if (source < 0 || source >= setting_.size || source == setting_.rank) return;
  if (is_link_message(message)) {  // before the source is linked, or after
    return arrivals_.take_link_message(
        source, message.value,
        {{message.sequence, message.pieces}, {payload, payload + message.payload}});
  }
  Peer& peer = peer_of(source);
  if (!peer.linked) return;
  if (message.way_key != peer.from_key) return;  // not of this job
  heard_from(peer);
  switch (message.kind) {
    case MessageKind::signal: arrivals_.signal(message, payload); break;
    case MessageKind::forecast: arrivals_.forecast(message); break;
    case MessageKind::text: arrivals_.text(source, {payload, message.payload}); break;
    case MessageKind::cancel: arrivals_.cancel(message); break;
    case MessageKind::fence: arrivals_.fence(source, message.value, message.pieces); break;
    case MessageKind::fenced: arrivals_.fenced(source, message.value); break;
    case MessageKind::beat:
    case MessageKind::link_message: break;
    case MessageKind::bye:
      peer.left = true;
      send_message(source, {.kind = MessageKind::bye_seen}, nullptr);
      room_.notify_all();
      break;
    case MessageKind::bye_seen:
      peer.bye_seen = true;
      room_.notify_all();
      break;
  }
}

/// They go by the first endpoints of the first set.
bool Endpoint::is_link_message(const Message& message) const {
  return message.kind == MessageKind::link_message &&
         message.way_key ==
             make_way_key(job_since(job_, message.value), message.source, setting_.rank, 0);
}

void Endpoint::heard_from(Peer& peer) {
  peer.spoke = true;
  // relaxed: a time stamp by itself.
  peer.heard.store(now_.time_since_epoch().count(), std::memory_order_relaxed);
}

bool Endpoint::is_lost(const Peer& peer, Clock::time_point now) const {
  const bool stuck = peer.under_way > 0 || !peer.backlog.empty();
  const auto still = now - peer.moved;
  if (stuck && still > setting_.deadline) {
    return still > setting_.deadline + kIsolatedGrace || !setting_.several || !isolated();
  }
  // A provider hides that a peer's process has ended: it connects again, for ever, and has no room
  // meanwhile. With nothing under way there is room wherever there is a connection.
  const auto silent =
      now.time_since_epoch() - std::chrono::nanoseconds(peer.heard.load(std::memory_order_relaxed));
  const auto limit = peer.told == Clock::time_point() ? kRefused : kClosed;
  return peer.spoke && peer.under_way == 0 && !peer.backlog.empty() && still > limit &&
         silent > limit;
}

/// Tells peers that heard nothing lately that this rank is alive; loses those that take nothing.
void Endpoint::beat(Clock::time_point now) {
  for (int rank = 0; rank < setting_.size; ++rank) {
    Peer& peer = peer_of(rank);
    if (!peer.linked || peer.lost.load()) continue;
    if (is_lost(peer, now)) {
      lose(peer);
      continue;
    }
    const bool stuck = peer.under_way > 0 || !peer.backlog.empty();
    const bool quiet = now - peer.told >= kBeat && !stuck;
    // Every endpoint's first one connects: a farewell on a way that was never used would be lost.
    const bool first = peer.told == Clock::time_point();
    if ((setting_.beats || first) && quiet && !peer.left.load()) {
      send_message(rank, {.kind = MessageKind::beat}, nullptr);
    }
  }
}

/// Whether all peers have what was sent and know that this rank leaves since `start`, or will
/// never say so: those that take nothing are lost at the deadline.
bool Endpoint::all_said_goodbye(Clock::time_point start) const {
  for (int rank = 0; rank < setting_.size; ++rank) {
    const Peer& peer = peer_of(rank);
    if (!peer.linked || peer.gone()) continue;
    // One that ended while it asked to join never took or said anything.
    const bool unheard = !peer.spoke && peer.under_way == 0;
    if (!unheard && (peer.under_way > 0 || !peer.backlog.empty())) return false;
    // relaxed: a time stamp by itself.
    const Clock::time_point heard{
        std::chrono::nanoseconds(peer.heard.load(std::memory_order_relaxed))};
    const auto last = std::max({start, peer.moved, heard});
    if (!peer.bye_seen && Clock::now() - last < kGoodbye) return false;
  }
  return true;
}

}  // namespace ferry::fabric::ofi

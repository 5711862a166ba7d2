#include "bootstrap/store_server.hpp"

#include <algorithm>
#include <utility>

namespace ferry::bootstrap {

StoreServer::StoreServer(Config config)
    : config_(std::move(config)), members_(std::size_t(config_.size)) {
  if (config_.pending_at_most == 0) config_.pending_at_most = std::size_t(config_.size) + 64;
}

FrameHeader StoreServer::header(FrameType type, int rank) const {
  return {.type = type, .sequence = round_, .rank = std::uint32_t(rank)};
}

StoreServer::Connection StoreServer::open(TimePoint now) {
  now_ = now;
  const Connection id = next_++;
  peers_[id].due = now + config_.handshake;
  return id;
}

StoreServer::Connection StoreServer::open_own() {
  const Connection id = open(now_);
  peers_[id].due = TimePoint::max();
  peers_[id].own = true;
  return id;
}

std::optional<StoreServer::Connection> StoreServer::surplus() const {
  struct Kind {
    Connection oldest = 0;
    std::size_t count = 0;
  } silent, spoke;
  for (const auto& [id, peer] : peers_) {
    if (!peer.pending()) continue;
    Kind& kind = peer.phase == Phase::fresh ? silent : spoke;
    if (kind.count++ == 0) kind.oldest = id;
  }
  for (const Kind& kind : {silent, spoke}) {
    if (kind.count > config_.pending_at_most) return kind.oldest;
  }
  return std::nullopt;
}

std::size_t StoreServer::pending() const {
  return std::size_t(std::count_if(peers_.begin(), peers_.end(),
                                   [](const auto& p) { return p.second.pending(); }));
}

void StoreServer::receive(Connection id, std::span<const std::byte> bytes) {
  const auto found = peers_.find(id);
  if (found == peers_.end()) return;
  Peer& peer = found->second;
  while (!bytes.empty() && peer.listening()) {
    bytes = bytes.subspan(peer.parser.feed(bytes));
    if (peer.parser.error() != FrameError::none) return on_bad_frame(peer);
    count_announced(peer);
    if (std::optional<Frame> frame = peer.parser.take()) on_frame(id, peer, std::move(*frame));
  }
}

// What the ranks announce is bounded before it arrives, together with what they gave already.
void StoreServer::count_announced(Peer& peer) {
  if (peer.phase != Phase::joined) return;
  announced_ -= peer.announced;
  peer.announced = peer.parser.announced();
  announced_ += peer.announced;
  const std::size_t together = announced_ + given_bytes_;
  if (together <= kMaxGatherBytes) return;
  fail({.kind = FailureKind::too_much,
        .peer = std::uint32_t(peer.rank),
        .expected = kMaxGatherBytes,
        .got = together});
  gone(peer);
}

void StoreServer::on_bad_frame(Peer& peer) {
  if (peer.phase == Phase::joined) {
    fail({.kind = FailureKind::broken_frame, .peer = std::uint32_t(peer.rank)});
    gone(peer);
  } else if (peer.parser.error() == FrameError::bad_version) {
    refuse(peer, {.code = RefusalCode::other_version,
                  .expected = kStoreVersion,
                  .got = peer.parser.seen_version()});
  } else {
    drop(peer);
  }
}

void StoreServer::on_frame(Connection id, Peer& peer, Frame frame) {
  const FrameType type = frame.header.type;
  if (peer.phase == Phase::fresh && type == FrameType::hello) return on_hello(peer, frame);
  if (peer.phase == Phase::challenged && type == FrameType::proof) return on_proof(id, peer, frame);
  if (peer.phase != Phase::joined) return drop(peer);
  if (type == FrameType::give && frame.header.rank == std::uint32_t(peer.rank)) {
    return on_give(peer, std::move(frame));
  }
  if (type == FrameType::ask) return on_ask(peer);
  if (type == FrameType::goodbye) return on_goodbye(peer, frame);
  fail({.kind = FailureKind::broken_frame, .peer = std::uint32_t(peer.rank)});
  gone(peer);
}

void StoreServer::on_hello(Peer& peer, const Frame& frame) {
  const std::optional<Hello> hello = decode_hello(frame.payload);
  if (!hello) return drop(peer);
  peer.transcript = {.size = hello->size,
                     .rank = frame.header.rank,
                     .client = hello->nonce,
                     .store = config_.nonce()};
  peer.phase = Phase::challenged;
  const Nonce& nonce = peer.transcript.store;
  peer.output.push(header(FrameType::challenge),
                   std::vector<std::byte>(nonce.begin(), nonce.end()));
}

void StoreServer::on_proof(Connection id, Peer& peer, const Frame& frame) {
  const Proofs proofs = prove(config_.secret, peer.transcript);
  Digest said{};
  std::copy_n(frame.payload.begin(), said.size(), said.begin());
  // The secret comes first: a stranger learns nothing about the job.
  if (!same_digest(said, proofs.client)) {
    return refuse(peer, {.code = RefusalCode::wrong_secret});
  }
  if (const auto refusal = reason_to_refuse(peer.transcript)) return refuse(peer, *refusal);
  peer.phase = Phase::joined;
  peer.rank = int(peer.transcript.rank);
  members_[std::size_t(peer.rank)] = {.presence = Presence::here, .connection = id};
  peer.output.push(header(FrameType::welcome, peer.rank),
                   std::vector<std::byte>(proofs.store.begin(), proofs.store.end()));
  peer.parser.authenticate(proofs.to_store);
  peer.output.authenticate(proofs.to_client);
}

std::optional<Refusal> StoreServer::reason_to_refuse(const Transcript& who) const {
  const auto size = std::uint64_t(config_.size);
  if (who.size != size) {
    return Refusal{.code = RefusalCode::other_size, .expected = size, .got = who.size};
  }
  if (who.rank >= size) {
    return Refusal{.code = RefusalCode::rank_out_of_range, .expected = size, .got = who.rank};
  }
  const Presence presence = members_[who.rank].presence;
  if (presence == Presence::here) return Refusal{.code = RefusalCode::rank_taken, .got = who.rank};
  if (presence == Presence::gone) return Refusal{.code = RefusalCode::rank_gone, .got = who.rank};
  if (failure_) {
    return Refusal{.code = RefusalCode::group_over,
                   .expected = std::uint64_t(failure_->kind),
                   .got = failure_->kind == FailureKind::deadline ? failure_->by : failure_->peer};
  }
  return std::nullopt;
}

void StoreServer::refuse(Peer& peer, const Refusal& refusal) {
  ++refused_;
  last_refusal_ = refusal.code;
  peer.output.push(header(FrameType::refused), encode(refusal));
  peer.phase = Phase::ending;  // its handshake's deadline still holds
}

void StoreServer::on_give(Peer& peer, Frame frame) {
  if (failure_) return;  // the rank has been told
  Member& member = members_[std::size_t(peer.rank)];
  if (frame.header.sequence != round_ || member.given) {
    return fail({.kind = FailureKind::wrong_sequence,
                 .peer = std::uint32_t(peer.rank),
                 .expected = round_ + (member.given ? 1 : 0),
                 .got = frame.header.sequence});
  }
  if (left_ >= 0) return fail({.kind = FailureKind::left, .peer = std::uint32_t(left_)});
  given_bytes_ += frame.payload.size();
  if (given_bytes_ > kMaxGatherBytes) {
    return fail({.kind = FailureKind::too_much,
                 .peer = std::uint32_t(peer.rank),
                 .expected = kMaxGatherBytes,
                 .got = given_bytes_});
  }
  member.given = std::make_shared<const SharedPayload>(std::move(frame.payload));
  if (++given_ == members_.size()) finish_round();
}

void StoreServer::finish_round() {
  for (const Member& to : members_) {
    Peer& peer = peers_.at(to.connection);
    for (std::size_t source = 0; source < members_.size(); ++source) {
      peer.output.push_shared(header(FrameType::part, int(source)), members_[source].given);
    }
  }
  for (Member& member : members_) member.given.reset();
  given_ = 0;
  given_bytes_ = 0;
  ++round_;
}

void StoreServer::on_ask(Peer& peer) {
  // While answers are on their way there is nothing to add, and the queue stays bounded.
  if (!peer.output.empty() || failure_) return;
  peer.output.push(header(FrameType::missing), encode(absences()));
}

void StoreServer::on_goodbye(Peer& peer, const Frame& frame) {
  const Farewell farewell = decode_farewell(frame.payload).value_or(Farewell::left);
  const auto rank = std::uint32_t(peer.rank);
  if (left_ < 0) left_ = peer.rank;
  const Absences now = absences();
  if (farewell == Farewell::interrupted && waiting()) {
    fail({.kind = FailureKind::interrupted, .peer = rank});
  } else if (farewell == Farewell::deadline && waiting() && now.any()) {
    fail({.kind = FailureKind::deadline,
          .peer = std::uint32_t(now.first()),
          .by = rank,
          .absences = now});
  } else if (waiting()) {
    fail({.kind = FailureKind::left, .peer = rank});
  }
  gone(peer);
}

void StoreServer::end_of_stream(Connection id) {
  const auto found = peers_.find(id);
  if (found == peers_.end()) return;
  Peer& peer = found->second;
  if (peer.phase == Phase::joined) {
    fail({.kind = FailureKind::died, .peer = std::uint32_t(peer.rank)});
    gone(peer);
  }
  drop(peer);
}

// Everyone hears the first reason; later ones are its consequences.
void StoreServer::fail(const Failure& failure) {
  if (failure_) return;
  failure_ = failure;
  const auto payload = std::make_shared<const SharedPayload>(encode(failure));
  for (auto& [id, peer] : peers_) {
    if (peer.phase == Phase::joined) peer.output.push_shared(header(FrameType::failed), payload);
  }
}

Absences StoreServer::absences() const {
  Absences out;
  out.refused = refused_;
  out.last_refusal = last_refusal_;
  for (std::size_t r = 0; r < members_.size(); ++r) {
    if (members_[r].given) continue;
    (members_[r].presence == Presence::here ? out.silent : out.absent).add(int(r));
  }
  return out;
}

// No more words: what is unsent goes with the connection.
void StoreServer::drop(Peer& peer) {
  peer.phase = Phase::dropped;
  peer.output.clear();
}

// A member goes; what it must still hear stays in its queue.
void StoreServer::gone(Peer& peer) {
  members_[std::size_t(peer.rank)].presence = Presence::gone;
  announced_ -= std::exchange(peer.announced, 0);
  peer.phase = Phase::ending;
  peer.due = now_ + config_.handshake;
}

std::span<const std::byte> StoreServer::output(Connection id) const {
  const auto found = peers_.find(id);
  return found == peers_.end() ? std::span<const std::byte>() : found->second.output.front();
}

void StoreServer::written(Connection id, std::size_t n) {
  const auto found = peers_.find(id);
  if (found != peers_.end()) found->second.output.written(n);
}

StoreServer::Fate StoreServer::fate(Connection id) const {
  const auto found = peers_.find(id);
  if (found == peers_.end() || found->second.phase == Phase::dropped) return Fate::dropped;
  return found->second.phase == Phase::ending ? Fate::ending : Fate::open;
}

void StoreServer::forget(Connection id) {
  end_of_stream(id);
  peers_.erase(id);
}

void StoreServer::tick(TimePoint now) {
  now_ = now;
  for (auto& [id, peer] : peers_) {
    if (peer.phase != Phase::joined && peer.due <= now) drop(peer);
  }
}

std::optional<StoreServer::TimePoint> StoreServer::next_tick() const {
  std::optional<TimePoint> next;
  for (const auto& [id, peer] : peers_) {
    if (peer.phase != Phase::joined && (!next || peer.due < *next)) next = peer.due;
  }
  return next;
}

void StoreServer::close() {
  if (waiting()) fail({.kind = FailureKind::left, .peer = 0});
  for (auto& [id, peer] : peers_) {
    if (peer.phase == Phase::joined) {
      peer.output.push(header(FrameType::closing));
      gone(peer);
    } else if (peer.phase != Phase::ending) {
      drop(peer);
    }
    peer.due = TimePoint::max();  // from here on the caller decides how long it lingers
  }
}

}  // namespace ferry::bootstrap

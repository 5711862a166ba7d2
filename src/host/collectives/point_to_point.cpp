#include "host/collectives/point_to_point.hpp"

#include <algorithm>
#include <system_error>
#include <utility>

#include "base/process_limits.hpp"
#include "platform/death_watch.hpp"

namespace ferry::host {
namespace {

constexpr auto kPeerPollPeriod = std::chrono::milliseconds(20);  // between two polls of the peers
constexpr auto kSleep = std::chrono::milliseconds(40);           // at most
constexpr auto kNap = std::chrono::microseconds(500);            // where a network may raise flags

std::string bytes_text(std::uint64_t bytes) {
  return std::to_string(bytes) + (bytes == 1 ? " byte" : " bytes");
}

}  // namespace

void Transfer::wait(std::chrono::nanoseconds limit, const OnWait& on_wait) {
  if (!ready()) {
    // Without a mover the collectives have ended, and with them every transfer.
    if (const auto moves = mover.lock()) {
      bool ended = false;
      if (on_wait) {
        ended = moves->wait(*this, limit, on_wait);
      } else {
        try {
          ended = moves->wait(*this, limit, moves->on_wait());
        } catch (const std::exception& thrown) {
          moves->fail(*this, thrown.what());
          throw;
        }
      }
      if (!ended) {
        throw Error(ErrorKind::deadline, std::string("event: a ") + call() +
                                             " did not end within " +
                                             std::to_string(limit.count() / 1000000) + " ms");
      }
    }
  }
  if (error) error.raise();
}

PointToPoint::PointToPoint(std::shared_ptr<HostEngine> engine, const engine::Region& region)
    : engine_(std::move(engine)),
      memory_(engine::lease(engine_->shared_memory(), region)),
      ring_(*engine_, region),
      peers_(index(engine_->size())) {}

PointToPoint::~PointToPoint() {
  stop();
}

void PointToPoint::stop() {
  Lock lock(mutex_);
  stopped_ = true;
  ring_.wake();
  changed_.notify_all();
  std::thread thread = std::move(thread_);
  lock.unlock();
  if (thread.joinable()) thread.join();
  lock.lock();
  fail_all(KeptError::of(Error(ErrorKind::destroyed, "send, recv: the group is destroyed")));
}

std::shared_ptr<Transfer> PointToPoint::make(bool sends, void* data, std::size_t bytes, int peer,
                                             std::int32_t tag) {
  auto transfer = std::make_shared<Transfer>();
  transfer->sends = sends;
  transfer->data = static_cast<std::byte*>(data);
  transfer->bytes = bytes;
  transfer->peer = peer;
  transfer->tag = tag;
  transfer->mover = weak_from_this();
  return transfer;
}

void PointToPoint::begin(const Held& transfer, bool waits) {
  const Lock lock(mutex_);
  transfer->begun = true;
  transfer->start = Clock::now();
  transfer->deadline = transfer->start + engine_->config().deadline;
  Peer& peer = peers_[index(transfer->peer)];
  open_.push_back(transfer);
  active_.insert(transfer->peer);
  ++peer.open;
  try {
    engine_->channel().check_usable(transfer->call());
    if (!waits && !thread_.joinable() && !stopped_) {
      thread_ = std::thread([this] { run_alone(); });
    }
  } catch (const std::system_error& error) {
    complete(transfer, KeptError::of(Error(ErrorKind::exhausted,
                                           std::string(transfer->call()) + ": " +
                                               thread_limit_text(error.code().value()))));
    return;
  } catch (const Error&) {
    complete(transfer, KeptError::current());
    return;
  }
  if (transfer->sends) {
    transfer->message = ++peer.sent;
    peer.to_send.push_back(transfer);
  } else {
    const auto found =
        std::find_if(peer.unexpected.begin(), peer.unexpected.end(),
                     [&](const Unexpected& one) { return one.head.tag == transfer->tag; });
    if (found == peer.unexpected.end()) {
      peer.wanted.push_back(transfer);
    } else {
      const Unexpected message = std::move(*found);
      peer.unexpected.erase(found);
      match(peer, transfer, message.head, message.data.data());
    }
  }
  ring_.wake();
  changed_.notify_all();
}

bool PointToPoint::wait(Transfer& transfer, std::chrono::nanoseconds limit, const OnWait& on_wait) {
  const auto start = Clock::now();
  Lock lock(mutex_);
  struct Counted {
    int& count;
    ~Counted() { --count; }
  } counted{++waiting_};
  while (!transfer.done.load(std::memory_order_relaxed)) {  // relaxed: under the mutex
    if (Clock::now() - start >= limit) return false;
    if (!moving_ && !stopped_ && transfer.begun) {
      move_until(lock, &transfer);
    } else {
      ring_.wake();  // the thread moves only while nobody waits; stop() needs the lock
      changed_.wait_for(lock, kSleep);
    }
    if (transfer.done.load(std::memory_order_relaxed) || !on_wait) continue;
    lock.unlock();
    try {
      on_wait();
    } catch (...) {
      lock.lock();
      throw;
    }
    lock.lock();
  }
  changed_.notify_all();  // the thread goes on with the others
  return true;
}

void PointToPoint::fail(const Transfer& transfer, const std::string& reason) {
  engine_->channel().fail(transfer.call(), reason);
  const Lock lock(mutex_);
  look_after_peers();
}

void PointToPoint::run_alone() {
  Lock lock(mutex_);
  while (!stopped_) {
    if (moving_ || waiting_ > 0 || open_.empty()) {
      changed_.wait(lock);
    } else {
      move_until(lock, nullptr);
    }
  }
}

/// Moves everything. Of a waiter: until its transfer is done, but looks up every `kSleep`. Of the
/// thread: until there is nothing to move or somebody waits.
void PointToPoint::move_until(Lock& lock, const Transfer* awaited) {
  const auto start = Clock::now();
  auto spin_until = start + engine_->shared_memory()->fabric->spin_time();
  moving_ = true;
  const auto over = [&] {
    if (awaited == nullptr) return stopped_ || waiting_ > 0 || open_.empty();
    return stopped_ || awaited->done.load(std::memory_order_relaxed);  // relaxed: under the mutex
  };
  while (!over()) {
    const std::uint64_t seen = ring_.bell();
    const bool moved = step();
    const auto now = Clock::now();
    if (now - last_look_ >= kPeerPollPeriod || DeathWatch::count() != deaths_) {
      look_after_peers();
    }
    if (over() || (awaited != nullptr && now - start >= kSleep)) break;
    if (moved) {
      spin_until = now + engine_->shared_memory()->fabric->spin_time();
      continue;
    }
    lock.unlock();
    if (now < spin_until) {
      if (!engine_->channel().progress()) protocol::detail::pause();
    } else {
      engine_->channel().hand_over();
      ring_.sleep(seen, nap());
    }
    lock.lock();
  }
  moving_ = false;
  changed_.notify_all();
}

std::chrono::nanoseconds PointToPoint::nap() const {
  return engine_->domains() > 1 ? std::chrono::nanoseconds(kNap)
                                : std::chrono::nanoseconds(kPeerPollPeriod);
}

bool PointToPoint::step() {
  bool moved = false;
  try {
    for (auto rank = active_.begin(); rank != active_.end();) {
      Peer& peer = peers_[index(*rank)];
      moved = step(*rank, peer) || moved;
      rank = peer.open == 0 ? active_.erase(rank) : std::next(rank);
    }
  } catch (const std::exception& error) {
    engine_->channel().fail("send, recv", error.what());  // unless it has failed already
    fail_all(KeptError::current());
  }
  return moved;
}

bool PointToPoint::step(int rank, Peer& peer) {
  bool moved = false;
  while (const auto packet = ring_.next(rank)) {
    take(rank, peer, *packet);
    ring_.take(rank);
    moved = true;
  }
  while (ring_.may_write(rank) && post_next(rank, peer)) moved = true;
  if (moved) ring_.settle(rank);
  return moved;
}

/// Writes one packet, if there is something to say.
bool PointToPoint::post_next(int rank, Peer& peer) {
  if (!peer.answers.empty()) {
    const Answer answer = std::move(peer.answers.front());
    peer.answers.pop_front();
    ring_.write(rank, answer.head, nullptr);
    if (answer.done) complete(answer.done, answer.error);
    return true;
  }
  if (!peer.to_send.empty()) {
    const Held send = std::move(peer.to_send.front());
    peer.to_send.pop_front();
    const std::size_t carried = fits(send->bytes) ? send->bytes : 0;
    peer.sent_not_answered.emplace(send->message, send);
    ring_.write(rank, {PacketKind::message, send->tag, send->message, send->bytes, carried},
                send->data);
    return true;
  }
  if (peer.accepted.empty()) return false;
  const Held send = peer.accepted.front();
  const std::size_t carried = std::min(send->bytes - send->moved, ring_.most_carried());
  ring_.write(rank, {PacketKind::data, send->tag, send->message, send->bytes, carried},
              send->data + send->moved);
  send->moved += carried;
  peer.data_moved = Clock::now();
  if (send->moved == send->bytes) {
    peer.accepted.pop_front();
    complete(send);
  }
  return true;
}

void PointToPoint::take(int rank, Peer& peer, const PacketRing::Packet& packet) {
  if (packet.head.carried > ring_.most_carried()) {
    violation(rank, "sent a packet of " + bytes_text(packet.head.carried) + ", more than the " +
                        std::to_string(ring_.most_carried()) + " of a slot");
  }
  switch (packet.head.kind) {
    case PacketKind::message: return take_message(rank, peer, packet);
    case PacketKind::accept:
    case PacketKind::refuse: return take_answer(rank, peer, packet.head);
    case PacketKind::data: return take_data(rank, peer, packet);
  }
  violation(rank, "sent a packet of unknown kind " +
                      std::to_string(static_cast<std::uint32_t>(packet.head.kind)));
}

void PointToPoint::take_message(int rank, Peer& peer, const PacketRing::Packet& packet) {
  const PacketHead& head = packet.head;
  if (head.message != ++peer.received ||
      head.carried != (fits(head.bytes) ? head.bytes : std::uint64_t{0})) {
    violation(rank, "sent message " + std::to_string(head.message) + " of " +
                        bytes_text(head.bytes) + " with " + std::to_string(head.carried) +
                        " of them, where message " + std::to_string(peer.received) +
                        " was expected");
  }
  const auto found = std::find_if(peer.wanted.begin(), peer.wanted.end(),
                                  [&](const Held& one) { return one->tag == head.tag; });
  if (found == peer.wanted.end()) {
    peer.unexpected.push_back({head, {packet.data, packet.data + head.carried}});
    return;
  }
  const Held receive = std::move(*found);
  peer.wanted.erase(found);
  match(peer, receive, head, packet.data);
}

void PointToPoint::match(Peer& peer, const Held& receive, const PacketHead& head,
                         const std::byte* data) {
  receive->message = head.message;
  Answer answer{{PacketKind::accept, head.tag, head.message, receive->bytes, 0}};
  if (head.bytes != receive->bytes) {
    answer.head.kind = PacketKind::refuse;
    answer.done = receive;
    answer.error = mismatch(*receive, head.bytes);
  } else if (fits(head.bytes)) {
    protocol::read_bytes(receive->data, data, head.bytes);
    answer.done = receive;
  } else {
    receive->accepted = true;
    peer.receiving.emplace(head.message, receive);
  }
  peer.answers.push_back(std::move(answer));
}

void PointToPoint::take_answer(int rank, Peer& peer, const PacketHead& head) {
  const auto found = peer.sent_not_answered.find(head.message);
  if (found == peer.sent_not_answered.end() ||
      (head.kind == PacketKind::accept) != (head.bytes == found->second->bytes)) {
    violation(rank, "answered message " + std::to_string(head.message) + " for " +
                        bytes_text(head.bytes) + ", which was not sent so");
  }
  const Held send = std::move(found->second);
  peer.sent_not_answered.erase(found);
  if (head.kind == PacketKind::refuse) {
    complete(send, mismatch(*send, head.bytes));
  } else if (fits(send->bytes)) {
    complete(send);
  } else {
    send->accepted = true;
    peer.accepted.push_back(send);
  }
}

void PointToPoint::take_data(int rank, Peer& peer, const PacketRing::Packet& packet) {
  const auto found = peer.receiving.find(packet.head.message);
  if (found == peer.receiving.end() || packet.head.carried == 0 ||
      packet.head.carried > found->second->bytes - found->second->moved) {
    violation(rank, "sent " + bytes_text(packet.head.carried) + " of message " +
                        std::to_string(packet.head.message) + ", which were not expected");
  }
  Transfer& receive = *found->second;
  protocol::read_bytes(receive.data + receive.moved, packet.data, packet.head.carried);
  receive.moved += packet.head.carried;
  peer.data_moved = Clock::now();
  if (receive.moved < receive.bytes) return;
  const Held done = std::move(found->second);
  peer.receiving.erase(found);
  complete(done);
}

void PointToPoint::violation(int rank, const std::string& what) const {
  engine_->channel().throw_violation("send, recv", rank, what);
}

KeptError PointToPoint::mismatch(const Transfer& transfer, std::uint64_t theirs) const {
  const std::string self = "rank " + std::to_string(engine_->rank());
  const std::string peer = "rank " + std::to_string(transfer.peer);
  const std::string sent = bytes_text(transfer.sends ? transfer.bytes : theirs);
  const std::string expected = bytes_text(transfer.sends ? theirs : transfer.bytes);
  return KeptError::of(Error(ErrorKind::mismatch,
                             self + ": " + transfer.call() + ": " + (transfer.sends ? self : peer) +
                                 " sends " + sent + " to " + (transfer.sends ? peer : self) +
                                 " (tag " + std::to_string(transfer.tag) + "), which expects " +
                                 expected + "; nothing was received",
                             {engine_->rank(), transfer.peer, transfer.call(),
                              engine_->channel().generation(), transfer.bytes, theirs}));
}

void PointToPoint::complete(const Held& transfer, KeptError error) {
  if (transfer->done.load(std::memory_order_relaxed)) return;  // relaxed: under the mutex
  --peers_[index(transfer->peer)].open;
  transfer->error = std::move(error);
  transfer->done.store(true, std::memory_order_release);
  std::erase(open_, transfer);
  if (open_.empty() && !transfer->error) engine_->channel().end_transfers();
  changed_.notify_all();
}

void PointToPoint::fail_all(const KeptError& error) {
  const std::vector<Held> open = open_;
  for (const Held& transfer : open) complete(transfer, error);
  for (const int rank : active_) {
    // The numbers stay: nothing more is taken or sent, for the group has failed.
    Peer& peer = peers_[index(rank)];
    peer = Peer{.sent = peer.sent, .received = peer.received};
  }
  active_.clear();
}

}  // namespace ferry::host

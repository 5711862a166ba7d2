// What a lane sends: chunks of rows, and messages.
#include <algorithm>
#include <cstring>
#include <ferry/error.hpp>
#include <string>
#include <utility>

#include "fabric/ofi/lane.hpp"

namespace ferry::fabric::ofi {
namespace {

/// Of one peer: more waits in `put` until some have left.
constexpr std::size_t kMaxChunks = 16;
constexpr auto kLook = std::chrono::milliseconds(50);
/// A payload that is copied behind its message, rather than sent from where it lies.
constexpr std::size_t kCopied = 1024;

}  // namespace

std::unique_lock<std::mutex> Lane::locked() {
  // relaxed: only makes the lane's own thread step aside.
  callers_.fetch_add(1, std::memory_order_relaxed);
  std::unique_lock lock(mutex_);
  callers_.fetch_sub(1, std::memory_order_relaxed);
  return lock;
}

Lane::Tagged& Lane::tagged(Peer& peer, std::uint64_t tag) {
  const auto [entry, is_new] = peer.tags.try_emplace(tag);
  if (is_new) entry->second.stream = peer.next_stream++ & kStreamMask;
  return entry->second;
}

/// Waits until the peer may have one more chunk. False: it is gone.
bool Lane::await_chunk(std::unique_lock<std::mutex>& lock, int rank, const LookUp& look_up) {
  Peer& peer = peer_of(rank);
  while (!peer.gone() && peer.chunks >= kMaxChunks) {
    flush(peer);
    wake();  // what was completed at once woke nobody
    hand_over();
    room_.wait_for(lock, kLook);  // the lane's thread loses a peer that takes nothing
    // By the clock: room may come and go faster than that for as long as a call takes.
    if (look_up && Clock::now() - looked_up_ >= kLook) {
      looked_up_ = Clock::now();
      lock.unlock();
      look_up(rank);
      lock.lock();
    }
  }
  return !peer.gone();
}

void Lane::put(int rank, Address to, std::span<const Piece> pieces, std::uint64_t tag,
               const LookUp& look_up) {
  auto lock = locked();
  Peer& peer = peer_of(rank);
  for (const Piece& piece : pieces) {
    if (!copy_in(lock, rank, to, piece, tag, look_up)) return;
    to.offset += piece.bytes;
  }
  if (peer.gone()) return;
  Tagged& all = tagged(peer, tag);
  if (all.held.empty() || all.bytes < all.held.front().bytes) return;
  const Held held = all.held.front();
  all.held.erase(all.held.begin());
  send_signal(rank, held, tag);
}

/// False: the peer is gone.
bool Lane::copy_in(std::unique_lock<std::mutex>& lock, int rank, Address to, const Piece& piece,
                   std::uint64_t tag, const LookUp& look_up) {
  Peer& peer = peer_of(rank);
  const auto* from = static_cast<const std::byte*>(piece.data);
  std::size_t bytes = piece.bytes;
  while (bytes > 0 && !peer.gone()) {
    Op* open = peer.open;
    const bool fits = open != nullptr && open->tag == tag && open->to.segment == to.segment &&
                      open->to.offset + open->bytes == to.offset && open->bytes < chunks_.bytes();
    if (!fits) {
      flush(peer);
      if (peer.chunks >= kMaxChunks) {
        if (!await_chunk(lock, rank, look_up)) return false;
        continue;  // another thread may have put meanwhile
      }
      if (peer.gone()) return false;  // the flush may have found out
      const Buffer buffer = chunks_.take();
      open = new_op(OpKind::write, rank);
      open->buffer = buffer;
      open->to = to;
      open->tag = tag;
      open->tagged = &tagged(peer, tag);
      open->stream = open->tagged->stream;
      peer.chunks++;
      peer.open = open;
    }
    const std::size_t now = std::min(bytes, chunks_.bytes() - open->bytes);
    std::memcpy(open->buffer.data + open->bytes, from, now);
    open->bytes += now;
    open->tagged->bytes += now;
    if (open->bytes == chunks_.bytes()) {
      flush(peer);
      lock.unlock();  // a large put leaves room for what arrives
      lock = locked();
    }
    from += now;
    bytes -= now;
    to.offset += now;
  }
  return !peer.gone();
}

void Lane::publish(int rank, Address flag, std::uint64_t value, std::uint64_t bytes,
                   std::uint64_t tag) {
  const auto lock = locked();
  Peer& peer = peer_of(rank);
  if (peer.gone()) return;
  const Held held{flag, value, bytes};
  if (bytes > 0) {
    Tagged& put = tagged(peer, tag);
    if (put.bytes < bytes) {
      put.held.push_back(held);
      return;
    }
    if (put.bytes > bytes) {
      throw Error(ErrorKind::invalid_argument,
                  "publish: rank " + std::to_string(setting_.rank) + " to rank " +
                      std::to_string(rank) + ": " + std::to_string(bytes) + " bytes, but " +
                      std::to_string(put.bytes) + " were put with this tag",
                  {.rank = setting_.rank, .peer = rank});
    }
  }
  send_signal(rank, held, tag);
}

void Lane::flush(Peer& peer) {
  Op* op = std::exchange(peer.open, nullptr);
  if (op == nullptr) return;
  op->tagged->pieces++;
  op->tagged = nullptr;
  submit(op);
}

/// All bytes of the signal were put.
void Lane::send_signal(int rank, const Held& held, std::uint64_t tag) {
  Peer& peer = peer_of(rank);
  Message message{.kind = MessageKind::signal,
                  .sequence = ++peer.sequences[{held.flag.segment, held.flag.offset}],
                  .value = held.value,
                  .flag_offset = held.flag.offset,
                  .flag_segment = held.flag.segment};
  if (held.bytes == 0) {
    message.stream = kStreamMask + 1;  // of no piece
    // It hurries nobody, and often more follows at once. A parked thread looks before long.
    if (parked_.load() && peer.held.size() < kMaxHeld) {
      peer.held.push_back(message);
    } else {
      send_message(rank, message, nullptr);
    }
    return;
  }
  Op* open = peer.open;
  const bool ours = open != nullptr && open->tag == tag;
  const Tagged& put = tagged(peer, tag);
  const bool alone =
      ours && put.pieces == 0 && open->bytes == put.bytes && open->bytes <= kMaxPayload;
  if (ours && !alone) flush(peer);
  // The tag's next bytes are a stream of their own. A flush that lost the peer left no tags.
  const auto taken = peer.tags.extract(tag);
  if (taken.empty()) return;
  if (alone) {  // few bytes: they ride in the message
    peer.open = nullptr;
    message.payload = static_cast<std::uint32_t>(open->bytes);
    message.payload_segment = open->to.segment;
    message.payload_offset = open->to.offset;
    message.stream = kStreamMask + 1;
  } else {
    message.stream = taken.mapped().stream;
    message.pieces = taken.mapped().pieces;
  }
  send_message(rank, message, alone ? open : nullptr);
  if (!peer.gone() && !taken.mapped().held.empty()) {
    tagged(peer, tag).held = taken.mapped().held;
  }
}

void Lane::send_message(int rank, Message message, Op* payload) {
  Peer& peer = peer_of(rank);
  const Buffer buffer = messages_.take();
  Op* op = new_op(OpKind::message, rank);
  op->buffer = buffer;
  const auto add = [&](Message one) {
    one.source = setting_.rank;
    one.token = peer.to_token;
    std::memcpy(op->buffer.data + op->bytes, &one, sizeof one);
    op->bytes += sizeof one;
  };
  for (const Message& held : peer.held) add(held);
  peer.held.clear();
  add(message);
  if (payload != nullptr &&
      (payload->bytes <= kCopied || endpoint_.info().tx_attr->iov_limit < 2)) {
    std::memcpy(op->buffer.data + op->bytes, payload->buffer.data, payload->bytes);
    op->bytes += payload->bytes;
    recycle(std::exchange(payload, nullptr));
  }
  op->payload = payload;
  submit(op);
}

void Lane::send_held(int rank) {
  Peer& peer = peer_of(rank);
  if (peer.held.empty()) return;
  const Message last = peer.held.back();
  peer.held.pop_back();
  send_message(rank, last, nullptr);
}

}  // namespace ferry::fabric::ofi

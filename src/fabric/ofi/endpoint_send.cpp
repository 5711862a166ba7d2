// What an endpoint is given to send: chunks of rows, and messages.
#include <cstring>
#include <utility>

#include "fabric/ofi/endpoint.hpp"

namespace ferry::fabric::ofi {
namespace {

/// Of one peer: who wants more waits until some have left.
constexpr std::size_t kMaxChunks = 16;
/// A payload that is copied behind its message, rather than sent from where it lies.
constexpr std::size_t kCopied = 1024;

}  // namespace

std::unique_lock<std::mutex> Endpoint::locked() {
  // relaxed: only makes the endpoint's own thread step aside.
  callers_.fetch_add(1, std::memory_order_relaxed);
  std::unique_lock lock(mutex_);
  callers_.fetch_sub(1, std::memory_order_relaxed);
  return lock;
}

Endpoint::Op* Endpoint::take_chunk(int rank) {
  const auto lock = locked();
  Peer& peer = peer_of(rank);
  if (peer.gone() || peer.chunks >= kMaxChunks) return nullptr;
  const Buffer buffer = chunks_.take();
  Op* op = new_op(OpKind::write, rank);
  op->buffer = buffer;
  peer.chunks++;
  return op;
}

void Endpoint::await_chunk(int rank, std::chrono::nanoseconds longest) {
  auto lock = locked();
  Peer& peer = peer_of(rank);
  if (peer.gone() || peer.chunks < kMaxChunks) return;
  wake();  // what was completed at once woke nobody
  hand_over();
  room_.wait_for(lock, longest);  // the endpoint's thread loses a peer that takes nothing
}

void Endpoint::write_chunk(Op* chunk) {
  const auto lock = locked();
  Peer& peer = peer_of(chunk->peer);
  if (peer.held.size() == 1 && peer.companion == chunk->stream) {
    chunk->stream |= kWithCompanion;
    peer.held.clear();
  }
  if (!peer.lost.load()) {
    chunk->load = chunk->bytes;
    peer.load += chunk->bytes;
    load_.fetch_add(chunk->bytes, std::memory_order_relaxed);
  }
  sent_.fetch_add(chunk->bytes, std::memory_order_relaxed);
  submit(chunk);
}

void Endpoint::drop_chunk(Op* chunk) {
  const auto lock = locked();
  recycle(chunk);
}

void Endpoint::send(int rank, const Message& message, Op* payload) {
  const auto lock = locked();
  if (payload != nullptr) sent_.fetch_add(payload->bytes, std::memory_order_relaxed);
  send_message(rank, message, payload);
}

void Endpoint::send_soon(int rank, const Message& message, std::uint32_t companion) {
  const auto lock = locked();
  Peer& peer = peer_of(rank);
  // A parked thread looks before long.
  if (!peer.gone() && parked_.load() && peer.held.size() < kMaxHeld) {
    peer.held.push_back(message);
    peer.companion = companion;
  } else {
    send_message(rank, message, nullptr);
  }
}

void Endpoint::send_message(int rank, const Message& message, Op* payload) {
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
      (payload->bytes <= kCopied || fi_endpoint_.info().tx_attr->iov_limit < 2)) {
    std::memcpy(op->buffer.data + op->bytes, payload->buffer.data, payload->bytes);
    op->bytes += payload->bytes;
    recycle(std::exchange(payload, nullptr));
  }
  op->payload = payload;
  submit(op);
}

void Endpoint::send_held(int rank) {
  Peer& peer = peer_of(rank);
  if (peer.held.empty()) return;
  const Message last = peer.held.back();
  peer.held.pop_back();
  send_message(rank, last, nullptr);
}

}  // namespace ferry::fabric::ofi

// What an endpoint sends, chunks of rows and messages: how it is given to libfabric, and what
// becomes of a peer that takes nothing.
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "fabric/ofi/endpoint.hpp"
#include "platform/death_watch.hpp"

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
  Op* op = new_op(OpKind::write, &peer);
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

bool Endpoint::is_idle(int rank) {
  const auto lock = locked();
  return peer_of(rank).load == 0;
}

void Endpoint::write_chunk(Op* chunk) {
  const auto lock = locked();
  Peer& peer = *chunk->peer;
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
  // A parked thread polls before long.
  if (!peer.gone() && parked_.load() && peer.held.size() < kMaxHeld) {
    peer.held.push_back(message);
    peer.companion = companion;
  } else {
    send_message(rank, message, nullptr);
  }
}

void Endpoint::send_text(int rank, const Message& message, std::span<const std::byte> text) {
  const auto lock = locked();
  send_message(rank, message, nullptr, text.first(std::min(text.size(), kMaxPayload)));
}

void Endpoint::exclude(int rank) {
  const auto lock = locked();
  lose(peer_of(rank));
}

void Endpoint::send_message(int rank, const Message& message, Op* payload,
                            std::span<const std::byte> text) {
  Peer& peer = peer_of(rank);
  const Buffer buffer = messages_.take();
  Op* op = new_op(OpKind::message, &peer);
  op->buffer = buffer;
  const auto add = [&](Message one) {
    one.source = setting_.rank;
    one.way_key = peer.to_key;
    std::memcpy(op->buffer.data + op->bytes, &one, sizeof one);
    op->bytes += sizeof one;
  };
  for (const Message& held : peer.held) add(held);
  peer.held.clear();
  add(message);
  if (!text.empty()) std::memcpy(op->buffer.data + op->bytes, text.data(), text.size());
  op->bytes += text.size();
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

Endpoint::Op* Endpoint::new_op(OpKind kind, Peer* peer) {
  if (free_ops_.empty()) {
    ops_.push_back(std::make_unique<Op>());
    free_ops_.push_back(ops_.back().get());
  }
  Op* op = free_ops_.back();
  free_ops_.pop_back();
  *op = Op{};
  op->kind = kind;
  op->peer = peer;
  return op;
}

void Endpoint::recycle(Op* op) {
  if (op->kind == OpKind::write) {
    Peer& peer = *op->peer;
    if (!peer.lost.load()) {
      load_.fetch_sub(op->load, std::memory_order_relaxed);
      peer.load -= op->load;
    }
    chunks_.give_back(op->buffer);
    peer.chunks--;
    room_.notify_all();
  } else {
    if (op->payload != nullptr) recycle(op->payload);
    messages_.give_back(op->buffer);
  }
  free_ops_.push_back(op);
}

void Endpoint::submit(Op* op) {
  Peer& peer = *op->peer;
  if (peer.lost.load()) {
    recycle(op);
    return;
  }
  if (!peer.backlog.empty() || !post(op)) {
    if (peer.backlog.empty() && peer.under_way == 0) peer.moved = Clock::now();
    peer.backlog.push_back(op);
    wake();
  }
}

/// Gives an operation to the provider. False: it has no room now.
bool Endpoint::post(Op* op) {
  Peer& peer = *op->peer;
  fid_ep* ep = fi_endpoint_.ep();
  ssize_t code = 0;
  bool completes = true;
  if (op->kind == OpKind::write) {
    const Remote& there = peer.segments[op->to.segment];
    const std::uint64_t all = piece_data(peer.to_key, setting_.rank, op->stream);
    const bool wide = fi_endpoint_.info().domain_attr->cq_data_size >= sizeof all;
    code = fi_writedata(ep, op->buffer.data, op->bytes, op->buffer.desc,
                        wide ? all : all & 0xffffffffull, peer.address, there.base + op->to.offset,
                        there.key, &op->context);
  } else if (op->payload != nullptr) {
    const std::array<iovec, 2> parts{iovec{op->buffer.data, op->bytes},
                                     iovec{op->payload->buffer.data, op->payload->bytes}};
    std::array<void*, 2> descs{op->buffer.desc, op->payload->buffer.desc};
    code = fi_sendv(ep, parts.data(), descs.data(), parts.size(), peer.address, &op->context);
  } else if (op->bytes <= fi_endpoint_.info().tx_attr->inject_size) {
    code = fi_inject(ep, op->buffer.data, op->bytes, peer.address);
    completes = false;
  } else {
    code = fi_send(ep, op->buffer.data, op->bytes, op->buffer.desc, peer.address, &op->context);
  }
  if (code == -FI_EAGAIN) return false;
  if (code != 0) {
    recycle(op);
    lose(peer);
    return true;
  }
  peer.told = Clock::now();
  if (peer.under_way == 0) peer.moved = peer.told;
  if (completes) {
    peer.under_way++;
  } else {
    recycle(op);
  }
  return true;
}

/// Whether anything went.
bool Endpoint::post_backlog(Peer& peer) {
  bool any = false;
  while (!peer.backlog.empty()) {
    Op* op = peer.backlog.front();
    peer.backlog.pop_front();  // before the post, which may lose the peer and its backlog
    if (!post(op)) {
      peer.backlog.push_front(op);
      break;
    }
    any = true;
  }
  return any;
}

void Endpoint::lose(Peer& peer) {
  if (peer.lost.exchange(true)) return;
  load_.fetch_sub(std::exchange(peer.load, 0), std::memory_order_relaxed);
  // What is under way is given back by its completion, or with the endpoint.
  std::deque<Op*> backlog = std::move(peer.backlog);
  peer.backlog.clear();
  for (Op* op : backlog) recycle(op);
  peer.held.clear();
  room_.notify_all();
  DeathWatch::tell();
}

}  // namespace ferry::fabric::ofi

#include "fabric/ofi/endpoint.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ferry/error.hpp>
#include <utility>

#include "base/limits.hpp"

namespace ferry::fabric::ofi {
namespace {

constexpr std::size_t kChunkBytes = std::size_t{256} << 10;
constexpr std::size_t kChunksInSlab = 4;
constexpr std::size_t kMessagesInSlab = 64;
constexpr std::size_t kReceives = 32;
constexpr auto kLook = std::chrono::milliseconds(20);

}  // namespace

Endpoint::Endpoint(const Library& library, Info info, const EndpointSetting& setting,
                   Arrivals& arrivals)
    : library_(library),
      setting_(setting),
      arrivals_(arrivals),
      fi_endpoint_(library, info, setting.rank),
      owner_pid_(getpid()),
      chunks_(fi_endpoint_, setting.rank, std::min(kChunkBytes, info->ep_attr->max_msg_size),
              kChunksInSlab),
      messages_(fi_endpoint_, setting.rank, kMessageRoom, kMessagesInSlab) {
  for (int peer = 0; peer < setting.size; ++peer) peers_.push_back(std::make_unique<Peer>());
  wake_fd_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (wake_fd_ < 0) throw_ofi(library, setting.rank, "eventfd", errno);
}

void Endpoint::start(const std::vector<Link>& links, std::chrono::nanoseconds spin) {
  const auto lock = locked();
  spin_ = spin;
  const auto now = Clock::now();
  for (int rank = 0; rank < setting_.size; ++rank) {
    const Link& link = links[static_cast<std::size_t>(rank)];
    if (link.name.empty()) continue;
    Peer& peer = peer_of(rank);
    peer.linked = true;
    peer.to_token = link.to;
    peer.from_token = link.from;
    peer.address = fi_endpoint_.insert(link.name);
    peer.moved = now;  // never told anything: a first message goes at once and connects
    peer.heard = now.time_since_epoch().count();
  }
  const std::size_t receives = std::min(kReceives, fi_endpoint_.info().rx_attr->size);
  for (std::size_t i = 0; i < receives; ++i) {
    Op* op = new_op(OpKind::receive, -1);
    op->buffer = messages_.take();
    receive(op);
  }
  in_words(setting_.rank, "thread of the network",
           [this] { thread_ = std::thread([this] { run(); }); });
}

bool Endpoint::in_forked_child() const {
  return getpid() != owner_pid_;
}

void Endpoint::leave() {
  const auto lock = locked();
  if (!thread_.joinable() || leaves_) return;
  leaves_ = Clock::now();
  for (int rank = 0; rank < setting_.size; ++rank) {
    if (!peer_of(rank).linked || peer_of(rank).gone()) continue;
    send_message(rank, {.kind = MessageKind::bye}, nullptr);
  }
  wake();
}

Endpoint::~Endpoint() {
  if (thread_.joinable()) {
    leave();
    {
      auto lock = locked();
      while (!all_said_goodbye(*leaves_) && Clock::now() - *leaves_ < setting_.deadline) {
        room_.wait_for(lock, kLook);
      }
      stop_ = true;
    }
    wake();
    thread_.join();
  }
  if (fi_endpoint_.binds_memory()) {  // it cannot be closed as long as it has any
    own_.clear();
    chunks_.unbind();
    messages_.unbind();
  }
  fi_endpoint_.close();
  close(wake_fd_);
}

Remote Endpoint::expose(SegmentId segment, std::byte* data, std::size_t bytes) {
  const auto lock = locked();
  Registration registration;
  if (bytes > 0) registration = fi_endpoint_.expose(data, bytes);
  if (own_.size() <= segment) own_.resize(segment + 1);
  own_[segment] = std::move(registration);
  return {own_[segment].base, own_[segment].key()};
}

void Endpoint::withdraw(SegmentId segment) {
  const auto lock = locked();
  if (segment < own_.size()) own_[segment] = {};
}

void Endpoint::attach(int peer, SegmentId segment, const Remote& remote) {
  const auto lock = locked();
  auto& segments = peer_of(peer).segments;
  if (segments.size() <= segment) segments.resize(segment + 1);
  segments[segment] = remote;
}

bool Endpoint::lost(int peer) const noexcept {
  return peer_of(peer).lost.load();
}

bool Endpoint::left(int peer) const noexcept {
  return peer_of(peer).left.load();
}

bool Endpoint::isolated() const noexcept {
  int silent = 0;
  for (int rank = 0; rank < setting_.size; ++rank) {
    if (!peer_of(rank).linked) continue;
    if (silent_for(rank) <= kSilent) return false;
    ++silent;
  }
  return silent > 1;
}

std::chrono::nanoseconds Endpoint::silent_for(int peer) const noexcept {
  return Clock::now().time_since_epoch() - std::chrono::nanoseconds(peer_of(peer).heard.load());
}

}  // namespace ferry::fabric::ofi

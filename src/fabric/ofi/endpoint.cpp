// How an endpoint begins and ends, and its thread: when that works, and when it leaves the work to
// threads that wait.
#include "fabric/ofi/endpoint.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <ferry/error.hpp>
#include <utility>

#include "base/process_limits.hpp"

namespace ferry::fabric::ofi {

namespace {

constexpr std::size_t kChunkBytes = std::size_t{256} << 10;
constexpr std::size_t kChunksInSlab = 4;
constexpr std::size_t kMessagesInSlab = 64;
constexpr std::size_t kReceives = 32;
constexpr auto kRoomPollPeriod = std::chrono::milliseconds(20);

constexpr int kSleepMs = 50;
constexpr int kSleepWithBacklogMs = 1;  // its room need not wake the thread
constexpr auto kPoll = std::chrono::microseconds(50);
/// So long after anything moved the thread of a TCP endpoint polls every kPoll, which takes what
/// has come together: one that wakes up for every packet keeps a call from its core.
constexpr auto kLively = std::chrono::milliseconds(1);
/// The endpoint's thread leaves the network alone if somebody has helped within this time.
constexpr std::chrono::nanoseconds kHelped = std::chrono::microseconds(200);
/// Then it checks so often whether anybody still does: each check takes half as long as the
/// exchange of a token. What cannot wait so long is handed over.
constexpr std::chrono::nanoseconds kParked = std::chrono::milliseconds(1);
/// So few bytes have left, or leave at the next poll, when who sent them rests.
constexpr std::size_t kMuch = std::size_t{128} << 10;
/// So many times in a row readable with nothing to do: it will always be (the provider's own
/// signal). A large message that comes in small parts has far fewer.
constexpr int kFalseAlarms = 1000;

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
      messages_(fi_endpoint_, setting.rank, kMessageRoom, kMessagesInSlab),
      peers_(static_cast<std::size_t>(setting.size)) {
  for (int peer = 0; peer < setting.size; ++peer) set_peer(peer, {});
  wake_fd_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (wake_fd_ < 0) throw_ofi(library, setting.rank, "eventfd", errno);
}

void Endpoint::set_peer(int rank, const Link& link) {
  auto peer = std::make_unique<Peer>();
  if (!link.name.empty()) {
    const auto now = Clock::now();
    peer->linked = true;
    peer->to_key = link.to;
    peer->from_key = link.from;
    peer->address = fi_endpoint_.insert(link.name);
    peer->moved = now;  // never told anything: a first message goes at once and connects
    peer->heard = now.time_since_epoch().count();
  }
  ever_peers_.push_back(std::move(peer));
  peers_[static_cast<std::size_t>(rank)] = ever_peers_.back().get();
}

void Endpoint::link(int rank, const Link& link) {
  const auto lock = locked();
  lose(peer_of(rank));
  set_peer(rank, link);
}

void Endpoint::start(const JobKey& job, const std::vector<Link>& links,
                     std::chrono::nanoseconds spin) {
  const auto lock = locked();
  job_ = job;
  spin_ = spin;
  for (int rank = 0; rank < setting_.size; ++rank) {
    const Link& link = links[static_cast<std::size_t>(rank)];
    if (!link.name.empty()) set_peer(rank, link);
  }
  const std::size_t receives = std::min(kReceives, fi_endpoint_.info().rx_attr->size);
  for (std::size_t i = 0; i < receives; ++i) {
    Op* op = new_op(OpKind::receive, nullptr);
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
        room_.wait_for(lock, kRoomPollPeriod);
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

void Endpoint::run() {
  Clock::time_point busy = Clock::now(), moved = busy;
  std::uint64_t seen = 0;
  for (;;) {
    // relaxed: politeness, not order: a thread that spins on a lock keeps others from it.
    while (callers_.load(std::memory_order_relaxed) > 0) std::this_thread::yield();
    bool any = false;
    {
      const std::lock_guard lock(mutex_);
      if (stop_) return;
      any = try_progress(Clock::now());
    }
    if (helped()) {
      park();
      continue;
    }
    const auto now = Clock::now();
    // What woke this thread may have been served by one that waits: no false alarm.
    if (const std::uint64_t moves = moves_.load(); std::exchange(seen, moves) != moves) {
      moved = now;
      for (auto& [fd, times] : false_alarms_) {
        if (times < kFalseAlarms) times = 0;
      }
    }
    if (any) {
      busy = now;
    } else if (fi_endpoint_.wakes_for_packets() && now - moved < kLively) {
      std::this_thread::sleep_for(kPoll);
    } else if (now - busy >= spin_) {
      sleep();
    }
  }
}

bool Endpoint::try_progress(Clock::time_point now) {
  try {
    const bool any = progress(now);
    if (any) moves_.fetch_add(1, std::memory_order_relaxed);  // a number for the thread's eyes
    return any;
  } catch (const std::exception&) {  // no memory: nothing can be sent or counted any more
    for (const auto& peer : ever_peers_) lose(*peer);
    return false;
  }
}

void Endpoint::help() noexcept {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || stop_) return;
  const auto now = Clock::now();
  try_progress(now);
  // relaxed: politeness; at worst the thread is at the network beside who helps.
  helped_.store(now.time_since_epoch().count(), std::memory_order_relaxed);
}

bool Endpoint::helped() const {
  const std::chrono::nanoseconds last(helped_.load());
  return Clock::now().time_since_epoch() - last < kHelped;
}

void Endpoint::hand_over() noexcept {
  helped_ = 0;
  const std::uint64_t one = 1;
  if (parked_.load() && write(wake_fd_, &one, sizeof one) < 0) return;  // it comes soon anyway
}

void Endpoint::rest() noexcept {
  const auto lock = locked();
  const bool waits = std::any_of(peers_.begin(), peers_.end(),
                                 [](const auto& peer) { return !peer.load()->backlog.empty(); });
  if (stop_ || (load() < kMuch && !waits)) return;
  try_progress(Clock::now());  // most often that is the rest
  if (sending()) hand_over();
}

/// Something that this endpoint sends is not with the network yet.
bool Endpoint::sending() const {
  return std::any_of(peers_.begin(), peers_.end(), [](const auto& each) {
    const Peer& peer = *each.load();
    return peer.under_way > 0 || !peer.backlog.empty();
  });
}

void Endpoint::park() {
  parked_ = true;
  if (helped()) {  // not handed over meanwhile
    pollfd fd{wake_fd_, POLLIN, 0};
    const timespec longest{0, kParked.count()};
    std::uint64_t count = 0;
    if (ppoll(&fd, 1, &longest, nullptr) > 0 && read(wake_fd_, &count, sizeof count) < 0) {
      count = 0;  // somebody else has read it
    }
  }
  parked_ = false;
}

void Endpoint::sleep() {
  std::vector<pollfd> fds{{wake_fd_, POLLIN, 0}};
  bool backlog = false;
  {
    const std::lock_guard lock(mutex_);
    if (stop_) return;
    asleep_ = true;  // from now on whoever adds to a backlog wakes this thread
    if (!fi_endpoint_.may_wait()) {
      asleep_ = false;
      return;
    }
    for (const auto& peer : peers_) backlog = backlog || !peer.load()->backlog.empty();
    for (const int fd : fi_endpoint_.wait_fds()) {
      if (heeded(fd)) fds.push_back({fd, POLLIN, 0});
    }
  }
  if (fds.size() == 1) {
    std::this_thread::sleep_for(kPoll);
  } else if (poll(fds.data(), fds.size(), backlog ? kSleepWithBacklogMs : kSleepMs) > 0) {
    std::uint64_t count = 0;
    if ((fds[0].revents & POLLIN) != 0 && read(wake_fd_, &count, sizeof count) < 0) return;
    // One after the other without any completion between them: `run` forgets them at the first.
    for (const pollfd& fd : fds) {
      if (fd.revents == 0 || fd.fd == wake_fd_) continue;
      if (++false_alarms_[fd.fd] == kFalseAlarms) heed_new_connections();
    }
  }
  asleep_ = false;
}

/// One that rang for nothing counts again once it is quiet: it was not the provider's own signal,
/// but, say, connections that a dead peer's host refused.
bool Endpoint::heeded(int fd) {
  int& times = false_alarms_[fd];
  pollfd now{fd, POLLIN, 0};
  if (times >= kFalseAlarms && poll(&now, 1, 0) == 0) times = 0;
  return times < kFalseAlarms;
}

/// The descriptor may ring because connections wait to be listed.
void Endpoint::heed_new_connections() {
  const std::lock_guard lock(mutex_);
  if (!stop_ && fi_endpoint_.renew_wait_fds()) false_alarms_.clear();
}

void Endpoint::wake() {
  if (!asleep_.load()) return;
  const std::uint64_t one = 1;
  if (write(wake_fd_, &one, sizeof one) < 0) return;  // full: it wakes anyway
}

}  // namespace ferry::fabric::ofi

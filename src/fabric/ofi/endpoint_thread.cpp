// The thread of an endpoint: when it works, and when it leaves that to threads that wait.
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "fabric/ofi/endpoint.hpp"

namespace ferry::fabric::ofi {
namespace {

constexpr int kSleepMs = 50;
constexpr int kSleepWithBacklogMs = 1;  // its room need not wake the thread
constexpr auto kPoll = std::chrono::microseconds(50);
/// So long after anything moved the thread of a TCP endpoint looks every kPoll, which takes what
/// has come together: one that wakes up for every packet keeps a call from its core.
constexpr auto kLively = std::chrono::milliseconds(1);
/// The endpoint's thread leaves the network alone if somebody has helped within this time.
constexpr std::chrono::nanoseconds kHelped = std::chrono::microseconds(200);
/// Then it looks so often whether anybody still does: each look takes half as long as the exchange
/// of a token. What cannot wait so long is handed over.
constexpr std::chrono::nanoseconds kParked = std::chrono::milliseconds(1);
/// So few bytes have left, or leave at the next look, when who sent them rests.
constexpr std::size_t kMuch = std::size_t{128} << 10;
/// So many times in a row readable with nothing to do: it will always be (the provider's own
/// signal). A large message that comes in small parts has far fewer.
constexpr int kFalseAlarms = 1000;

}  // namespace

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
    for (const auto& peer : peers_) lose(*peer);
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
                                 [](const auto& peer) { return !peer->backlog.empty(); });
  if (stop_ || (load() < kMuch && !waits)) return;
  try_progress(Clock::now());  // most often that is the rest
  if (sending()) hand_over();
}

/// Something that this endpoint sends is not with the network yet.
bool Endpoint::sending() const {
  return std::any_of(peers_.begin(), peers_.end(), [](const auto& peer) {
    return peer->under_way > 0 || !peer->backlog.empty();
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
    for (const auto& peer : peers_) backlog = backlog || !peer->backlog.empty();
    for (const int fd : fi_endpoint_.wait_fds()) {
      if (false_alarms_[fd] < kFalseAlarms) fds.push_back({fd, POLLIN, 0});
    }
  }
  if (fds.size() == 1) {
    std::this_thread::sleep_for(kPoll);
  } else if (poll(fds.data(), fds.size(), backlog ? kSleepWithBacklogMs : kSleepMs) > 0) {
    std::uint64_t count = 0;
    if ((fds[0].revents & POLLIN) != 0 && read(wake_fd_, &count, sizeof count) < 0) return;
    // One after the other without any completion between them: `run` forgets them at the first.
    for (const pollfd& fd : fds) {
      if (fd.revents != 0 && fd.fd != wake_fd_) ++false_alarms_[fd.fd];
    }
  }
  asleep_ = false;
}

void Endpoint::wake() {
  if (!asleep_.load()) return;
  const std::uint64_t one = 1;
  if (write(wake_fd_, &one, sizeof one) < 0) return;  // full: it wakes anyway
}

}  // namespace ferry::fabric::ofi

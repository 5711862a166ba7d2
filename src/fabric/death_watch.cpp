#include "fabric/death_watch.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <mutex>
#include <new>
#include <system_error>

#include "base/signals_blocked.hpp"
#include "protocol/futex.hpp"

namespace ferry::fabric {
namespace {

constexpr int kStop = -1;

/// A thread that has looked and is about to sleep misses the wake: it is woken again, after so many
/// milliseconds each. Its slice ends the sleep at the latest.
constexpr std::array kWakeAgain = {1, 2, 4};

bool watch(int epoll, int fd, std::uint32_t events, int name) noexcept {
  epoll_event event{};
  event.events = events;
  event.data.fd = name;
  return epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0;
}

}  // namespace

std::shared_ptr<DeathWatch> DeathWatch::shared() noexcept {
  static std::mutex mutex;
  static std::weak_ptr<DeathWatch> current;
  try {
    std::scoped_lock lock(mutex);
    std::shared_ptr<DeathWatch> shared = current.lock();
    if (shared && !shared->in_forked_child()) return shared;
    shared.reset(new DeathWatch());
    current = shared;
    return shared;
  } catch (const std::system_error&) {
    return nullptr;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

DeathWatch::DeathWatch()
    : owner_pid_(getpid()),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (epoll_.get() < 0 || stop_.get() < 0 || !watch(epoll_.get(), stop_.get(), EPOLLIN, kStop)) {
    throw std::system_error(errno, std::system_category());
  }
  const SignalsBlocked blocked;
  thread_ = std::thread([this] { run(); });
}

DeathWatch::~DeathWatch() {
  if (in_forked_child()) {
    thread_.detach();  // it is the parent's
    return;
  }
  eventfd_write(stop_.get(), 1);
  thread_.join();
}

bool DeathWatch::in_forked_child() const noexcept {
  return getpid() != owner_pid_;
}

void DeathWatch::add(int pidfd) noexcept {
  // Told once: the descriptor stays readable as long as it lives.
  if (!in_forked_child()) (void)watch(epoll_.get(), pidfd, EPOLLIN | EPOLLONESHOT, pidfd);
}

void DeathWatch::remove(int pidfd) noexcept {
  // What a child of fork removes would be gone for its parent.
  if (!in_forked_child()) (void)epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, pidfd, nullptr);
}

void DeathWatch::run() noexcept {
  std::array<epoll_event, 16> events{};
  std::size_t again = kWakeAgain.size();
  for (;;) {
    const int timeout = again < kWakeAgain.size() ? kWakeAgain[again] : -1;
    const int got =
        epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), timeout);
    if (got < 0) continue;  // all signals are blocked; a debugger interrupts nevertheless
    if (got == 0) {
      ++again;
    } else {
      for (int i = 0; i < got; ++i) {
        if (events[static_cast<std::size_t>(i)].data.fd == kStop) return;
      }
      // Release: who sees it finds the process dead.
      count_.fetch_add(static_cast<std::uint64_t>(got), std::memory_order_release);
      again = 0;
    }
    protocol::wake_sleepers();
  }
}

}  // namespace ferry::fabric

#include "platform/death_watch.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include "platform/futex.hpp"
#include "platform/threads.hpp"
#include "platform/unique_descriptor.hpp"

namespace ferry {
namespace {

constexpr int kStop = -1;

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

struct DeathWatch::Parts {
  const pid_t owner_pid = getpid();
  const UniqueDescriptor epoll{epoll_create1(EPOLL_CLOEXEC)};
  const UniqueDescriptor stop{eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  std::thread thread{};

  void run() noexcept;
};

DeathWatch::DeathWatch() : parts_(std::make_unique<Parts>()) {
  if (!parts_->epoll || !parts_->stop ||
      !watch(parts_->epoll.get(), parts_->stop.get(), EPOLLIN, kStop)) {
    throw std::system_error(errno, std::system_category());
  }
  const SignalsBlocked blocked;
  parts_->thread = std::thread([parts = parts_.get()] { parts->run(); });
}

DeathWatch::~DeathWatch() {
  if (in_forked_child()) {
    parts_->thread.detach();  // it is the parent's
    return;
  }
  eventfd_write(parts_->stop.get(), 1);
  parts_->thread.join();
}

bool DeathWatch::in_forked_child() const noexcept {
  return getpid() != parts_->owner_pid;
}

void DeathWatch::add(int process) noexcept {
  // Told once: the descriptor stays readable as long as it lives.
  if (!in_forked_child()) {
    (void)watch(parts_->epoll.get(), process, EPOLLIN | EPOLLONESHOT, process);
  }
}

void DeathWatch::remove(int process) noexcept {
  // What a child of fork removes would be gone for its parent.
  if (!in_forked_child()) {
    (void)epoll_ctl(parts_->epoll.get(), EPOLL_CTL_DEL, process, nullptr);
  }
}

void DeathWatch::Parts::run() noexcept {
  std::array<epoll_event, 16> events{};
  for (;;) {
    const int got = epoll_wait(epoll.get(), events.data(), static_cast<int>(events.size()), -1);
    if (got < 0) continue;  // all signals are blocked; a debugger interrupts nevertheless
    for (int i = 0; i < got; ++i) {
      if (events[static_cast<std::size_t>(i)].data.fd == kStop) return;
    }
    // Release: who sees it finds the process dead.
    count_.fetch_add(static_cast<std::uint64_t>(got), std::memory_order_release);
    wake_sleepers();
  }
}

}  // namespace ferry

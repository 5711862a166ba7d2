#include "platform/futex.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <climits>
#include <ctime>

namespace ferry {
namespace {

static_assert(std::endian::native == std::endian::little,
              "the low 32 bits of a flag is taken to be its first four bytes");

/// Calls of wake_sleepers, and those after which this thread has polled: every sleeper of this
/// process sleeps on the first as well.
std::atomic<std::uint32_t> wakes{0};
thread_local std::uint32_t wakes_seen = 0;

// Of Linux 5.16: the headers may be older.
constexpr long kFutexWaitv = 449;
constexpr std::uint32_t kShared32 = 2, kPrivate32 = 2 | FUTEX_PRIVATE_FLAG;
struct SleptOn {
  std::uint64_t seen;
  std::uint64_t word;
  std::uint32_t flags;
  std::uint32_t reserved;
};

/// A kernel without futex_waitv, or a container that forbids it: sleeps no longer than this, as
/// nobody else can tell such a sleeper of a death.
constexpr std::uint64_t kLongestAloneNs = 5'000'000;
std::atomic<bool> has_waitv{true};

std::uint64_t address(const void* word) noexcept {
  return reinterpret_cast<std::uintptr_t>(word);
}

timespec seconds(std::uint64_t nanoseconds) noexcept {
  timespec time{};
  time.tv_sec = static_cast<time_t>(nanoseconds / 1'000'000'000u);
  time.tv_nsec = static_cast<long>(nanoseconds % 1'000'000'000u);
  return time;
}

/// False: the kernel does not have it.
bool sleep_on_both(const std::uint64_t* word, std::uint64_t seen,
                   std::uint64_t nanoseconds) noexcept {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  const std::uint64_t since = static_cast<std::uint64_t>(now.tv_nsec) + nanoseconds;
  timespec end = seconds(since);
  end.tv_sec += now.tv_sec;
  // Not private: the waker may be another process. The kernel compares both words with what was
  // seen when it puts the thread to sleep, so that no change of either is missed.
  const std::array<SleptOn, 2> words = {
      SleptOn{static_cast<std::uint32_t>(seen), address(word), kShared32, 0},
      SleptOn{wakes_seen, address(&wakes), kPrivate32, 0}};
  const long got = syscall(kFutexWaitv, words.data(), words.size(), 0, &end, CLOCK_MONOTONIC);
  return got >= 0 || (errno != ENOSYS && errno != EPERM);
}

}  // namespace

void futex_wait(const std::uint64_t* word, std::uint64_t seen, std::uint64_t nanoseconds) noexcept {
  // relaxed: whichever thread finds that it is missing tries it in vain.
  if (has_waitv.load(std::memory_order_relaxed)) {
    if (!sleep_on_both(word, seen, nanoseconds)) has_waitv.store(false, std::memory_order_relaxed);
  } else {
    const timespec slice = seconds(std::min(nanoseconds, kLongestAloneNs));
    syscall(SYS_futex, word, FUTEX_WAIT, static_cast<std::uint32_t>(seen), &slice, nullptr, 0);
  }
  // Acquire: the caller polls after it, and finds what wake_sleepers was called for.
  wakes_seen = wakes.load(std::memory_order_acquire);
}

void futex_wake(const std::uint64_t* word) noexcept {
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void wake_sleepers() noexcept {
  wakes.fetch_add(1, std::memory_order_release);
  syscall(SYS_futex, &wakes, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace ferry

#include "platform/futex.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <climits>
#include <ctime>

namespace ferry {
namespace {

static_assert(std::endian::native == std::endian::little,
              "the low 32 bits of a flag is taken to be its first four bytes");

/// On which words threads of this process sleep: for wake_sleepers. A thread that finds no place
/// among them is not woken so.
std::array<std::atomic<const std::uint64_t*>, 64> sleeping{};

/// Calls of wake_sleepers, and those that this thread has seen before a sleep.
std::atomic<std::uint64_t> wakes{0};
thread_local std::uint64_t wakes_seen = 0;

/// How many threads that wakes, of this process and others.
long wake(const std::uint64_t* word) noexcept {
  return syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

void futex_wait(const std::uint64_t* word, std::uint64_t seen, std::uint64_t nanoseconds) noexcept {
  timespec slice{};
  slice.tv_sec = static_cast<time_t>(nanoseconds / 1'000'000'000u);
  slice.tv_nsec = static_cast<long>(nanoseconds % 1'000'000'000u);
  std::atomic<const std::uint64_t*>* place = nullptr;
  for (auto& each : sleeping) {
    const std::uint64_t* none = nullptr;
    if (!each.compare_exchange_strong(none, word)) continue;
    place = &each;
    break;
  }
  // In one total order with what wake_sleepers does: either this finds its call, or it finds this
  // place.
  const std::uint64_t now = wakes.load();
  const bool sleeps = now == wakes_seen;
  wakes_seen = now;
  // Without FUTEX_PRIVATE_FLAG: the waker may be another process.
  if (sleeps) {
    syscall(SYS_futex, word, FUTEX_WAIT, static_cast<std::uint32_t>(seen), &slice, nullptr, 0);
  }
  if (place != nullptr) place->store(nullptr, std::memory_order_relaxed);
}

void futex_wake(const std::uint64_t* word) noexcept {
  (void)wake(word);
}

bool wake_sleepers() noexcept {
  wakes.fetch_add(1);
  bool all = true;
  for (const auto& each : sleeping) {
    const std::uint64_t* word = each.load();
    if (word == nullptr) continue;
    // A word whose memory has gone meanwhile is an error of the system call, and nothing happens.
    if (wake(word) == 0) all = false;
  }
  return all;
}

}  // namespace ferry

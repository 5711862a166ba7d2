// Sleeping on a word that another process may change. Linux futexes, shared between processes; the
// place where WaitOnAddress goes on Windows.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <climits>
#include <cstdint>
#include <ctime>

namespace ferry::protocol {

static_assert(std::endian::native == std::endian::little,
              "the low 32 bits of a flag is taken to be its first four bytes");

/// On which words threads of this process sleep: for wake_sleepers. A thread that finds no place
/// among them is not woken so.
inline std::array<std::atomic<const std::uint64_t*>, 64> sleeping{};

/// Sleeps while the low 32 bits of `*word` equal those of `seen`, at most `nanoseconds`. Returns
/// when woken, when the word differs, at the end of the time or after a signal; the caller polls
/// again in every case. `word` may lie in memory shared between processes.
inline void futex_wait(const std::uint64_t* word, std::uint64_t seen, std::uint64_t nanoseconds) {
  timespec slice{};
  slice.tv_sec = static_cast<time_t>(nanoseconds / 1'000'000'000u);
  slice.tv_nsec = static_cast<long>(nanoseconds % 1'000'000'000u);
  std::atomic<const std::uint64_t*>* place = nullptr;
  for (auto& each : sleeping) {
    const std::uint64_t* none = nullptr;
    // relaxed: an address alone.
    if (!each.compare_exchange_strong(none, word, std::memory_order_relaxed)) continue;
    place = &each;
    break;
  }
  // Without FUTEX_PRIVATE_FLAG: the waker may be another process.
  syscall(SYS_futex, word, FUTEX_WAIT, static_cast<std::uint32_t>(seen), &slice, nullptr, 0);
  if (place != nullptr) place->store(nullptr, std::memory_order_relaxed);
}

/// Wakes everyone who sleeps on `word`, in this and in other processes.
inline void futex_wake(const std::uint64_t* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

/// Wakes the threads of this process that sleep in futex_wait, on whatever word: each polls again.
/// A word whose memory has gone meanwhile is an error of the system call, and nothing happens.
inline void wake_sleepers() {
  for (const auto& each : sleeping) {
    if (const std::uint64_t* word = each.load(std::memory_order_relaxed)) futex_wake(word);
  }
}

}  // namespace ferry::protocol

// Sleeping on a word that another process may change. Linux futexes, shared between processes; the
// place where WaitOnAddress goes on Windows.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <bit>
#include <climits>
#include <cstdint>
#include <ctime>

namespace ferry::protocol {

static_assert(std::endian::native == std::endian::little,
              "the low half of a 64-bit flag is taken to be its first four bytes");

/// Sleeps while the low 32 bits of `*word` equal those of `seen`, at most `nanoseconds`. Returns
/// when woken, when the word differs, at the end of the time or after a signal; the caller looks
/// again in every case. `word` may lie in memory shared between processes.
inline void futex_wait(const std::uint64_t* word, std::uint64_t seen, std::uint64_t nanoseconds) {
  timespec slice{};
  slice.tv_sec = static_cast<time_t>(nanoseconds / 1'000'000'000u);
  slice.tv_nsec = static_cast<long>(nanoseconds % 1'000'000'000u);
  // Without FUTEX_PRIVATE_FLAG: the waker may be another process.
  syscall(SYS_futex, word, FUTEX_WAIT, static_cast<std::uint32_t>(seen), &slice, nullptr, 0);
}

/// Wakes everyone who sleeps on `word`, in this and in other processes.
inline void futex_wake(const std::uint64_t* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace ferry::protocol

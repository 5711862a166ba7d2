// Sleeping on a word that another process may change. Linux: futexes. Windows: a table of sleepers
// in shared memory, and an event for each.
#pragma once

#include <cstdint>

namespace ferry {

/// Sleeps while the low 32 bits of `*word` equal those of `seen`, at most `nanoseconds`. Returns
/// when woken, when the word differs, at the end of the time or after a signal; the caller polls
/// again in every case. `word` may lie in memory shared between processes.
void futex_wait(const std::uint64_t* word, std::uint64_t seen, std::uint64_t nanoseconds) noexcept;

/// Wakes everyone who sleeps on `word`, in this and in other processes.
void futex_wake(const std::uint64_t* word) noexcept;

/// Wakes the threads of this process that sleep in futex_wait, on whatever word: each polls again.
/// Linux: one that has polled and is about to sleep does not. (Before Linux 5.16: every sleep ends
/// within 5 ms instead.) Windows: such a one misses it, so call it again a little later.
void wake_sleepers() noexcept;

}  // namespace ferry

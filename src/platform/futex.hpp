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
/// One that has polled and is about to sleep does not. False: one may have fallen asleep meanwhile,
/// so call it again a little later. Of more than 64 that sleep, some are not woken so.
bool wake_sleepers() noexcept;

}  // namespace ferry

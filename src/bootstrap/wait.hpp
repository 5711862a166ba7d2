// Deadlines of the bootstrap and how its messages speak of time.
#pragma once
#include <chrono>
#include <string>

namespace ferry::bootstrap {

using Clock = std::chrono::steady_clock;

/// How long a wait sleeps at most before it calls `on_wait` (contract: at least every 50 ms).
inline constexpr std::chrono::milliseconds kWaitSlice{20};

/// Now + `deadline`; a negative one is over at once, a huge one does not overflow.
Clock::time_point due_after(std::chrono::nanoseconds deadline);

/// "2 s", "1.5 s", "200 ms", "30 us".
std::string spell(std::chrono::nanoseconds time);

}  // namespace ferry::bootstrap

#include "bootstrap/wait.hpp"

#include <algorithm>
#include <cstdio>

namespace ferry::bootstrap {

Clock::time_point due_after(std::chrono::nanoseconds deadline) {
  constexpr std::chrono::nanoseconds longest = std::chrono::hours(24 * 365);
  return Clock::now() + std::clamp(deadline, std::chrono::nanoseconds(0), longest);
}

std::string spell(std::chrono::nanoseconds time) {
  const double ns = double(time.count());
  char text[48];
  if (ns >= 1e9 || ns == 0) {
    std::snprintf(text, sizeof text, "%.4g s", ns / 1e9);
  } else if (ns >= 1e6) {
    std::snprintf(text, sizeof text, "%.4g ms", ns / 1e6);
  } else {
    std::snprintf(text, sizeof text, "%.4g us", ns / 1e3);
  }
  return text;
}

}  // namespace ferry::bootstrap

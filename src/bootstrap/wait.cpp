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

std::string spell_ranks(std::span<const int> ranks, std::size_t total) {
  constexpr std::size_t shown_at_most = 8;
  total = std::max(total, ranks.size());
  if (total == 0) return "no rank";
  if (total == 1) return "rank " + std::to_string(ranks.front());
  const std::size_t shown = std::min(ranks.size(), shown_at_most);
  std::string text = "ranks ";
  for (std::size_t i = 0; i < shown; ++i) {
    if (i > 0) text += i + 1 == total ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  if (total > shown) text += " and " + std::to_string(total - shown) + " more";
  return text;
}

}  // namespace ferry::bootstrap

#include "progress.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "platform/terminal.hpp"

namespace ferry::cli {
namespace {

constexpr int kBarWidth = 40;

}  // namespace

Progress::Progress(std::string name, int total, std::chrono::milliseconds interval)
    : name_(std::move(name)),
      interval_(interval),
      terminal_(is_terminal(kErrorOutput)),
      total_(std::max(total, 1)) {}

Progress::~Progress() {
  if (terminal_ && done_ >= 0) fmt::print(stderr, "\r\x1b[K");
}

void Progress::show(int done, std::string_view now) {
  if (terminal_ && done == done_) return;
  const int percent = 100 * std::min(done, total_) / total_;
  if (terminal_) {
    const int filled = kBarWidth * percent / 100;
    fmt::print(stderr, "\r\x1b[K[{:#<{}}{:.<{}}] {:3} %  {}", "", filled, "", kBarWidth - filled,
               percent, now);
    std::fflush(stderr);
  } else if (Clock::now() - last_ >= interval_) {
    last_ = Clock::now();
    fmt::print(stderr, "{}: {} %, {}\n", name_, percent, now);
  }
  done_ = done;
}

}  // namespace ferry::cli

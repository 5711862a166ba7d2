#include "base/wait_notice.hpp"

#include <algorithm>
#include <cstdio>
#include <ferry/error.hpp>
#include <string_view>
#include <vector>

#include "base/text.hpp"
#include "platform/host.hpp"

namespace ferry {
namespace {

constexpr const char* kVariable = "FERRY_WAIT_NOTICE";
constexpr std::size_t kMostShown = 40;
constexpr double kMostSeconds = 86400;
constexpr std::chrono::nanoseconds kDefault = std::chrono::seconds(10);
constexpr std::chrono::nanoseconds kLongestPause = std::chrono::minutes(10);

std::string seconds(std::chrono::nanoseconds time) {
  const double s = std::max(0.0, static_cast<double>(time.count()) / 1e9);
  char text[48];
  std::snprintf(text, sizeof text, s < 10 ? "%.2g s" : "%.0f s", s);
  return text;
}

}  // namespace

std::chrono::nanoseconds wait_notice_after() {
  const std::string text = environment_variable(kVariable).value_or("");
  if (text.empty()) return kDefault;
  std::string_view rest = text;
  const double number = take_number(rest).value_or(-1);
  if (!rest.empty() || number < 0 || number > kMostSeconds) {
    throw Error(ErrorKind::invalid_argument,
                "environment variable " + std::string(kVariable) + " is \"" +
                    printable(text, kMostShown) +
                    "\", expected seconds from 0 (never) to 86400: how long a rank waits for "
                    "others before it says for whom");
  }
  return std::chrono::nanoseconds(static_cast<std::int64_t>(number * 1e9));
}

std::string for_others(const std::string& where, const std::string& stage) {
  return "for other ranks" + (where.empty() ? "" : " at " + where) +
         (stage.empty() ? "" : " (" + stage + ")");
}

WaitNotice::WaitNotice(std::chrono::nanoseconds after, Clock::time_point start,
                       Clock::time_point due)
    : pause_(after), start_(start), due_(due), next_(Clock::time_point::max()) {
  if (after > after.zero()) next_ = start + after;
}

void WaitNotice::say(int rank, const std::string& what, std::initializer_list<LogField> fields) {
  const auto now = Clock::now();
  if (logs(LogLevel::warn)) {
    std::vector<LogField> all{{"seconds", log_seconds((now - start_).count())},
                              {"left", log_seconds((due_ - now).count())}};
    all.insert(all.end(), fields);
    all.emplace_back("what", what);
    log(LogLevel::warn, rank, "wait", all);
  } else {
    write_sentence(rank, what, now);
  }
  first_ = false;
  pause_ = std::min(2 * pause_, kLongestPause);
  next_ = now + pause_;
}

void WaitNotice::write_sentence(int rank, const std::string& what, Clock::time_point now) {
  std::string line = "ferry: rank " + std::to_string(rank) + " has waited " +
                     seconds(now - start_) + " " + what + "; " + seconds(due_ - now) + " left";
  if (first_) line += " (FERRY_WAIT_NOTICE=0: no such lines)";
  line += "\n";
  // stderr has no buffer: one write. Whether anybody reads it makes no difference to the wait.
  [[maybe_unused]] const std::size_t written = std::fwrite(line.data(), 1, line.size(), stderr);
}

}  // namespace ferry

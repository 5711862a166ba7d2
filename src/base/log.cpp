#include "base/log.hpp"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <ferry/error.hpp>
#include <string_view>

#include "base/text.hpp"
#include "platform/host.hpp"

namespace ferry {
namespace {

constexpr const char* kLogVariable = "FERRY_LOG";
constexpr std::size_t kMostLogged = 600;  // bytes of a value

/// What set_log was given. None is ever freed: a call may use it meanwhile.
struct Chosen {
  LogSink sink;
  const Chosen* before;
};
std::atomic<const Chosen*> the_chosen{nullptr};  // the last one; of the process, as stderr is

std::string quoted(const std::string& value) {
  const std::string text = printable(value, kMostLogged);
  if (!text.empty() && text.find_first_of(" \"=\\") == std::string::npos) return text;
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + '"';
}

/// "2026-11-26T16:40:01.042Z"
std::string utc(std::int64_t time_ns) {
  using namespace std::chrono;
  const sys_time<nanoseconds> time{nanoseconds(time_ns)};
  const auto day = floor<days>(time);
  const year_month_day date(day);
  const hh_mm_ss clock(floor<milliseconds>(time - day));
  char text[64];
  std::snprintf(
      text, sizeof text, "%04d-%02u-%02uT%02d:%02d:%02d.%03dZ", static_cast<int>(date.year()),
      static_cast<unsigned>(date.month()), static_cast<unsigned>(date.day()),
      static_cast<int>(clock.hours().count()), static_cast<int>(clock.minutes().count()),
      static_cast<int>(clock.seconds().count()), static_cast<int>(clock.subseconds().count()));
  return text;
}

void write_line(const LogRecord& record) {
  const std::string line = "ferry ts=" + utc(record.time_ns) + " level=" + name_of(record.level) +
                           " " + record.text() + "\n";
  // stderr has no buffer: one write, so that lines of several ranks do not mix. Whether anybody
  // reads it makes no difference.
  [[maybe_unused]] const std::size_t written = std::fwrite(line.data(), 1, line.size(), stderr);
}

}  // namespace

const char* name_of(LogLevel level) {
  switch (level) {
    case LogLevel::off: return "off";
    case LogLevel::warn: return "warn";
    case LogLevel::info: return "info";
    case LogLevel::debug: return "debug";
  }
  return "unknown";
}

std::string LogRecord::text() const {
  std::string text = (rank < 0 ? "" : "rank=" + std::to_string(rank) + " ") + "event=" + event;
  for (const auto& [key, value] : fields) text += " " + key + "=" + quoted(value);
  return text;
}

void set_log(LogLevel level, LogSink sink) {
  const Chosen* before = the_chosen.load(std::memory_order_acquire);
  auto* const next = new Chosen{std::move(sink), before};
  // Acquire and release: who finds it finds what is in it, and what came before.
  while (!the_chosen.compare_exchange_weak(before, next, std::memory_order_acq_rel)) {
    next->before = before;
  }
  detail::log_level.store(level, std::memory_order_relaxed);
}

void read_log_level() {
  const std::string value = environment_variable(kLogVariable).value_or("");
  const std::string_view word = value.empty() ? "off" : std::string_view(value);
  const bool chosen = the_chosen.load(std::memory_order_relaxed) != nullptr;
  for (const LogLevel level : {LogLevel::off, LogLevel::warn, LogLevel::info, LogLevel::debug}) {
    if (word != name_of(level)) continue;
    if (!chosen) detail::log_level.store(level, std::memory_order_relaxed);
    return;
  }
  throw Error(ErrorKind::invalid_argument, "environment variable " + std::string(kLogVariable) +
                                               " is \"" + printable(word, 40) +
                                               "\", expected off, warn, info or debug");
}

void log(LogLevel level, int rank, const char* event, std::span<const LogField> fields) {
  if (!logs(level)) return;
  LogRecord record;
  record.level = level;
  record.time_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(
                       std::chrono::system_clock::now().time_since_epoch())
                       .count();
  record.rank = rank;
  record.event = event;
  for (const LogField& field : fields) record.fields.emplace_back(field.key, field.value);
  const Chosen* const chosen = the_chosen.load(std::memory_order_acquire);
  if (chosen != nullptr && chosen->sink) {
    chosen->sink(record);
  } else {
    write_line(record);
  }
}

std::string log_seconds(std::int64_t ns) {
  char text[48];
  std::snprintf(text, sizeof text, "%.6g", static_cast<double>(ns) / 1e9);
  return text;
}

}  // namespace ferry

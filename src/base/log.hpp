// Events for the log: one line each, of key=value.
#pragma once
#include <atomic>
#include <cstdint>
#include <ferry/observe.hpp>
#include <initializer_list>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

namespace ferry {

/// A value in a record: numbers, words and truths.
struct LogField {
  LogField(const char* name, std::string text) : key(name), value(std::move(text)) {}
  LogField(const char* name, const char* text) : key(name), value(text) {}
  template <class Number>
    requires std::is_arithmetic_v<Number>
  LogField(const char* name, Number number) : key(name), value(std::to_string(number)) {}
  const char* key;
  std::string value;
};

namespace detail {
// relaxed, here and in `logs`: what is said just before or after a change may be missed.
inline std::atomic<LogLevel> log_level{LogLevel::off};
}  // namespace detail

/// Whether an event of this level is logged: one relaxed load. Asked before its fields are made.
inline bool logs(LogLevel level) {
  return detail::log_level.load(std::memory_order_relaxed) >= level;
}

/// Takes FERRY_LOG, unless `set_log` was called. Throws Error(invalid_argument) for a word that is
/// no level.
void read_log_level();

void log(LogLevel level, int rank, const char* event, std::span<const LogField> fields);
inline void log(LogLevel level, int rank, const char* event,
                std::initializer_list<LogField> fields) {
  log(level, rank, event, std::span(fields.begin(), fields.size()));
}

/// "1.234": nanoseconds as seconds, for fields.
std::string log_seconds(std::int64_t ns);

}  // namespace ferry

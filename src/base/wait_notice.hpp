// Long waits show life: lines on stderr about who is awaited.
#pragma once
#include <chrono>
#include <initializer_list>
#include <string>

#include "base/log.hpp"

namespace ferry {

/// After how long a wait for other ranks is first told of: FERRY_WAIT_NOTICE, in seconds; 10 where
/// it is not set. Zero: never. Throws Error(invalid_argument) for what is no number from 0 to
/// 86400.
std::chrono::nanoseconds wait_notice_after();

/// One wait: tells of itself after `after`, again after twice as long, and so on, at least every
/// ten minutes.
class WaitNotice {
 public:
  using Clock = std::chrono::steady_clock;

  WaitNotice(std::chrono::nanoseconds after, Clock::time_point start, Clock::time_point due);

  /// The next time; time_point::max(): never.
  Clock::time_point next() const { return next_; }
  /// Writes "ferry: rank 2 has waited 10 s `what`; 50 s left" as one line, so that lines of several
  /// ranks do not mix, and goes on to the next time. The first line also says how to have none.
  /// Where there is a log it is an event there instead, with these fields.
  void say(int rank, const std::string& what, std::initializer_list<LogField> fields = {});

 private:
  void write_sentence(int rank, const std::string& what, Clock::time_point now);

  std::chrono::nanoseconds pause_;  // before the next line
  Clock::time_point start_;
  Clock::time_point due_;
  Clock::time_point next_;
  bool first_ = true;
};

/// "for other ranks at 127.0.0.1:29500 (Group: attach)"; where and what for may be empty.
std::string for_others(const std::string& where, const std::string& stage);

}  // namespace ferry

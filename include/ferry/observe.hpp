// What Ferry says of itself: events for a log, counters, and the times of calls and waits.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace ferry {

/// How much is logged. warn: who is waited for, masks, failures. info: also how a group was made
/// and why so, memory that grows, regroups. debug: also every call.
enum class LogLevel : std::uint8_t { off, warn, info, debug };

/// "off", "warn", "info", "debug".
const char* name_of(LogLevel level);

/// One event. Secrets and tensors are never in it.
struct LogRecord {
  LogLevel level = LogLevel::off;
  std::int64_t time_ns = 0;  ///< since 1970, UTC
  int rank = -1;             ///< −1: not known yet
  std::string event{};       ///< "group", "nic", "wait", "grow", "mask", "regroup", "failure", ...
  std::vector<std::pair<std::string, std::string>> fields{};

  /// `rank=0 event=grow bytes=2097152 stage="dispatch: grants"`: one line, without its end.
  std::string text() const;
};

/// Where records go; called by the thread that has something to say, with no lock that a call
/// needs. It must not throw, and is kept for as long as the process lives.
using LogSink = std::function<void(const LogRecord&)>;

/// Of the whole process. Without it the environment says what is logged: FERRY_LOG=warn, info or
/// debug, read when a group is made. An empty sink is stderr, where a record is one line:
/// `ferry ts=2026-11-26T16:40:01.042Z level=info rank=0 event=...`.
void set_log(LogLevel level, LogSink sink = {});

/// What the calls of one kind have done on this rank, since the group was made.
struct CallStats {
  std::string call{};         ///< "plan", "dispatch", "latency combine", "all_reduce", ...
  std::uint64_t calls = 0;    ///< of a call with a hook, both halves
  std::uint64_t failed = 0;   ///< of which threw
  std::uint64_t rows = 0;     ///< that dispatches received and combines returned
  std::uint64_t bytes = 0;    ///< of those rows
  std::uint64_t ns = 0;       ///< inside calls, waits included
  std::uint64_t wait_ns = 0;  ///< of which waiting for peers
};

/// What this rank has waited in one stage of its calls.
struct WaitStats {
  std::string stage{};  ///< "dispatch: grants", "latency combine: rows", ...
  std::uint64_t waits = 0;
  std::uint64_t ns = 0;
};

struct Metrics {
  std::vector<CallStats> calls{};  ///< kinds that were called
  std::vector<WaitStats> waits{};  ///< stages that were waited in
  std::uint64_t failures = 0;      ///< that the group has failed with
  std::uint64_t masked = 0;        ///< times that latency exchanges went on without a rank
  std::uint64_t growths = 0;       ///< segments registered after creation
};

/// A call, or a wait inside one.
struct TraceEvent {
  std::string name{};  ///< of the call, or the wait's stage
  bool wait = false;
  std::int64_t begin_ns = 0;  ///< of this host's steady clock
  std::int64_t ns = 0;
  std::uint64_t generation = 0;  ///< of the group, at the end
  std::uint64_t rows = 0;        ///< of a call, as in CallStats
  std::uint64_t bytes = 0;
};

/// What was recorded, in the order in which it ended.
struct Trace {
  std::vector<TraceEvent> events{};
  std::uint64_t dropped = 0;  ///< events that found no room
};

}  // namespace ferry

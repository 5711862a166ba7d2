#include "engine/record.hpp"

#include <ferry/error.hpp>
#include <map>
#include <string>
#include <utility>

namespace ferry::engine {

void Record::called(CallKind what, const char* call, bool failed, Clock::time_point begin,
                    std::chrono::nanoseconds time, std::uint64_t generation) {
  Call& kind = calls_[static_cast<std::size_t>(what)];
  add(kind.calls, 1);
  if (failed) add(kind.failed, 1);
  add(kind.ns, static_cast<std::uint64_t>(time.count()));
  const std::uint64_t rows = std::exchange(rows_, 0), bytes = std::exchange(bytes_, 0);
  if (rows > 0) add(kind.rows, rows);
  if (bytes > 0) add(kind.bytes, bytes);
  add(kind.wait_ns, wait_ns_.exchange(0, std::memory_order_relaxed));
  if (traces_.load(std::memory_order_relaxed)) {
    trace({call, false, begin, time, generation, rows, bytes});
  }
}

void Record::moved(std::int64_t rows, std::size_t row_bytes) {
  rows_ += static_cast<std::uint64_t>(rows);
  bytes_ += static_cast<std::uint64_t>(rows) * row_bytes;
}

Record::Stage* Record::stage(const char* name) {
  const std::size_t first = reinterpret_cast<std::uintptr_t>(name) / 8 % kStages;
  for (std::size_t i = 0; i < kStages; ++i) {
    Stage& at = stages_[(first + i) % kStages];
    const char* there = at.name.load(std::memory_order_relaxed);
    // Where another thread has just taken the place, `there` is its name.
    if (there == nullptr && at.name.compare_exchange_strong(there, name)) return &at;
    if (there == name) return &at;
  }
  return nullptr;
}

void Record::waited(const char* name, Clock::time_point begin, std::chrono::nanoseconds time,
                    std::uint64_t generation) {
  const auto ns = static_cast<std::uint64_t>(time.count());
  add(wait_ns_, ns);
  if (Stage* const at = stage(name)) {
    add(at->waits, 1);
    add(at->ns, ns);
  }
  if (traces_.load(std::memory_order_relaxed)) trace({name, true, begin, time, generation, 0, 0});
}

Metrics Record::metrics() const {
  const auto read = [](const auto& counter) { return counter.load(std::memory_order_relaxed); };
  Metrics all;
  for (std::size_t kind = 0; kind < kCallKinds; ++kind) {
    const Call& call = calls_[kind];
    if (read(call.calls) == 0) continue;
    const char* name = kind == 0 ? "other" : name_of(static_cast<CallKind>(kind));
    all.calls.push_back({name, read(call.calls), read(call.failed), read(call.rows),
                         read(call.bytes), read(call.ns), read(call.wait_ns)});
  }
  std::map<std::string, WaitStats> waits;  // one literal may lie in several places
  for (const Stage& stage : stages_) {
    const char* name = read(stage.name);
    if (name == nullptr) continue;
    WaitStats& of = waits[name];
    of.waits += read(stage.waits);
    of.ns += read(stage.ns);
  }
  for (auto& [name, of] : waits) {
    of.stage = name;
    all.waits.push_back(of);
  }
  all.failures = read(failures_);
  all.masked = read(masked_);
  all.growths = read(growths_);
  return all;
}

void Record::start_trace(std::size_t most) {
  const std::scoped_lock lock(trace_mutex_);
  if (traces_.load(std::memory_order_relaxed)) {
    throw Error(ErrorKind::invalid_argument,
                "start_trace: a trace of this group runs already; end it first");
  }
  events_.clear();
  events_.reserve(most);
  most_ = most;
  dropped_ = 0;
  traces_.store(true, std::memory_order_relaxed);
}

Trace Record::take_trace() {
  const std::scoped_lock lock(trace_mutex_);
  traces_.store(false, std::memory_order_relaxed);
  Trace all;
  all.dropped = dropped_;
  for (const Event& event : std::exchange(events_, {})) {
    all.events.push_back({event.name, event.wait, event.begin.time_since_epoch().count(),
                          event.time.count(), event.generation, event.rows, event.bytes});
  }
  return all;
}

void Record::trace(const Event& event) {
  const std::scoped_lock lock(trace_mutex_);
  if (!traces_.load(std::memory_order_relaxed)) return;
  if (events_.size() < most_) {
    events_.push_back(event);
  } else {
    ++dropped_;
  }
}

}  // namespace ferry::engine

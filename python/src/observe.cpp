// Log records on their way to Python's `logging`, counters and traces.
//
// A call never takes the GIL to log: it leaves the record in a queue, which a thread of Python
// empties (ferry/logs.py).
#include "ferry/observe.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>

#include "bind.hpp"
#include "gil.hpp"

namespace ferry::python {
namespace {

class LogQueue {
 public:
  void push(const LogRecord& record) {
    const std::scoped_lock lock(mutex_);
    if (records_.size() >= kMost) {
      ++lost_;
      return;
    }
    records_.push_back(record);
    come_.notify_one();
  }
  /// What is there, after at most `most`; a last record tells how many found no room.
  std::vector<LogRecord> take(std::chrono::nanoseconds most) {
    std::unique_lock lock(mutex_);
    come_.wait_for(lock, most, [this] { return !records_.empty() || stopped_; });
    std::vector<LogRecord> taken(records_.begin(), records_.end());
    records_.clear();
    if (lost_ > 0 && !taken.empty()) {
      LogRecord last = taken.back();
      last.level = LogLevel::warn;
      last.event = "log_lost";
      last.fields = {{"records", std::to_string(lost_)}};
      taken.push_back(std::move(last));
      lost_ = 0;
    }
    return taken;
  }
  void stop(bool stopped) {
    const std::scoped_lock lock(mutex_);
    stopped_ = stopped;
    come_.notify_all();
  }

 private:
  static constexpr std::size_t kMost = 4096;
  std::mutex mutex_;
  std::condition_variable come_;
  std::deque<LogRecord> records_;
  std::uint64_t lost_ = 0;
  bool stopped_ = false;
};

// Of the process, as the log is; never destroyed, since a call may log while the process ends, and
// in a forked child another thread may have had its lock.
std::atomic<LogQueue*> the_queue = new LogQueue;

LogQueue& queue() {
  return *the_queue.load();
}

void bind_log(nb::module_& m) {
  nb::enum_<LogLevel>(m, "LogLevel")
      .value("off", LogLevel::off)
      .value("warn", LogLevel::warn)
      .value("info", LogLevel::info)
      .value("debug", LogLevel::debug);
  nb::class_<LogRecord>(m, "LogRecord")
      .def_ro("level", &LogRecord::level)
      .def_ro("time_ns", &LogRecord::time_ns)
      .def_ro("rank", &LogRecord::rank)
      .def_ro("event", &LogRecord::event)
      .def_ro("fields", &LogRecord::fields)
      .def("text", &LogRecord::text);
  m.def("log_to_stderr", [](LogLevel level) { set_log(level); }, nb::arg("level"));
  m.def(
      "log_to_queue",
      [](LogLevel level) {
        queue().stop(false);
        set_log(level, [](const LogRecord& record) { queue().push(record); });
      },
      nb::arg("level"));
  m.def(
      "take_log",
      [](double seconds) {
        const std::chrono::nanoseconds most(static_cast<std::int64_t>(seconds * 1e9));
        return without_gil([&] { return queue().take(most); });
      },
      nb::arg("seconds"));
  m.def("stop_log_queue", [] { queue().stop(true); });
  m.def("renew_log_queue", [] { the_queue = new LogQueue; });
}

}  // namespace

void bind_observe(nb::module_& m) {
  bind_log(m);
  nb::class_<CallStats>(m, "CallStats")
      .def_ro("call", &CallStats::call)
      .def_ro("calls", &CallStats::calls)
      .def_ro("failed", &CallStats::failed)
      .def_ro("rows", &CallStats::rows)
      .def_ro("bytes", &CallStats::bytes)
      .def_ro("ns", &CallStats::ns)
      .def_ro("wait_ns", &CallStats::wait_ns);
  nb::class_<WaitStats>(m, "WaitStats")
      .def_ro("stage", &WaitStats::stage)
      .def_ro("waits", &WaitStats::waits)
      .def_ro("ns", &WaitStats::ns);
  nb::class_<Metrics>(m, "Metrics")
      .def_ro("calls", &Metrics::calls)
      .def_ro("waits", &Metrics::waits)
      .def_ro("failures", &Metrics::failures)
      .def_ro("masked", &Metrics::masked)
      .def_ro("growths", &Metrics::growths);
  nb::class_<TraceEvent>(m, "TraceEvent")
      .def_ro("name", &TraceEvent::name)
      .def_ro("wait", &TraceEvent::wait)
      .def_ro("begin_ns", &TraceEvent::begin_ns)
      .def_ro("ns", &TraceEvent::ns)
      .def_ro("generation", &TraceEvent::generation)
      .def_ro("rows", &TraceEvent::rows)
      .def_ro("bytes", &TraceEvent::bytes);
  nb::class_<Trace>(m, "Trace").def_ro("events", &Trace::events).def_ro("dropped", &Trace::dropped);
}

}  // namespace ferry::python

// What the calls of a group did: counters for `Group::metrics`, and with a trace the times of every
// call and wait.
#pragma once
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "core/call.hpp"
#include "ferry/observe.hpp"

namespace ferry::engine {

/// Written by the threads that make calls, read by any. Counters are relaxed: nothing is read on
/// the strength of them. Names of stages live as long as the program.
class Record {
 public:
  using Clock = std::chrono::steady_clock;

  /// Of a call, begun at `begin`; its rows are those of `moved` since the call before ended.
  void called(CallKind kind, const char* call, bool failed, Clock::time_point begin,
              std::chrono::nanoseconds time, std::uint64_t generation);
  void moved(std::int64_t rows, std::size_t row_bytes);
  void waited(const char* stage, Clock::time_point begin, std::chrono::nanoseconds time,
              std::uint64_t generation);
  void failed() { add(failures_, 1); }
  void masked() { add(masked_, 1); }
  void grown() { add(growths_, 1); }

  Metrics metrics() const;
  /// From now on, `most` events at most. Throws Error(invalid_argument) while another one runs.
  void start_trace(std::size_t most);
  /// Ends it.
  Trace take_trace();

 private:
  struct Event {
    const char* name;
    bool wait;
    Clock::time_point begin;
    std::chrono::nanoseconds time;
    std::uint64_t generation, rows, bytes;
  };
  struct Call {
    std::atomic<std::uint64_t> calls{0}, failed{0}, rows{0}, bytes{0}, ns{0}, wait_ns{0};
  };
  struct Stage {
    std::atomic<const char*> name{nullptr};
    std::atomic<std::uint64_t> waits{0}, ns{0};
  };
  static constexpr std::size_t kStages = 64;

  static void add(std::atomic<std::uint64_t>& counter, std::uint64_t more) {
    counter.fetch_add(more, std::memory_order_relaxed);
  }
  Stage* stage(const char* name);
  void trace(const Event& event);

  std::array<Call, kCallKinds> calls_{};  // by CallKind; none: calls without a kind
  std::array<Stage, kStages> stages_{};
  std::atomic<std::uint64_t> failures_{0}, masked_{0}, growths_{0};
  std::uint64_t rows_ = 0, bytes_ = 0;     // of this call; of the thread whose turn it is
  std::atomic<std::uint64_t> wait_ns_{0};  // of this call
  std::atomic<bool> traces_{false};
  std::mutex trace_mutex_;
  std::vector<Event> events_;
  std::size_t most_ = 0;
  std::uint64_t dropped_ = 0;
};

}  // namespace ferry::engine

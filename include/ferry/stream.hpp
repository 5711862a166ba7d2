// Streams and events: work that runs in order, beside the caller.
#pragma once
#include <chrono>
#include <functional>
#include <memory>

#include "ferry/bootstrap.hpp"

namespace ferry {

/// Marks a point of a stream. A default-made event is complete.
class Event {
 public:
  Event() = default;
  /// True when all work before the event has ended (well or not). Never blocks.
  bool ready() const;
  /// Blocks until the event is complete; throws what the work threw. Throws Error(deadline) when
  /// `deadline` passes first. `on_wait` is polled at least every 50 ms.
  void wait(std::chrono::nanoseconds deadline = std::chrono::hours(24),
            const OnWait& on_wait = {}) const;

  struct State;
  explicit Event(std::shared_ptr<State> state) : state_(std::move(state)) {}
  const std::shared_ptr<State>& state() const { return state_; }

 private:
  std::shared_ptr<State> state_{};
};

/// A queue of work with one worker thread. Work runs in the order it was submitted. The first
/// exception of a piece of work is kept by its event; later work still runs.
/// Copies share the queue; the last one waits for the queue to drain.
class Stream {
 public:
  Stream();
  /// Runs `work` after everything submitted before. Never blocks.
  Event submit(std::function<void()> work);
  /// An event that is complete when everything submitted so far has ended.
  Event record();
  /// Later work of this stream starts after `event`.
  void wait(const Event& event);
  /// Blocks until the queue is empty; throws the first exception since the last call.
  void synchronize();

  struct Worker;

 private:
  std::shared_ptr<Worker> worker_;
};

}  // namespace ferry

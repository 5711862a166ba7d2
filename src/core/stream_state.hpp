// What an Event and a Stream hold, whatever runs the work: a worker thread or a GPU.
#pragma once
#include <chrono>
#include <functional>
#include <utility>

#include "ferry/stream.hpp"

namespace ferry {

struct Event::State {
  virtual ~State() = default;
  virtual bool ready() = 0;
  virtual void wait(std::chrono::nanoseconds deadline, const OnWait& on_wait) = 0;
};

struct Stream::Queue {
  virtual ~Queue() = default;
  virtual Event submit(std::function<void()> work) = 0;
  /// `start` starts something that goes on beside the queue until `end` is complete. What is
  /// submitted later waits for it, except for other calls of this kind: they go on side by side.
  /// `start` does not throw.
  virtual void start(std::function<void()> start, const Event& end) {
    submit(std::move(start));
    wait(end);
  }
  virtual Event record() = 0;
  virtual void wait(const Event& event) = 0;
  virtual void synchronize() = 0;
  virtual Device device() const { return {}; }
  virtual void* native() const { return nullptr; }
};

}  // namespace ferry

// Streams and events: work that runs in order, beside the caller.
#pragma once
#include <chrono>
#include <functional>
#include <memory>

#include "ferry/bootstrap.hpp"
#include "ferry/tensor.hpp"

namespace ferry {

/// Marks a point of a stream. A default-made event is complete.
class Event {
 public:
  Event() = default;
  /// True when all work before the event has ended (well or not). Never blocks. The event of a call
  /// that was captured into a CUDA graph is complete: order such work by the graph.
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

/// A queue of work: one worker thread (host engine), or the caller's own CUDA stream. Work runs in
/// the order it was submitted. The first exception of a piece of work is kept by its event; later
/// work still runs. Copies share the queue; the last one waits for a worker's queue to drain.
class Stream {
 public:
  /// A worker thread.
  Stream();
  /// The caller's CUDA stream (a cudaStream_t; null: the default stream) on that device, which must
  /// outlive every tensor that was made or used on it, and every plan made on it. `submit` runs
  /// work in a thread of the driver, where no CUDA call is allowed. cudaStreamPerThread, which is
  /// another stream in each thread, is refused. Throws Error(unsupported) when this build has no
  /// CUDA engine.
  static Stream of_cuda(void* cuda_stream, int device);
  /// Runs `work` after everything submitted before. Never blocks.
  Event submit(std::function<void()> work);
  /// An event that is complete when everything submitted so far has ended.
  Event record();
  /// Later work of this stream starts after `event`.
  void wait(const Event& event);
  /// Blocks until the queue is empty; throws the first exception since the last call.
  void synchronize();

  /// The CPU for a worker thread.
  Device device() const;
  /// The cudaStream_t; null for a worker thread, and for CUDA's default stream.
  void* native() const;

  struct Queue;
  explicit Stream(std::shared_ptr<Queue> queue) : queue_(std::move(queue)) {}
  const std::shared_ptr<Queue>& queue() const { return queue_; }

 private:
  std::shared_ptr<Queue> queue_;
};

}  // namespace ferry

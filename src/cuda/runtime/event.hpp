// Points of CUDA streams as events. The CPU polls: a blocking wait of CUDA knows no deadline.
#pragma once
#include <chrono>
#include <functional>

#include "core/stream_state.hpp"
#include "cuda/runtime/runtime.hpp"
#include "ferry/error.hpp"
#include "ferry/stream.hpp"

namespace ferry::cuda {

/// For waits on the CPU that the waits of a kernel bound: those name the peer, and begin when the
/// kernel runs, whatever came before it on its stream.
inline constexpr std::chrono::hours kUntilItEnds{24};

/// Waits until `done`: a short spin, then sleeps that grow to 200 µs. Throws Error(deadline) after
/// `deadline`, and what `on_wait` throws, which is asked at least every 40 ms.
void poll(const std::function<bool()>& done, std::chrono::nanoseconds deadline,
          const OnWait& on_wait);

/// An event whose end is a point of a stream, so that other streams can wait for it.
struct GpuPoint {
  virtual ~GpuPoint() = default;
  virtual GpuEvent gpu_event() const = 0;
};

/// A plain point of the caller's stream.
Event event_of(GpuEvent event, int device);
/// What a stream can wait for; null: an event of other work.
GpuEvent gpu_event_of(const Event& event);

}  // namespace ferry::cuda

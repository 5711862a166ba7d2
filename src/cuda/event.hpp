// Events of calls that run on a GPU. The CPU polls: a blocking wait of CUDA knows no deadline.
#pragma once
#include <chrono>
#include <functional>
#include <memory>

#include "core/stream_state.hpp"
#include "cuda/call.hpp"

namespace ferry::cuda {

class CudaPlan;

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

/// The end of a call.
class CallEvent final : public Event::State, public GpuPoint {
 public:
  CallEvent(std::weak_ptr<CudaEngine> engine, std::shared_ptr<CallRecord> record, GroupWords words,
            int device);
  bool ready() override;
  void wait(std::chrono::nanoseconds deadline, const OnWait& on_wait) override;
  /// Every call whose event somebody has marks its end at once.
  GpuEvent gpu_event() const override { return record_->marked(); }

 private:
  std::weak_ptr<CudaEngine> engine_;
  std::shared_ptr<CallRecord> record_;
  GroupWords words_;
  int device_;
};

/// The counts of a plan, which come before the end of its call.
class CountsEvent final : public Event::State {
 public:
  CountsEvent(std::weak_ptr<CudaEngine> engine, std::weak_ptr<CudaPlan> plan, GroupWords words,
              int device);
  bool ready() override;
  void wait(std::chrono::nanoseconds deadline, const OnWait& on_wait) override;

 private:
  std::weak_ptr<CudaEngine> engine_;
  std::weak_ptr<CudaPlan> plan_;
  GroupWords words_;
  int device_;
};

/// A plain point of the caller's stream.
Event event_of(GpuEvent event, int device);
/// What a stream can wait for; null: an event of other work.
GpuEvent gpu_event_of(const Event& event);

}  // namespace ferry::cuda

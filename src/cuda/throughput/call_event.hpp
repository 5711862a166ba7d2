// The events of calls that run on a GPU.
#pragma once
#include <chrono>
#include <memory>

#include "core/stream_state.hpp"
#include "cuda/runtime/event.hpp"
#include "cuda/throughput/call.hpp"

namespace ferry::cuda {

class CudaPlan;

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

}  // namespace ferry::cuda

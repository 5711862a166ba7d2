// What calls take on their streams: events around their kernels, looked at when later calls are
// made.
#pragma once
#include <cstdint>
#include <deque>
#include <memory>

#include "cuda/runtime/runtime.hpp"
#include "engine/late_tuner.hpp"

namespace ferry::cuda {

struct CallRecord;

/// Used by the call whose turn it is.
class CallClock {
 public:
  explicit CallClock(int device) : events_(std::make_shared<EventPool>(device, true)) {}

  struct Timing {
    std::uint64_t number = 0;  ///< as the tuner has it
    GpuEvent begin{}, end{};
    std::shared_ptr<const CallRecord> record{};
  };
  /// Now, on the stream; null: not possible.
  GpuEvent mark(cudaStream_t stream) { return events_->record(stream); }
  void add(Timing timing) { running_.push_back(std::move(timing)); }
  /// Tells of the calls that have ended. Never waits.
  void tell(engine::LateTuner& tuner);
  void forget() { running_.clear(); }

 private:
  std::shared_ptr<EventPool> events_;
  std::deque<Timing> running_{};  // in the order of the calls
};

}  // namespace ferry::cuda

#include "cuda/following_fan_out.hpp"

#include <cstddef>
#include <initializer_list>

namespace ferry::cuda {

const std::uint32_t* gate_of(const GroupView& group) {
  return reinterpret_cast<const std::uint32_t*>(group.control + group.layout.local +
                                                offsetof(LocalWords, gate));
}

ArrivalSteps make_steps(std::uint32_t& base) {
  ArrivalSteps steps;
  base += ArrivalSteps::kStride;
  steps.base = base;
  // A step's fan-out takes about half as long as its rows on the wire, so steps get shorter: each
  // is done when the next has come, and little is left after the last.
  for (const int end : {5, 9, 12, 14, 15, kProgressParts}) {
    steps.ends[steps.count++] = static_cast<std::uint8_t>(end);
  }
  return steps;
}

FollowingFanOut::FollowingFanOut(const FanOutParameters& parameters, SideStream& side,
                                 cudaStream_t stream, const FanOutTuning& tuning)
    : parameters_(parameters), side_(side), stream_(stream), tuning_(tuning) {
  error_ = launch_first_steps();
}

FollowingFanOut::~FollowingFanOut() {
  if (!joined_) static_cast<void>(side_.join(stream_));
}

cudaError_t FollowingFanOut::launch_first_steps() {
  const std::uint32_t* gate = gate_of(parameters_.group);
  const ArrivalSteps& steps = parameters_.steps;
  cudaError_t error = side_.wait_for(gate, steps.base + 1);
  if (error == cudaSuccess) error = launch_fan_out_places(parameters_, side_.stream());
  for (int step = 0; step + 1 < steps.count && error == cudaSuccess; ++step) {
    error = side_.wait_for(gate, steps.base + 2 + static_cast<std::uint32_t>(step));
    if (error != cudaSuccess) break;
    error = launch_fan_out_step(parameters_, step, side_.stream(), tuning_);
  }
  return error;
}

cudaError_t FollowingFanOut::finish(int sms) {
  if (error_ != cudaSuccess) return error_;
  error_ = side_.join(stream_);
  if (error_ != cudaSuccess) return error_;
  joined_ = true;
  FanOutParameters last = parameters_;
  last.sms = sms;
  error_ = launch_fan_out_step(last, last.steps.count - 1, stream_, tuning_);
  return error_;
}

}  // namespace ferry::cuda

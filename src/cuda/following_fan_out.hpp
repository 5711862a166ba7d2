// A fan-out that follows its dispatch step by step while the rows come, on another stream.
#pragma once
#include <cuda_runtime_api.h>

#include "cuda/kernels/sum_shape.hpp"
#include "cuda/kernels/throughput.hpp"
#include "cuda/side_stream.hpp"

namespace ferry::cuda {

/// The word that a dispatch raises as its rows come (ArrivalSteps).
const std::uint32_t* gate_of(const GroupView& group);

/// The next steps: the gate goes on from `base`, which grows.
ArrivalSteps make_steps(std::uint32_t& base);

class FollowingFanOut {
 public:
  /// Directly after the launch of the dispatch on `stream`, which has the same steps and opens the
  /// gate however it ends. All steps but the last are launched on `side`.
  FollowingFanOut(const FanOutParameters& parameters, SideStream& side, cudaStream_t stream,
                  const FanOutTuning& tuning = {});
  /// Nothing stays behind on the side stream when something fails.
  ~FollowingFanOut();
  FollowingFanOut(const FollowingFanOut&) = delete;
  FollowingFanOut& operator=(const FollowingFanOut&) = delete;

  /// Of the launches so far.
  cudaError_t error() const { return error_; }
  /// The last step, on the dispatch's stream with `sms` SMs; what follows there comes after all.
  cudaError_t finish(int sms);

 private:
  cudaError_t launch_first_steps();

  FanOutParameters parameters_;
  SideStream& side_;
  cudaStream_t stream_;
  FanOutTuning tuning_;
  cudaError_t error_;
  bool joined_ = false;
};

}  // namespace ferry::cuda

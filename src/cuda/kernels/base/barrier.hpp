// The barrier of a group as the engine launches it. Nothing here needs nvcc.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/kernels/base/group_view.hpp"

namespace ferry::cuda {

struct BarrierParameters {
  GroupView group{};
  CallSignature call{};
  Stage stage = Stage::barrier;
  StepStatus status = StepStatus::ok;  ///< no_room: takes part in another call, only to say that
  std::int64_t need_bytes = 0;         ///< then
  Failure* failure = nullptr;
  bool one_waits = false;              ///< commit: a process waits for a place, as this rank knows
  std::uint64_t* any_waits = nullptr;  ///< pinned: becomes 1 if some rank says so
};
cudaError_t launch_barrier(const BarrierParameters& parameters, cudaStream_t stream);

}  // namespace ferry::cuda

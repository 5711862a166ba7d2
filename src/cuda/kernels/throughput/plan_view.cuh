// What kernels read of a plan in device memory.
#pragma once
#include <cstddef>
#include <cstdint>

#include "cuda/kernels/base/wait.cuh"
#include "cuda/kernels/throughput/kernels.hpp"
#include "protocol/device_epoch.hpp"

namespace ferry::cuda::device {

/// What a plan says of a peer: rows that arrive there, and the first of this rank's.
struct PlannedRows {
  std::int64_t all;
  std::int64_t mine;
};
__device__ inline PlannedRows rows_at(const PlanView& plan, int peer) {
  if (peer >= plan.placement.ranks) return {};
  return {reinterpret_cast<const std::int64_t*>(plan.data + plan.layout.peer_rows)[peer],
          reinterpret_cast<const std::int64_t*>(plan.data + plan.layout.peer_row)[peer]};
}
__device__ __forceinline__ const std::uint64_t* state_of(const PlanView& plan) {
  return reinterpret_cast<const std::uint64_t*>(plan.data + plan.layout.state);
}
/// Whether a plan holds what it is asked for: its state is the generation in which that was made,
/// which must be of this epoch; 0: it was refused.
__device__ __forceinline__ bool holds(const GroupView& group, std::uint64_t state) {
  return protocol::DeviceEpoch<>::holds(state, load_relaxed(&local_words(group)->before));
}
__device__ __forceinline__ bool holds(const GroupView& group, const PlanView& plan) {
  return holds(group, load_relaxed(state_of(plan)));
}
/// The same as one tagged pair, mine below all; past 2^32 - 1 the plan is of no use anyway.
__device__ __forceinline__ std::byte* placed_at(const PlanView& plan, int peer) {
  return plan.data + plan.layout.placed + static_cast<std::size_t>(peer) * 16;
}

}  // namespace ferry::cuda::device

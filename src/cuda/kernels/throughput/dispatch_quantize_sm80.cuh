// Pushing rows that are quantised on the way by 16-byte loads and ordinary stores: before sm_90.
#pragma once
#include "cuda/kernels/base/quantize.cuh"
#include "cuda/kernels/throughput/progress.cuh"
#include "cuda/kernels/throughput/push_destinations.cuh"

namespace ferry::cuda::device {

/// Whole warp: one step of a token's row to all ranks that it goes to.
template <class T>
__device__ __forceinline__ void quantize_step(const DispatchParameters& p,
                                              const PushTarget* targets,
                                              const TokenDestinations& destinations,
                                              std::int64_t token, std::int64_t first) {
  using Part = LanePart<T>;
  const auto* row = p.x + token * p.row_bytes * static_cast<std::int64_t>(sizeof(T));
  Part part;
#pragma unroll
  for (int v = 0; v < Part::kVectors; ++v) {
    const std::int64_t channel = first + Part::channel(v);
    part.vectors[v] = {};
    if (channel < p.row_bytes) {
      part.vectors[v] = __ldg(
          reinterpret_cast<const uint4*>(row + channel * static_cast<std::int64_t>(sizeof(T))));
    }
  }
  part.quantize(p.round_scale);
  const int begin = first_destination(p, destinations, token);
#pragma unroll 1
  for (int i = 0; i < destinations.count; ++i) {
    const DeviceDestination to = destination_at(
        destinations, begin + i < destinations.count ? begin + i : begin + i - destinations.count);
    const PushTarget& target = targets[to.rank];
    std::byte* codes = target.rows + to.row * p.row_bytes;
#pragma unroll
    for (int v = 0; v < Part::kVectors; ++v) {
      const std::int64_t channel = first + Part::channel(v);
      if (channel < p.row_bytes) part.store(codes + channel, v);
    }
    const std::int64_t channel = first + Part::channel(0);
    if (threadIdx.x % kBlockLanes == 0 && channel < p.row_bytes) {
      target.scales[to.row * p.scale_columns + channel / kBlockChannels] = part.scale;
    }
  }
}

/// One row warp. Always true.
template <class T, bool kTells>
__device__ inline bool push_quantized_rows_by_stores(const DispatchParameters& p,
                                                     const PushShape& shape,
                                                     const PushTarget* targets,
                                                     std::uint64_t generation) {
  const std::int64_t stride = std::int64_t{gridDim.x} * shape.row_warps;
  std::int64_t token = std::int64_t{threadIdx.x / 32} * gridDim.x + blockIdx.x;
  PushProgress progress(p);
  TokenDestinations destinations = load_destinations(p, token);
  for (; token < p.plan.tokens; token += stride) {
    if (kTells && progress.due(token)) progress.pass(p, shape, generation, token);
    const TokenDestinations next = load_destinations(p, token + stride);
    for (std::int64_t first = 0; first < p.row_bytes; first += kStepChannels) {
      quantize_step<T>(p, targets, destinations, token, first);
    }
    destinations = next;
  }
  if (kTells) progress.pass_all(p, shape, generation);
  return true;
}

}  // namespace ferry::cuda::device

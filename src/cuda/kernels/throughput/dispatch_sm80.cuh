// Pushing rows by 16-byte loads and stores: before sm_90.
#pragma once
#include "cuda/kernels/throughput/dispatch_quantize_sm80.cuh"
#include "cuda/kernels/throughput/progress.cuh"
#include "cuda/kernels/throughput/push_destinations.cuh"

namespace ferry::cuda::device {

/// One row warp: pushes its tokens' rows, whole rows lane by lane. Always true.
template <bool kTells>
__device__ inline bool push_rows_by_stores(const DispatchParameters& p, const PushShape& shape,
                                           const PushTarget* targets, std::uint64_t generation) {
  constexpr int kUnroll = kTells ? 7 : 8;  // 4 KiB of a row in a warp's registers, or almost
  const std::int64_t stride = std::int64_t{gridDim.x} * shape.row_warps;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t words = p.row_bytes / 16;
  std::int64_t token = std::int64_t{threadIdx.x / 32} * gridDim.x + blockIdx.x;
  PushProgress progress(p);
  TokenDestinations destinations = load_destinations(p, token);
  for (; token < p.plan.tokens; token += stride) {
    if (kTells && progress.due(token)) progress.pass(p, shape, generation, token);
    const TokenDestinations next = load_destinations(p, token + stride);
    const int begin = first_destination(p, destinations, token);
    const auto* row = reinterpret_cast<const uint4*>(p.x + token * p.row_bytes);
    for (std::int64_t base = 0; base < words; base += 32 * kUnroll) {
      uint4 part[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const std::int64_t at = base + u * 32 + lane;
        if (at < words) part[u] = __ldg(row + at);
      }
#pragma unroll 1
      for (int i = 0; i < destinations.count; ++i) {
        const DeviceDestination to = destination_at(
            destinations,
            begin + i < destinations.count ? begin + i : begin + i - destinations.count);
        auto* target = reinterpret_cast<uint4*>(targets[to.rank].rows + to.row * p.row_bytes);
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const std::int64_t at = base + u * 32 + lane;
          if (at < words) target[at] = part[u];
        }
      }
    }
    destinations = next;
  }
  if (kTells) progress.pass_all(p, shape, generation);
  return true;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
// What dispatch_sm90.cuh does with bulk copies; nothing is brought ahead here.
__device__ inline DestinationWords ask_first_destinations(const DispatchParameters&,
                                                          const PushShape&) {
  return {};
}
__device__ inline void begin_rows(const DispatchParameters&, const PushShape&, std::byte*) {}
__device__ inline void drop_rows(const DispatchParameters&, const PushShape&, std::uint64_t,
                                 std::byte*) {}
template <bool kQuantizes, bool kTells>
__device__ inline bool push_rows(const DispatchParameters& p, const PushShape& shape,
                                 const PushTarget* targets, std::uint64_t generation, std::byte*,
                                 const DestinationWords&) {
  if constexpr (kQuantizes) {
    switch (p.x_dtype) {
      case Dtype::bf16:
        return push_quantized_rows_by_stores<Bf16, kTells>(p, shape, targets, generation);
      case Dtype::f16:
        return push_quantized_rows_by_stores<Fp16, kTells>(p, shape, targets, generation);
      default: return push_quantized_rows_by_stores<float, kTells>(p, shape, targets, generation);
    }
  } else {
    return push_rows_by_stores<kTells>(p, shape, targets, generation);
  }
}
#endif

}  // namespace ferry::cuda::device

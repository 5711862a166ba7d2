// Rows that are quantised on their way through the stages of dispatch_sm90.cuh: a stage that was
// filled with a piece of a row goes out as codes and scales.
#pragma once
#include "cuda/kernels/base/bulk_copy_sm90.cuh"
#include "cuda/kernels/base/quantize.cuh"
#include "cuda/kernels/throughput/push_destinations.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

namespace ferry::cuda::device {

/// Whole warp: `channels` elements of T in `piece` become codes in place, their scales behind.
/// Codes take less room than what they are made of, so they only overwrite what has been read.
template <class T>
__device__ __forceinline__ void quantize_piece(std::byte* piece, int channels, float* scales,
                                               bool round_scale) {
  constexpr int kTogether = 2;  // steps that hide each other's latency
  using Part = LanePart<T>;
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll 1
  for (int first = 0; first < channels; first += kTogether * kStepChannels) {
    Part parts[kTogether];
    const auto at = [&](int step, int v) {
      return first + step * kStepChannels + Part::channel(v);
    };
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
#pragma unroll
      for (int v = 0; v < Part::kVectors; ++v) {
        const int channel = at(i, v);
        parts[i].vectors[v] = {};
        if (channel < channels) {
          parts[i].vectors[v] =
              *reinterpret_cast<const uint4*>(piece + channel * static_cast<int>(sizeof(T)));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) parts[i].quantize(round_scale);
    __syncwarp();  // all lanes have read
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
#pragma unroll
      for (int v = 0; v < Part::kVectors; ++v) {
        if (at(i, v) < channels) parts[i].store(piece + at(i, v), v);
      }
      if (lane % kBlockLanes == 0 && at(i, 0) < channels) {
        scales[at(i, 0) / kBlockChannels] = parts[i].scale;
      }
    }
  }
  fence_proxy_async_shared();  // before the copy engine reads them
  __syncwarp();
}

/// The rows of a dispatch that quantises rows of T.
template <class T>
struct Quantized {
  /// Whole warp, after one lane has awaited the stage: makes of its piece what goes out.
  __device__ __forceinline__ static void prepare(const DispatchParameters& p,
                                                 const PushShape& shape, std::uint32_t bytes,
                                                 std::byte* stage, std::uint64_t* barrier,
                                                 std::uint32_t parity) {
    barrier_try_wait(barrier, parity);  // it has ended: its bytes are visible to this lane, too
    quantize_piece<T>(stage, static_cast<int>(bytes / sizeof(T)),
                      reinterpret_cast<float*>(stage + shape.piece), p.round_scale);
  }

  /// Whole warp: sends what prepare made of a piece of `bytes` to one peer.
  __device__ __forceinline__ static void send(const DispatchParameters& p, const PushShape& shape,
                                              const PushTarget& target, std::int32_t row, int piece,
                                              std::uint32_t bytes, const std::byte* stage) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const auto channels = bytes / static_cast<std::uint32_t>(sizeof(T));
    const std::int64_t first =
        std::int64_t{piece} * (shape.piece / static_cast<std::uint32_t>(sizeof(T)));
    const std::uint32_t blocks = (channels + kBlockChannels - 1) / kBlockChannels;
    const auto* made = reinterpret_cast<const float*>(stage + shape.piece);
    float* scales = target.scales + row * p.scale_columns + first / kBlockChannels;
    const bool aligned = p.scale_columns % 4 == 0;  // of every row and piece, to 16 bytes
    if (lane == 0) {
      bulk_store(target.rows + row * p.row_bytes + first, stage, channels);
      if (aligned) bulk_store(scales, made, blocks * 4);
    }
    if (aligned) return;
    for (std::uint32_t i = static_cast<std::uint32_t>(lane); i < blocks; i += 32) {
      scales[i] = made[i];
    }
  }
};

}  // namespace ferry::cuda::device

#endif

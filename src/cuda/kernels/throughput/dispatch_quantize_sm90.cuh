// Rows that are quantised on their way through the stages of dispatch_sm90.cuh: a stage that was
// filled with a piece of a row goes out as codes and scales.
#pragma once
#include "cuda/kernels/base/bulk_copy_sm90.cuh"
#include "cuda/kernels/base/quantize.cuh"
#include "cuda/kernels/throughput/push_destinations.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

namespace ferry::cuda::device {

/// Steps of a piece whose scales are made together, each by other lanes of a block.
template <class T>
constexpr int kStepsTogether = sizeof(T) == 4 ? 2 : 4;

/// Whole warp: of each block the largest values[s] of its lanes, for step s = lane % kSteps.
template <int kSteps>
__device__ __forceinline__ float largest_of_step(const float (&values)[kSteps]) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const auto keep = [&](float even, float odd,
                        int bit) {  // the other goes to the lane that keeps it
    const bool is_odd = (lane & bit) != 0;
    return fmaxf(is_odd ? odd : even, __shfl_xor_sync(~0u, is_odd ? even : odd, bit));
  };
  float most = keep(values[0], values[1], 1);
  if constexpr (kSteps == 4) {
    most = keep(most, keep(values[2], values[3], 1), 2);
  } else {
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
  }
  return fmaxf(most, __shfl_xor_sync(~0u, most, 4));
}

/// Whole warp: steps of a piece from channel `first` on become codes and scales.
template <class T>
__device__ __forceinline__ void quantize_steps(std::byte* piece, int first, int channels,
                                               float* scales, bool round_scale) {
  constexpr int kTogether = kStepsTogether<T>;
  using Part = LanePart<T>;
  const int lane = static_cast<int>(threadIdx.x % 32);
  Part parts[kTogether];
  float peaks[kTogether];
#pragma unroll
  for (int i = 0; i < kTogether; ++i) {
    const int step = first + i * kStepChannels;
#pragma unroll
    for (int v = 0; v < Part::kVectors; ++v) {
      const int channel = step + Part::channel(v);
      parts[i].vectors[v] = {};
      if (step < channels) {
        parts[i].vectors[v] =
            *reinterpret_cast<const uint4*>(piece + channel * static_cast<int>(sizeof(T)));
      }
    }
    peaks[i] = Peak<T>::value(parts[i].peak());
  }
  const BlockScale block = Part::scale_of(largest_of_step(peaks), round_scale);
  const int own = first + lane % kTogether * kStepChannels;
  __syncwarp();  // all lanes have read
  if (lane % kBlockLanes < kTogether && own < channels) {
    scales[own / kBlockChannels + lane / kBlockLanes] = block.scale;
  }
#pragma unroll
  for (int i = 0; i < kTogether; ++i) {
    const int step = first + i * kStepChannels;
    const float inv = __shfl_sync(~0u, block.inv, lane / kBlockLanes * kBlockLanes + i);
    if (step >= channels) break;
    parts[i].encode(inv);
#pragma unroll
    for (int v = 0; v < Part::kVectors; ++v) parts[i].store(piece + step + Part::channel(v), v);
  }
}

/// Whole warp: `channels` elements of T in `piece` become codes in place, their scales behind.
/// Codes take less room than what they are made of, so they only overwrite what has been read.
template <class T>
__device__ __forceinline__ void quantize_piece(std::byte* piece, int channels, float* scales,
                                               bool round_scale) {
  constexpr int kEach = kPerVector<T>;
  // A stage has room for whole steps. Scales must not see what lies behind the channels.
  for (int i = channels / kEach + static_cast<int>(threadIdx.x % 32);
       channels % kStepChannels != 0 && i < round_up(channels, kStepChannels) / kEach; i += 32) {
    reinterpret_cast<uint4*>(piece)[i] = {};
  }
  __syncwarp();
#pragma unroll 1
  for (int first = 0; first < channels; first += kStepsTogether<T> * kStepChannels) {
    quantize_steps<T>(piece, first, channels, scales, round_scale);
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

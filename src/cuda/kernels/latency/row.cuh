// What the row formats share: which of them a source uses, the piece of a row that a warp holds,
// quantised if it crosses so, and where a received row lands.
//
// A format is a file with a struct of its name, which stores the bytes of a row and takes them: LL
// (row_ll.cuh), LL128 (row_ll128.cuh), Simple (row_simple.cuh). send.cuh and receive.cuh walk over
// the rows. docs/design/cuda_latency.md lists what a new format touches.
#pragma once
#include "cuda/kernels/base/quantize.cuh"
#include "cuda/kernels/latency/launch_sizes.hpp"
#include "cuda/kernels/latency/view.hpp"

namespace ferry::cuda::device {

/// What a warp holds of a row at once.
inline constexpr int kWarpBytes = 32 * 16;

/// Whether rows of a source of so many tokens of type T cross as LL. All others cross as LL128 if
/// LatencyView::ll128, else as Simple.
template <class T>
__device__ __forceinline__ bool is_ll(const LatencyView& v, int tokens) {
  return is_ll_of(v, tokens, sizeof(T));
}

// Quantisation of a row: 16 channels a lane, 8 lanes for each scale. The same bits as
// core/number/quantize.hpp.

/// The values of 16 channels, unpacked.
template <class T>
__device__ __forceinline__ void unpack(const uint4* vectors, float* values) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T)); ++i) {
    const std::uint32_t words[4] = {vectors[i].x, vectors[i].y, vectors[i].z, vectors[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (sizeof(T) == 4) {
        values[4 * i + j] = __uint_as_float(words[j]);
      } else {
        values[8 * i + 2 * j] = Pair<T>::low(words[j]);
        values[8 * i + 2 * j + 1] = Pair<T>::high(words[j]);
      }
    }
  }
}

/// Whole warp: the codes of the lane's 16 channels; `scale` of its 8 lanes' block. Channels past
/// the end of the row are given as zeros.
template <class T>
__device__ __forceinline__ uint4 quantize_lane(const uint4* vectors, bool round_scale,
                                               float& scale) {
  float values[kLaneChannels];
  unpack<T>(vectors, values);
  auto largest = static_cast<std::int32_t>(number_detail::bits_of(kMinAmax));
#pragma unroll
  for (const float value : values) largest = max(largest, amax_bits(value));
#pragma unroll
  for (int distance = 4; distance > 0; distance /= 2) {
    largest = max(largest, __shfl_xor_sync(0xffffffff, largest, distance));
  }
  const BlockScale block = block_scale<E4m3>(__int_as_float(largest), round_scale);
  scale = block.scale;
  std::uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* v = values + 4 * i;
    words[i] = e4m3_pair(__fmul_rn(v[0], block.inv), __fmul_rn(v[1], block.inv)) |
               e4m3_pair(__fmul_rn(v[2], block.inv), __fmul_rn(v[3], block.inv)) << 16;
  }
  return {words[0], words[1], words[2], words[3]};
}

// Sending.

/// Vectors that a lane holds at once: those of kPartChannels channels.
template <class T>
inline constexpr int kLaneVectors = 2 * static_cast<int>(sizeof(T));

/// What a lane loads of kPartChannels channels from `begin` on; zeros past the end of the row.
template <class T, bool kQuantized>
__device__ __forceinline__ void load_piece(const std::byte* row, int begin, int end,
                                           uint4* vectors) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  constexpr int kEach = 16 / static_cast<int>(sizeof(T));  // channels of a vector
#pragma unroll
  for (int i = 0; i < kLaneVectors<T>; ++i) {
    constexpr int kStep = static_cast<int>(sizeof(T));  // vectors of a lane in one step
    const int channel =
        kQuantized ? begin + i / kStep * kStepChannels + lane * kLaneChannels + i % kStep * kEach
                   : begin + (i * 32 + lane) * kEach;
    vectors[i] = uint4{0, 0, 0, 0};
    if (channel < end) {
      vectors[i] = __ldg(
          reinterpret_cast<const uint4*>(row + static_cast<std::size_t>(channel) * sizeof(T)));
    }
  }
}

/// Vectors of a lane's share of a piece, as it crosses.
template <class T, bool kQuantized>
inline constexpr int kWireVectors = kQuantized ? 2 : kLaneVectors<T>;

/// The byte of a row at which vector `i` of this lane's share of a piece lies, which begins at
/// channel `begin`; of codes or of elements.
template <class T, bool kQuantized>
__device__ __forceinline__ std::size_t wire_byte(int begin, int i) {
  const auto channels = static_cast<std::size_t>(begin);
  const auto vector = static_cast<std::size_t>(i * 32) + threadIdx.x % 32;
  return channels * (kQuantized ? 1 : sizeof(T)) + vector * 16;
}

/// A lane's share of a piece, as it crosses.
template <class T, bool kQuantized>
struct WirePiece {
  static constexpr int kCount = kWireVectors<T, kQuantized>;
  uint4 vectors[kCount];
  float scale = 0;  ///< of the piece's block number `lane`

  __device__ __forceinline__ explicit WirePiece(const uint4* loaded, bool round_scale) {
    if constexpr (kQuantized) {
      float scales[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        vectors[i] =
            quantize_lane<T>(loaded + i * static_cast<int>(sizeof(T)), round_scale, scales[i]);
        scales[i] = __shfl_sync(kAllLanes, scales[i], static_cast<int>(threadIdx.x % 4) * 8);
      }
      scale = threadIdx.x % 8 < 4 ? scales[0] : scales[1];
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) vectors[i] = loaded[i];
    }
  }
};

// Receiving.

/// Rows of a block of the results: of an expert, or of a source.
template <bool kRanked>
__device__ __forceinline__ int block_rows(const LatencyView& v) {
  return static_cast<int>(kRanked ? v.capacity : v.group.ranks * v.capacity);
}

/// A slot of a received row; each lane has one.
struct LandingSlot {
  std::int32_t block = -1;  ///< of the results: expert or source; −1: the slot is not of this rank
  std::int32_t place = 0;   ///< in the block

  /// The lanes that have one.
  __device__ __forceinline__ std::uint32_t lanes() const {
    return __ballot_sync(kAllLanes, block >= 0);
  }
  /// Of the output; −1: none.
  template <bool kRanked>
  __device__ __forceinline__ std::int32_t row(const LatencyView& v) const {
    return block < 0 ? -1 : block * block_rows<kRanked>(v) + place;
  }
};

/// Rank-major: lane 0 stands for the row.
__device__ __forceinline__ LandingSlot ranked_slot(int source, int row) {
  if (threadIdx.x % 32 != 0) return {};
  return {source, row};
}

}  // namespace ferry::cuda::device

// Simple rows: the data as it is, and behind a fence a tag for each part of the row. Two more trips
// than LL and LL128, but nothing is asked of links, types, ranks or sizes.
#pragma once
#include "core/number/ue8m0.hpp"
#include "cuda/kernels/base/access.cuh"
#include "cuda/kernels/latency/kernels.hpp"
#include "cuda/kernels/latency/row.cuh"
#include "cuda/kernels/latency/shares.cuh"

namespace ferry::cuda::device {

/// Whole warp: `bytes` (a multiple of 4) from one row to the rows of the output that `lanes` have.
template <class Vector>
__device__ __forceinline__ void copy_part(const std::byte* from, std::byte* out, std::size_t stride,
                                          int bytes, std::int32_t own_row, std::uint32_t lanes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
  constexpr int kAtOnce = 2;  // as many as the registers hold
#else
  constexpr int kAtOnce = 4;
#endif
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int count = bytes / static_cast<int>(sizeof(Vector));
#pragma unroll 1
  for (int base = lane; base - lane < count; base += 32 * kAtOnce) {
    Vector data[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (base + 32 * i < count) data[i] = reinterpret_cast<const Vector*>(from)[base + 32 * i];
    }
#pragma unroll 1
    for (std::uint32_t left = lanes; left != 0; left &= left - 1) {
      const int row = __shfl_sync(kAllLanes, own_row, __ffs(static_cast<int>(left)) - 1);
      auto* to = reinterpret_cast<Vector*>(out + static_cast<std::size_t>(row) * stride);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (base + 32 * i < count) to[base + 32 * i] = data[i];
      }
    }
  }
}

/// Whole warp: the scales of channels begin … end of a row, to the columns of all landing slots.
template <bool kRanked>
__device__ inline void copy_scales(const LatencyDispatchParameters& p, const float* from, int begin,
                                   int end, const LandingSlot& slot, std::uint32_t lanes) {
  const LatencyView& v = p.view;
  const bool packed = p.format == LatencyFormat::e4m3_packed;
  const int each = packed ? 4 * 128 : 128;
  const auto all = static_cast<int>((v.hidden + 127) / 128);
  const auto columns = static_cast<std::size_t>((v.hidden + each - 1) / each);
  const auto rows = static_cast<std::size_t>(block_rows<kRanked>(v));
  const int lane = static_cast<int>(threadIdx.x % 32), last = (end + each - 1) / each;
#pragma unroll 1
  for (int base = begin / each; base < last; base += 32) {
    const int column = base + lane;
    std::uint32_t word = 0;
    if (column < last && !packed) word = __float_as_uint(from[column]);
    if (column < last && packed) {
      const int most = min(4, all - 4 * column);
#pragma unroll 1
      for (int i = 0; i < most; ++i) {
        word |= static_cast<std::uint32_t>(ue8m0_from_scale(from[4 * column + i])) << (8 * i);
      }
    }
#pragma unroll 1
    for (std::uint32_t left = lanes; left != 0; left &= left - 1) {
      const int k = __ffs(static_cast<int>(left)) - 1;
      const auto block = static_cast<std::size_t>(__shfl_sync(kAllLanes, slot.block, k));
      const auto place = static_cast<std::size_t>(__shfl_sync(kAllLanes, slot.place, k));
      if (column < last) {
        static_cast<std::uint32_t*>(
            p.scales)[(block * columns + static_cast<std::size_t>(column)) * rows + place] = word;
      }
    }
  }
}

template <class T, bool kQuantized>
struct Simple {
  static constexpr std::size_t kBytes = kQuantized ? 1 : sizeof(T);  // of a channel

  /// Whole warp: a piece that begins at channel `begin`, of a row of which `end` is the last.
  __device__ __forceinline__ static void store(const WirePiece<T, kQuantized>& wire,
                                               std::byte* slot, std::size_t scale_at, int begin,
                                               int end) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    if constexpr (kQuantized) {
      const int block = begin / 128 + lane;
      if (lane < 8 && block * 128 < end) {
        reinterpret_cast<float*>(slot + scale_at)[block] = wire.scale;
      }
    }
#pragma unroll
    for (int i = 0; i < wire.kCount; ++i) {
      if constexpr (kQuantized) {
        const int channel = begin + i * kStepChannels + lane * kLaneChannels;
        if (channel < end) *reinterpret_cast<uint4*>(slot + channel) = wire.vectors[i];
      } else {
        constexpr int kEach = 16 / static_cast<int>(sizeof(T));
        const int channel = begin + (i * 32 + lane) * kEach;
        if (channel < end) {
          *reinterpret_cast<uint4*>(slot + static_cast<std::size_t>(channel) * sizeof(T)) =
              wire.vectors[i];
        }
      }
    }
  }

  /// One lane for each destination, behind the data: the parts first … last are there.
  __device__ __forceinline__ static void announce(const LatencyPlaces& at, int dest, int token,
                                                  int first, int last) {
    std::uint32_t* tags = at.row_tags(at.v.peers[dest], at.v.line[dest], token);
    fence_system();
#pragma unroll 1
    for (int part = first; part <= last; ++part) store_relaxed(tags + part, at.tag());
  }

  /// Whole warp: the parts first … last of a row that are here, to all landing slots.
  template <bool kRanked>
  __device__ static void copy(const LatencyDispatchParameters& p, const std::byte* row, int first,
                              int last, const LandingSlot& slot, std::uint32_t lanes) {
    const LatencyView& v = p.view;
    const PartShape parts(v);
    const std::size_t row_bytes = static_cast<std::size_t>(v.hidden) * kBytes;
    const int begin = parts.begin(first), end = parts.end(v, last);
    const std::size_t skip = static_cast<std::size_t>(begin) * kBytes;
    const int bytes = (end - begin) * static_cast<int>(kBytes);
    const std::int32_t own_row = slot.template row<kRanked>(v);
    if (row_bytes % 16 == 0) {
      copy_part<uint4>(row + skip, p.out + skip, row_bytes, bytes, own_row, lanes);
    } else {
      copy_part<std::uint32_t>(row + skip, p.out + skip, row_bytes, bytes, own_row, lanes);
    }
    if constexpr (kQuantized) {
      copy_scales<kRanked>(p, reinterpret_cast<const float*>(row + v.layout.scale_at), begin, end,
                           slot, lanes);
    }
  }
};

}  // namespace ferry::cuda::device

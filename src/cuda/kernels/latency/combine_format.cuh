// Combine rows with a quantised wire format (CombineFormat): 16 channels a lane, 8 lanes for each
// block of 128 channels. The same bits as core/number/quantize.hpp and logfmt.hpp.
#pragma once
#include "core/number/logfmt.hpp"
#include "cuda/kernels/latency/row.cuh"

namespace ferry::cuda::device {

/// Codes and scales (CombineFormat::e4m3).
struct E4m3Codes {
  static constexpr CombineFormat kFormat = CombineFormat::e4m3;
  uint4 codes;
  float scale;

  /// Whole warp. `vectors`: of T, zeros past the end of the row.
  template <class T>
  __device__ __forceinline__ void encode(const uint4* vectors) {
    codes = quantize_lane<T>(vectors, false, scale);
  }
  /// One lane; `channel` is its first, inside the row.
  __device__ __forceinline__ void store(std::byte* row, const CombineRowLayout& layout,
                                        int channel) const {
    *reinterpret_cast<uint4*>(row + channel) = codes;
    if (threadIdx.x % 8 != 0) return;
    reinterpret_cast<float*>(row + layout.e4m3_scales)[channel / kBlockChannels] = scale;
  }
  __device__ __forceinline__ void load(const std::byte* row, const CombineRowLayout& layout,
                                       int channel) {
    codes = *reinterpret_cast<const uint4*>(row + channel);
    scale = reinterpret_cast<const float*>(row + layout.e4m3_scales)[channel / kBlockChannels];
  }
  /// visit(i, value of channel i) for the lane's channels.
  template <class Visit>
  __device__ __forceinline__ void decode(const Visit& visit) const {
    const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) {
      const auto code = static_cast<std::uint8_t>(words[i / 4] >> (8 * (i % 4)));
      visit(i, __fmul_rn(to_float(E4m3{code}), scale));
    }
  }
};

/// LogFMT-10: low and high bits of the codes, and the block's range.
struct LogfmtCodes {
  static constexpr CombineFormat kFormat = CombineFormat::logfmt10;
  uint4 low;
  std::uint32_t high;
  LogfmtRange range;

  template <class T>
  __device__ __forceinline__ void encode(const uint4* vectors) {
    float values[kLaneChannels];
    unpack<T>(vectors, values);
    std::int32_t most = 0, least = 0x7fffffff;
#pragma unroll
    for (const float value : values) {
      most = max(most, logfmt_high_bits(value));
      least = min(least, logfmt_low_bits(value));
    }
#pragma unroll
    for (int distance = kBlockLanes / 2; distance > 0; distance /= 2) {
      most = max(most, __shfl_xor_sync(~0u, most, distance));
      least = min(least, __shfl_xor_sync(~0u, least, distance));
    }
    range = logfmt_range(most, least);
    const LogfmtEncoder encoder(range);
    std::uint32_t words[4] = {};
    high = 0;
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) {
      const auto code = static_cast<std::uint32_t>(encoder.code(values[i]));
      words[i / 4] |= (code & 0xff) << (8 * (i % 4));
      high |= code >> 8 << (2 * i);
    }
    low = {words[0], words[1], words[2], words[3]};
  }
  __device__ __forceinline__ void store(std::byte* row, const CombineRowLayout& layout,
                                        int channel) const {
    *reinterpret_cast<uint4*>(row + channel) = low;
    *reinterpret_cast<std::uint32_t*>(row + layout.logfmt_high + channel / 4) = high;
    if (threadIdx.x % 8 != 0) return;
    *range_of(row, layout, channel) = {range.lowest, range.step};
  }
  __device__ __forceinline__ void load(const std::byte* row, const CombineRowLayout& layout,
                                       int channel) {
    low = *reinterpret_cast<const uint4*>(row + channel);
    high = *reinterpret_cast<const std::uint32_t*>(row + layout.logfmt_high + channel / 4);
    const float2 both = *range_of(const_cast<std::byte*>(row), layout, channel);
    range = {both.x, both.y};
  }
  template <class Visit>
  __device__ __forceinline__ void decode(const Visit& visit) const {
    const LogfmtDecoder decoder(range);
    const std::uint32_t words[4] = {low.x, low.y, low.z, low.w};
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) {
      const std::uint32_t code = (words[i / 4] >> (8 * (i % 4)) & 0xff) | (high >> (2 * i) & 3)
                                                                              << 8;
      visit(i, decoder.value(static_cast<std::int32_t>(code)));
    }
  }

 private:
  __device__ __forceinline__ static float2* range_of(std::byte* row, const CombineRowLayout& layout,
                                                     int channel) {
    return reinterpret_cast<float2*>(row + layout.logfmt_ranges) + channel / kBlockChannels;
  }
};

}  // namespace ferry::cuda::device

// LL rows, of few tokens, and LL sums of a combine: every 4 bytes carry their generation
// (base/message.cuh), so that no fence and no tag comes behind the data, and whoever waits for it
// has it. Twice the bytes, a trip less.
//
// Source and receiver decide alike: by the number of tokens, which the header tells, and by what is
// the same on all ranks.
#pragma once
#include "cuda/kernels/base/access.cuh"
#include "cuda/kernels/latency/row.cuh"
#include "cuda/kernels/latency/wait.cuh"

namespace ferry::cuda::device {

/// Where a pair of words of the vector at byte `at` of a row lies: the 32 pairs that a warp stores
/// at once lie together.
__device__ __forceinline__ std::size_t ll_offset(std::size_t at, int pair) {
  constexpr std::size_t kStep = kWarpBytes;
  return at / kStep * 2 * kStep + static_cast<std::size_t>(pair) * kStep + at % kStep;
}

__device__ __forceinline__ void store_ll(std::byte* slot, std::size_t at, const uint4& vector,
                                         std::uint64_t tag) {
  store_pair(slot + ll_offset(at, 0), std::uint64_t{vector.y} << 32 | vector.x, tag);
  store_pair(slot + ll_offset(at, 1), std::uint64_t{vector.w} << 32 | vector.z, tag);
}

/// A pair of words, at its ll_offset. False: not all of it is here.
__device__ __forceinline__ bool load_pair(const std::byte* at, std::uint32_t tag, uint2& data) {
  TaggedPair pair;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(pair.low), "=l"(pair.high)
               : "l"(at)
               : "memory");
  data = {static_cast<std::uint32_t>(pair.low), static_cast<std::uint32_t>(pair.high)};
  return is_word_of(pair.low, tag) && is_word_of(pair.high, tag);
}
__device__ __forceinline__ bool load_ll(const std::byte* slot, std::size_t at, std::uint32_t tag,
                                        uint4& vector) {
  uint2 low, high;
  const bool first = load_pair(slot + ll_offset(at, 0), tag, low);
  const bool second = load_pair(slot + ll_offset(at, 1), tag, high);
  vector = {low.x, low.y, high.x, high.y};
  return first && second;
}

// Places, as in LatencyPlaces.

__device__ __forceinline__ std::byte* ll_row(const LatencyPlaces& at, std::byte* base, int source,
                                             int token) {
  return base + at.v.layout.ll_rows +
         (at.line(source) * kLLTokens + static_cast<std::size_t>(token)) * at.v.layout.ll_row_slot;
}
/// Of scale 0 of a row.
__device__ __forceinline__ std::uint64_t* ll_scales(const LatencyPlaces& at, std::byte* row) {
  return reinterpret_cast<std::uint64_t*>(row + at.v.layout.ll_scale_at);
}
/// The sum that `rank` makes for a token.
__device__ __forceinline__ std::byte* ll_sum(const LatencyPlaces& at, std::byte* base, int rank,
                                             int token) {
  return base + at.v.layout.ll_sums +
         (at.line(rank) * kLLTokens + static_cast<std::size_t>(token)) * at.v.layout.ll_scale_at;
}

/// LL, of few tokens: pieces of 512 bytes.
template <class T, bool kWithScales>
struct LL {
  static constexpr bool kQuantized = kWithScales;
  static constexpr int kChannelBytes = kQuantized ? 1 : static_cast<int>(sizeof(T));
  static constexpr int kVectors = 1, kBytes = kWarpBytes;
  static constexpr bool kPollsEarly = true;

  __device__ static bool serves(const LatencyView& v, int tokens) { return is_ll<T>(v, tokens); }
  __device__ static std::byte* row(const LatencyPlaces& at, std::byte* own, int source, int token) {
    return ll_row(at, own, source, token);
  }

  /// Whole warp: a piece that begins at channel `begin`, of a row of which `end` is the last.
  __device__ __forceinline__ static void store(const LatencyPlaces& at,
                                               const WirePiece<T, kQuantized>& wire, std::byte* row,
                                               int begin, int end) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    if constexpr (kQuantized) {
      const int block = begin / 128 + lane;
      if (lane < 8 && block * 128 < end) {
        store_word(ll_scales(at, row) + block, __float_as_uint(wire.scale), at.tag());
      }
    }
    const std::size_t last = static_cast<std::size_t>(end) * (kQuantized ? 1 : sizeof(T));
#pragma unroll
    for (int i = 0; i < wire.kCount; ++i) {
      const std::size_t byte = wire_byte<T, kQuantized>(begin, i);
      if (byte < last) store_ll(row, byte, wire.vectors[i], at.tag());
    }
  }

  /// What one lane gets of a piece.
  struct Piece {
    uint4 vectors[kVectors];
    std::uint32_t scale;

    /// `bytes`: of the row from here on. False: not all of it is here.
    __device__ bool poll(const LatencyPlaces& at, std::byte* row, int number, int bytes) {
      constexpr int kScales = kQuantized ? kBytes / 128 : 0;
      const int lane = static_cast<int>(threadIdx.x % 32);
      bool here = true;
      if (lane * 16 < bytes) {
        here = load_ll(row, static_cast<std::size_t>(number * kBytes + lane * 16), at.tag(),
                       vectors[0]);
      }
      if (lane < kScales && lane * 128 < bytes) {
        const std::uint64_t word = load_relaxed(ll_scales(at, row) + number * kScales + lane);
        here = here && is_word_of(word, at.tag());
        scale = static_cast<std::uint32_t>(word);
      }
      return here;
    }
    __device__ void open() {}
  };
};

}  // namespace ferry::cuda::device

// LL rows, of few tokens: every 4 bytes carry their generation (base/message.cuh), so that no fence
// and no tag comes behind the data, and whoever waits for it has it. Twice the bytes, a trip less.
//
// Source and receiver decide alike: by the number of tokens, which the header tells, and by what is
// the same on all ranks.
#pragma once
#include "cuda/kernels/latency/wait.cuh"

namespace ferry::cuda::device {

/// What a warp holds of a row at once.
inline constexpr int kSliceBytes = 32 * 16;

/// Whether rows of a source of so many tokens of type T cross this way. Wider types have no
/// registers left for it.
template <class T>
__device__ __forceinline__ bool is_ll(const LatencyView& v, int tokens) {
  return is_ll_of(v, tokens, sizeof(T));
}

/// Where the half of the vector at byte `at` of a row lies: the 32 halves that a warp stores at
/// once lie together.
__device__ __forceinline__ std::size_t ll_offset(std::size_t at, int half) {
  constexpr std::size_t kStep = kSliceBytes;
  return at / kStep * 2 * kStep + static_cast<std::size_t>(half) * kStep + at % kStep;
}

__device__ __forceinline__ void store_ll(std::byte* slot, std::size_t at, const uint4& vector,
                                         std::uint64_t tag) {
  store_pair(slot + ll_offset(at, 0), std::uint64_t{vector.y} << 32 | vector.x, tag);
  store_pair(slot + ll_offset(at, 1), std::uint64_t{vector.w} << 32 | vector.z, tag);
}

/// Half a vector, at its ll_offset. False: not all of it is here.
__device__ __forceinline__ bool load_half(const std::byte* at, std::uint32_t tag, uint2& data) {
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
  const bool first = load_half(slot + ll_offset(at, 0), tag, low);
  const bool second = load_half(slot + ll_offset(at, 1), tag, high);
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

}  // namespace ferry::cuda::device

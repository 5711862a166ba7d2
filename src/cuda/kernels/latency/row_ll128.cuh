// LL128 rows: of every 128 bytes of a row the last 4 are the generation, so that no fence and no
// tag comes behind the rows, and whoever waits for a line has it. An eighth (of codes) or a
// sixteenth more bytes, two trips less: a fence waits until all that was sent before has arrived,
// and then the tag sets out. That rows of this generation have arrived before those of the next but
// one are sent is known by the credits of the receiver, and by the end of the kernel.
//
// The words that the generations displace, and the scales, lie in one more line behind every
// kPartChannels channels. A warp stores a line at once, 8 lanes 16 bytes each. PTX does not promise
// that it is seen at once; NCCL's LL128 protocol stands on it, too. cuda/runtime/links.hpp says
// between which GPUs that is done.
#pragma once
#include "cuda/kernels/latency/row.cuh"

namespace ferry::cuda::device {

static_assert(kLineBytes == 128 && kWarpBytes % kLineBytes == 0, "8 lanes store a line");

/// A lane's share of a piece of kPartChannels channels are so many vectors, 512 bytes apart; behind
/// them comes the line of the displaced words.
FERRY_FN constexpr int ll128_piece_bytes(int vectors) {
  return vectors * kWarpBytes + static_cast<int>(kLineBytes);
}

/// Lanes of a warp that have a line's end.
__device__ __forceinline__ bool ends_line() {
  return threadIdx.x % 8 == 7;
}
/// Whether this lane's vector `i` lies in a line that begins within the first `bytes` of a piece.
__device__ __forceinline__ bool has_line(int i, int bytes) {
  return i * kWarpBytes + static_cast<int>(threadIdx.x % 32 / 8) * static_cast<int>(kLineBytes) <
         bytes;
}

__device__ __forceinline__ void store_line(std::byte* at, const uint4& part) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(part.x),
               "r"(part.y), "r"(part.z), "r"(part.w)
               : "memory");
}
__device__ __forceinline__ uint4 load_line(const std::byte* at) {
  uint4 part;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(part.x), "=r"(part.y), "=r"(part.z), "=r"(part.w)
               : "l"(at)
               : "memory");
  return part;
}

// The line behind a piece, of which lanes 0 … 7 have a vector each: component i of lane q < 4 is
// the displaced word of line 4 i + q; with codes, which are two vectors, components 2 and 3 are the
// scales of blocks q and 4 + q. The last word of lane 7 is the generation.

/// Whole warp: puts generations into a lane's share of a piece; gives what it has of the line
/// behind.
template <int kVectors>
__device__ __forceinline__ uint4 pack_ll128(uint4* vectors, float scale, std::uint32_t tag) {
  const int lane = static_cast<int>(threadIdx.x % 32), quarter = lane % 4;
  std::uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    words[i] = __shfl_sync(kAllLanes, vectors[i].w, quarter * 8 + 7);
    if (ends_line()) vectors[i].w = tag;
  }
  if constexpr (kVectors == 2) {
    words[2] = __shfl_sync(kAllLanes, __float_as_uint(scale), quarter);
    words[3] = __shfl_sync(kAllLanes, __float_as_uint(scale), 4 + quarter);
  }
  return {words[0], words[1], words[2], lane == 7 ? tag : words[3]};
}

/// Whole warp: the opposite. The scale is that of the piece's block number `lane`, for lanes < 8.
template <int kVectors>
__device__ __forceinline__ float unpack_ll128(uint4* vectors, const uint4& behind) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::uint32_t words[4] = {behind.x, behind.y, behind.z, behind.w};
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const std::uint32_t word = __shfl_sync(kAllLanes, words[i], lane / 8);
    if (ends_line()) vectors[i].w = word;
  }
  if constexpr (kVectors != 2) return 0;
  const std::uint32_t low = __shfl_sync(kAllLanes, words[2], lane % 4);
  const std::uint32_t high = __shfl_sync(kAllLanes, words[3], lane % 4);
  return __uint_as_float(lane < 4 ? low : high);
}

/// Whole warp: stores a piece of which `bytes` belong to the row.
template <int kVectors>
__device__ __forceinline__ void store_ll128(std::byte* piece, int bytes, const uint4* vectors,
                                            const uint4& behind) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  std::byte* at = piece + lane * 16;
  __syncwarp();  // lanes of a line store together
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (has_line(i, bytes)) store_line(at + i * kWarpBytes, vectors[i]);
  }
  if (lane < 8) store_line(at + kVectors * kWarpBytes, behind);
}

/// Whole warp: loads it. False in some lane: not all of it is here.
template <int kVectors>
__device__ __forceinline__ bool load_ll128(const std::byte* piece, int bytes, std::uint32_t tag,
                                           uint4* vectors, uint4& behind) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::byte* at = piece + lane * 16;
  bool here = true;
  __syncwarp();  // lanes of a line load together
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    vectors[i] = uint4{0, 0, 0, 0};  // what was there need not be kept between two polls
    if (has_line(i, bytes)) vectors[i] = load_line(at + i * kWarpBytes);
  }
  behind = uint4{0, 0, 0, 0};
  if (lane < 8) behind = load_line(at + kVectors * kWarpBytes);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (ends_line() && has_line(i, bytes)) here = here && vectors[i].w == tag;
  }
  if (lane == 7) here = here && behind.w == tag;
  return here;
}

/// LL128, of more tokens: pieces of kPartChannels channels.
template <class T, bool kWithScales>
struct LL128 {
  static constexpr bool kQuantized = kWithScales;
  static constexpr int kChannelBytes = kQuantized ? 1 : static_cast<int>(sizeof(T));
  static constexpr int kVectors = kWireVectors<T, kQuantized>, kBytes = kVectors * kWarpBytes;
  static constexpr bool kPollsEarly = kQuantized;  // else there are no registers for it

  __device__ static bool serves(const LatencyView& v, int tokens) { return !is_ll<T>(v, tokens); }
  __device__ static std::byte* row(const LatencyPlaces& at, std::byte* own, int source, int token) {
    return at.row(own, source, token);
  }

  /// Whole warp: packs a piece, once for all destinations; gives what this lane has of the line
  /// behind it.
  __device__ __forceinline__ static uint4 pack(WirePiece<T, kQuantized>& wire, std::uint32_t tag) {
    return pack_ll128<kVectors>(wire.vectors, wire.scale, tag);
  }
  /// Whole warp: stores it; it begins at channel `begin` of a row, of which `end` is the last.
  __device__ __forceinline__ static void store(const WirePiece<T, kQuantized>& wire,
                                               const uint4& behind, std::byte* row, int begin,
                                               int end) {
    store_ll128<kVectors>(row + begin / kPartChannels * ll128_piece_bytes(kVectors),
                          (end - begin) * kChannelBytes, wire.vectors, behind);
  }

  struct Piece {
    uint4 vectors[kVectors];
    uint4 behind;
    std::uint32_t scale;

    __device__ bool poll(const LatencyPlaces& at, std::byte* row, int number, int bytes) {
      return load_ll128<kVectors>(row + number * ll128_piece_bytes(kVectors), bytes, at.tag(),
                                  vectors, behind);
    }
    /// When all of it is here.
    __device__ void open() { scale = __float_as_uint(unpack_ll128<kVectors>(vectors, behind)); }
  };
};

}  // namespace ferry::cuda::device

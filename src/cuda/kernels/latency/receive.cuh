// Latency dispatch, the receiving half: the headers tell where every row goes while the rows are in
// flight; then one warp takes one part of one row to each of its experts.
#pragma once
#include "core/number/ue8m0.hpp"
#include "cuda/kernels/latency/rank_major.cuh"
#include "cuda/kernels/latency/send.cuh"

namespace ferry::cuda::device {

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

/// One lane: where its slot goes, by its word of the header. False: it says what cannot be.
__device__ inline bool find_landing(const LatencyDispatchParameters& p, const LatencyPlaces& at,
                                    const Arrivals& arrivals, int source, std::uint32_t word,
                                    LandingSlot& slot) {
  const LatencyView& v = p.view;
  slot = {};
  if (word == kNoPlace) return true;
  slot.block = static_cast<std::int32_t>(word >> 16);
  slot.place = static_cast<std::int32_t>(word & 0xffff);
  if (slot.block >= arrivals.experts) return false;
  if (arrivals.numbers != nullptr) {
    slot.place += arrivals.numbers[source * arrivals.experts + slot.block];
  } else {
#pragma unroll 1
    for (int s = 0; s < source; ++s) {
      if (arrivals.words.tokens(v, s) > 0) slot.place += load_number(at, s, slot.block);
    }
  }
  return slot.place >= 0 && slot.place < block_rows<false>(v);
}

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

/// Rank-major: lane 0 stands for the row.
__device__ __forceinline__ LandingSlot ranked_slot(int source, int row) {
  if (threadIdx.x % 32 != 0) return {};
  return {source, row};
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

/// Whole warp: what is remembered of a row for the combine, and whose token it is.
__device__ inline void note_landing(const LatencyDispatchParameters& p, int source, int token,
                                    const LandingSlot& slot, std::uint32_t weight) {
  const LatencyView& v = p.view;
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (lane >= v.topk) return;
  const std::size_t entry =
      (static_cast<std::size_t>(source) * static_cast<std::size_t>(v.capacity) +
       static_cast<std::size_t>(token)) *
          static_cast<std::size_t>(v.topk) +
      static_cast<std::size_t>(lane);
  const std::int32_t row = slot.row<false>(v);
  p.slots[entry] = row;
  if (row >= 0) p.source_token[row] = token;
  if (p.slot_weights != nullptr) p.slot_weights[entry] = __uint_as_float(weight);
}

/// What a lane was told of its slot of a row, or why it was not.
struct ToldSlot {
  WaitStatus came;
  std::uint32_t word;    ///< kNoPlace: the slot is not of this rank
  std::uint32_t weight;  ///< its bits
};

/// What receivers of rows have in common, however the rows cross.
struct Receiver {
  const LatencyDispatchParameters& p;
  const LatencyPlaces& at;
  LatencyCall& call;
  const Arrivals& arrivals;

  /// Whole warp: where a row goes. `notes`: it is remembered. False: the group has failed.
  __device__ __forceinline__ bool land(int source, int token, const ToldSlot& told, bool notes,
                                       LandingSlot& slot) const {
    if (__any_sync(kAllLanes, told.came == WaitStatus::stop)) return false;
    const bool missing = __any_sync(kAllLanes, told.came != WaitStatus::here) != 0;
    const bool good = missing || find_landing(p, at, arrivals, source, told.word, slot);
    if (!__all_sync(kAllLanes, good)) {
      return fail_latency(p.view, call, Reason::violation, Stage::latency_rows, source,
                          {0, 0, token});
    }
    if (notes) note_landing(p, source, token, slot, told.weight);
    if (missing) call.lost = true;
    return true;
  }
};

/// The receiving half on one warp, of rows with tags behind fences.
template <class T, bool kQuantized, bool kRanked>
struct RowReceiver : Receiver {
  static constexpr std::size_t kBytes = kQuantized ? 1 : sizeof(T);  // of a channel

  /// `most`: tokens of a source. False: the group has failed.
  __device__ bool receive(int most) {
    const LatencyView& v = p.view;
    const int ranks = v.group.ranks, blocks = static_cast<int>(gridDim.x);
    const int group = parts_at_once(most * ranks, v.parts, blocks * kLatencyWarps);
    const int units = (v.parts + group - 1) / group;
    // The other end of the block than the senders': who has not sent receives first.
    const int warp = kLatencyWarps - 1 - static_cast<int>(threadIdx.x / 32);
#pragma unroll 1
    for (int unit = warp * blocks + static_cast<int>(blockIdx.x); unit < most * ranks * units;
         unit += blocks * kLatencyWarps) {
      const int row = unit / units, first = (unit - row * units) * group;
      const int token = row / ranks, source = row - token * ranks;
      const int tokens = arrivals.words.tokens(v, source);
      if (token >= tokens || is_ll<T>(v, tokens)) continue;
      const int last = min(first + group, v.parts) - 1;
      if constexpr (kRanked) {
        if (!receive_ranked(source, token, first, last)) return false;
      } else {
        if (!receive_parts(source, token, first, last)) return false;
      }
    }
    return true;
  }

 private:
  __device__ bool receive_parts(int source, int token, int first, int last) {
    const LatencyView& v = p.view;
    const int lane = static_cast<int>(threadIdx.x % 32);
    std::byte* own = v.sources[source];
    // Asked for early: usually the place is there, and often the tag.
    const std::uint32_t* tag = at.row_tags(own, source, token) + first + lane;
    bool here = first + lane > last;
    std::uint32_t word = kNoPlace, weight = 0;
    WaitStatus came = WaitStatus::here;
    if (lane < v.topk) {
      const std::uint64_t* place = at.places(own, source) + token * v.topk + lane;
      const std::uint64_t now = load_relaxed(place);
      if (!here) here = load_acquire(tag) == at.tag();
      word = static_cast<std::uint32_t>(now);
      if (!is_word_of(now, at.tag())) {
        came = await_word(v, call, place, at.tag(), source, Stage::latency_rows, word);
      }
      if (came == WaitStatus::here && first == 0 && p.slot_weights != nullptr) {
        came = await_word(v, call, at.header_weights(own, source) + token * v.topk + lane, at.tag(),
                          source, Stage::latency_rows, weight);
      }
    }
    LandingSlot slot;
    if (!land(source, token, {came, word, weight}, first == 0, slot)) return false;
    const std::uint32_t lanes = slot.lanes();
    if (lanes == 0) return true;
    if (!here) came = await_tag<true>(v, call, tag, at.tag(), source, Stage::latency_rows);
    if (__any_sync(kAllLanes, came == WaitStatus::stop)) return false;
    if (__any_sync(kAllLanes, came != WaitStatus::here)) {
      call.lost = true;
      return true;
    }
    __syncwarp();  // all lanes read what some have waited for
    copy(at.row(v.sources[source], source, token), first, last, slot, lanes);
    return true;
  }

  __device__ bool receive_ranked(int source, int token, int first, int last) {
    const LatencyView& v = p.view;
    const int row = land_row(p, call, at.generation, source, token, first == 0);
    if (row == kLostRow) call.lost = true;
    if (row < 0) return row != kStopped;
    const int part = first + static_cast<int>(threadIdx.x % 32);
    WaitStatus came = WaitStatus::here;
    if (part <= last) {
      const std::uint32_t* tag = at.row_tags(v.sources[source], source, token) + part;
      came = await_tag<true>(v, call, tag, at.tag(), source, Stage::latency_rows);
    }
    if (__any_sync(kAllLanes, came == WaitStatus::stop)) return false;
    if (__any_sync(kAllLanes, came != WaitStatus::here)) {
      call.lost = true;
      return true;
    }
    __syncwarp();  // all lanes read what some have waited for
    copy(at.row(v.sources[source], source, token), first, last, ranked_slot(source, row), 1);
    return true;
  }

  __device__ void copy(const std::byte* row, int first, int last, const LandingSlot& slot,
                       std::uint32_t lanes) const {
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

/// Whole block, after all others: rows of ranks that were masked on the way are zero, all of them.
__device__ __noinline__ inline void clear_lost_rows(const LatencyDispatchParameters& p,
                                                    const LatencyCall& call, int experts,
                                                    std::size_t row_bytes) {
  const LatencyView& v = p.view;
  const auto rows = static_cast<std::size_t>(v.group.ranks * v.capacity);
  const bool packed = p.format == LatencyFormat::e4m3_packed;
  const std::size_t columns =
      (static_cast<std::size_t>(v.hidden) + (packed ? 511 : 127)) / (packed ? 512 : 128);
  for (int s = 0; s < v.group.ranks; ++s) {
    if (call.tokens[s] == 0 || load_relaxed(&v.words->masked[s]) != call.number) continue;
    // It takes no part in the combine, should its mask be taken back before.
    if (threadIdx.x == 0) p.handle->tokens[s] = 0;
    if (threadIdx.x == 0) p.handle->sent[s] = 0;
    for (int e = 0; e < experts; ++e) {
      const std::int64_t range = load_relaxed(p.ranges + e * v.group.ranks + s);
      const auto begin = static_cast<std::size_t>(range >> 32);
      const std::size_t end = begin + static_cast<std::size_t>(range & 0xffffffff);
      for (std::size_t place = begin; place < end; ++place) {
        const std::size_t row = static_cast<std::size_t>(e) * rows + place;
        auto* words = reinterpret_cast<std::uint32_t*>(p.out + row * row_bytes);
        for (std::size_t w = threadIdx.x; w < row_bytes / 4; w += blockDim.x) words[w] = 0;
        if (p.format == LatencyFormat::as_is) continue;
        for (std::size_t c = threadIdx.x; c < columns; c += blockDim.x) {
          static_cast<std::uint32_t*>(
              p.scales)[(static_cast<std::size_t>(e) * columns + c) * rows + place] = 0;
        }
      }
    }
  }
}

}  // namespace ferry::cuda::device

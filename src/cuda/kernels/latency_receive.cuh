// Latency dispatch, the receiving half: the headers tell where every row goes while the rows are in
// flight; then one warp takes one part of one row to each of its experts.
#pragma once
#include "core/number/ue8m0.hpp"
#include "cuda/kernels/latency_send.cuh"

namespace ferry::cuda::device {

__device__ __forceinline__ const LatencyHeader* header_of(const LatencyPlaces& at, int source) {
  return reinterpret_cast<const LatencyHeader*>(at.header(own_memory(at.v), source));
}
__device__ __forceinline__ const std::int32_t* numbers_of(const LatencyPlaces& at, int source) {
  return reinterpret_cast<const std::int32_t*>(at.header(own_memory(at.v), source) +
                                               sizeof(LatencyHeader));
}

/// One thread: the tokens that `source` sends, from its header; −1: the group has failed.
__device__ inline int read_header(const LatencyDispatchParameters& p, const LatencyPlaces& at,
                                  std::uint32_t call, int source) {
  const Came came = await_header(at, call, source);
  if (came != Came::here) return came == Came::stop ? -1 : 0;
  const LatencyHeader* header = header_of(at, source);
  const std::int32_t tokens = load_relaxed(&header->tokens);
  const std::uint32_t format = load_relaxed(&header->format);
  const std::uint32_t refused = load_relaxed(&header->refused);
  const auto own = static_cast<std::uint32_t>(p.format);
  if (format != own || tokens < 0 || tokens > p.view.capacity) {
    const Reason reason = format != own ? Reason::mismatch : Reason::distrust;
    fail(p.view.group, call, reason, Stage::latency_headers, source, {own, format, tokens});
    return -1;
  }
  if (refused != 0 && blockIdx.x == 0 && p.failure != nullptr) {
    p.failure->reason = refused == kNoPlace ? Reason::too_many : Reason::bad_route;
    p.failure->stage = Stage::latency_headers;
    p.failure->peer = source;
    p.failure->detail = refused == kNoPlace ? 0 : static_cast<std::int64_t>(refused) - 1;
    store_release(&p.failure->written, at.generation);
  }
  return tokens;
}

/// Whole block: the tokens of each source. False: the group has failed.
__device__ inline bool await_headers(const LatencyDispatchParameters& p, const LatencyPlaces& at,
                                     std::uint64_t start, LatencyCall& call) {
  bool stopped = false;
  // The last warp: it has the least to send.
  const int lane = static_cast<int>(threadIdx.x) - (kLatencyThreads - 32);
  for (int s = lane; lane >= 0 && s < p.view.group.ranks; s += 32) {
    const int found = read_header(p, at, call.number, s);
    call.tokens[s] = found < 0 ? 0 : found;
    if (blockIdx.x == 0) p.handle->tokens[s] = call.tokens[s];
    stopped |= found < 0;
    if (p.waits != nullptr && blockIdx.x == 0) {
      atomicMax(reinterpret_cast<unsigned long long*>(p.waits + s), now_ns() - start);
    }
  }
  return __syncthreads_or(stopped) == 0;
}

/// Whole block: where the rows of each source begin among those of each expert: `bases` [R, local
/// experts], null: no room for them. One block tells the caller.
__device__ inline void count_rows(const LatencyDispatchParameters& p, const LatencyPlaces& at,
                                  const int* tokens, std::int32_t* bases) {
  const LatencyView& v = p.view;
  const bool tells = blockIdx.x == gridDim.x - 1;
  const auto experts = static_cast<int>(v.placement.local_experts(v.group.rank));
  for (int e = static_cast<int>(threadIdx.x); e < experts && (tells || bases != nullptr);
       e += kLatencyThreads) {
    std::int32_t first = 0;
#pragma unroll 4
    for (int s = 0; s < v.group.ranks; ++s) {
      const std::int32_t rows = tokens[s] > 0 ? load_relaxed(numbers_of(at, s) + e) : 0;
      if (bases != nullptr) bases[s * experts + e] = first;
      if (tells) {
        p.ranges[static_cast<std::size_t>(e) * static_cast<std::size_t>(v.group.ranks) +
                 static_cast<std::size_t>(s)] = static_cast<std::int64_t>(first) << 32 | rows;
      }
      first += rows;
    }
    if (tells) p.counts[e] = first;
  }
  __syncthreads();
}

/// A slot of a received row; each lane has one.
struct LandingSlot {
  std::int32_t expert = -1;
  std::int32_t place = 0;  ///< among the rows of the expert
  std::int32_t row = -1;   ///< of the output; −1: the slot is not of this rank
};

/// Whole warp: where the row of (source, token) goes. False: the header says what cannot be.
__device__ inline bool find_landing(const LatencyDispatchParameters& p, const LatencyPlaces& at,
                                    const int* tokens, const std::int32_t* bases, int source,
                                    int token, LandingSlot& slot) {
  const LatencyView& v = p.view;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::uint32_t word =
      lane < v.topk ? load_relaxed(at.places(own_memory(v), source) + token * v.topk + lane)
                    : kNoPlace;
  slot = {};
  bool good = true;
  if (word != kNoPlace) {
    const auto rows = static_cast<std::int32_t>(v.group.ranks * v.capacity);
    const auto experts = static_cast<std::int32_t>(v.placement.local_experts(v.group.rank));
    slot.expert = static_cast<std::int32_t>(word >> 16);
    slot.place = static_cast<std::int32_t>(word & 0xffff);
    good = slot.expert < experts;
    if (good && bases != nullptr) {
      slot.place += bases[source * experts + slot.expert];
    } else if (good) {
#pragma unroll 4
      for (int s = 0; s < source; ++s) {
        if (tokens[s] > 0) slot.place += load_relaxed(numbers_of(at, s) + slot.expert);
      }
    }
    good = good && slot.place >= 0 && slot.place < rows;
    slot.row = slot.expert * rows + slot.place;
  }
  return __all_sync(kAllLanes, good) != 0;
}

/// Whole warp: `bytes` (a multiple of 4) from one row to the rows of all landing slots.
template <class Vector>
__device__ __forceinline__ void copy_part(const std::byte* from, std::byte* out, std::size_t stride,
                                          int bytes, const LandingSlot& slot, std::uint32_t lanes) {
  constexpr int kAtOnce = 4;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int count = bytes / static_cast<int>(sizeof(Vector));
  for (int base = lane; base - lane < count; base += 32 * kAtOnce) {
    Vector data[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (base + 32 * i < count) data[i] = reinterpret_cast<const Vector*>(from)[base + 32 * i];
    }
    for (std::uint32_t left = lanes; left != 0; left &= left - 1) {
      const int row = __shfl_sync(kAllLanes, slot.row, __ffs(static_cast<int>(left)) - 1);
      auto* to = reinterpret_cast<Vector*>(out + static_cast<std::size_t>(row) * stride);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (base + 32 * i < count) to[base + 32 * i] = data[i];
      }
    }
  }
}

/// Whole warp: the scales of channels begin … end of a row, to the columns of all landing slots.
__device__ inline void copy_scales(const LatencyDispatchParameters& p, const float* from, int begin,
                                   int end, const LandingSlot& slot, std::uint32_t lanes) {
  const LatencyView& v = p.view;
  const bool packed = p.format == LatencyFormat::e4m3_packed;
  const int each = packed ? 4 * 128 : 128;
  const auto all = static_cast<int>((v.hidden + 127) / 128);
  const auto columns = static_cast<std::size_t>((v.hidden + each - 1) / each);
  const auto rows = static_cast<std::size_t>(v.group.ranks * v.capacity);
  const int lane = static_cast<int>(threadIdx.x % 32), last = (end + each - 1) / each;
  for (int base = begin / each; base < last; base += 32) {
    const int column = base + lane;
    std::uint32_t word = 0;
    if (column < last && !packed) word = __float_as_uint(from[column]);
    if (column < last && packed) {
      const int most = min(4, all - 4 * column);
      for (int i = 0; i < most; ++i) {
        word |= static_cast<std::uint32_t>(ue8m0_from_scale(from[4 * column + i])) << (8 * i);
      }
    }
    for (std::uint32_t left = lanes; left != 0; left &= left - 1) {
      const int k = __ffs(static_cast<int>(left)) - 1;
      const auto expert = static_cast<std::size_t>(__shfl_sync(kAllLanes, slot.expert, k));
      const auto place = static_cast<std::size_t>(__shfl_sync(kAllLanes, slot.place, k));
      if (column < last) {
        static_cast<std::uint32_t*>(
            p.scales)[(expert * columns + static_cast<std::size_t>(column)) * rows + place] = word;
      }
    }
  }
}

/// Whole warp: what is remembered of a row for the combine, and whose token it is.
__device__ inline void note_landing(const LatencyDispatchParameters& p, const LatencyPlaces& at,
                                    int source, int token, const LandingSlot& slot) {
  const LatencyView& v = p.view;
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (lane >= v.topk) return;
  const std::size_t entry =
      (static_cast<std::size_t>(source) * static_cast<std::size_t>(v.capacity) +
       static_cast<std::size_t>(token)) *
          static_cast<std::size_t>(v.topk) +
      static_cast<std::size_t>(lane);
  p.slots[entry] = slot.row;
  if (slot.row >= 0) p.source_token[slot.row] = token;
  if (p.slot_weights != nullptr) {
    const std::byte* weights = at.header(own_memory(v), source) + v.layout.weights_at;
    p.slot_weights[entry] = reinterpret_cast<const float*>(weights)[token * v.topk + lane];
  }
}

/// The receiving half on one warp.
template <class T, bool kQuantized>
struct RowReceiver {
  const LatencyDispatchParameters& p;
  const LatencyPlaces& at;
  const LatencyCall& call;
  const std::int32_t* bases;
  std::uint64_t start;
  static constexpr std::size_t kBytes = kQuantized ? 1 : sizeof(T);  // of a channel

  /// False: the group has failed.
  __device__ bool receive() const {
    const LatencyView& v = p.view;
    const int ranks = v.group.ranks;
    int most = 0;
    for (int s = 0; s < ranks; ++s) most = max(most, call.tokens[s]);
    // The other end of the block than the senders': who has not sent receives first.
    const int warp = kLatencyWarps - 1 - static_cast<int>(threadIdx.x / 32);
    const int blocks = static_cast<int>(gridDim.x), all = most * ranks * v.parts;
    for (int unit = warp * blocks + static_cast<int>(blockIdx.x); unit < all;
         unit += blocks * kLatencyWarps) {
      const int part = unit % v.parts, row = unit / v.parts;
      const int source = row % ranks, token = row / ranks;
      if (token < call.tokens[source] && !receive_part(source, token, part)) return false;
    }
    return true;
  }

 private:
  __device__ bool receive_part(int source, int token, int part) const {
    const LatencyView& v = p.view;
    LandingSlot slot;
    if (!find_landing(p, at, call.tokens, bases, source, token, slot)) {
      return fail(v.group, call.number, Reason::distrust, Stage::latency_rows, source,
                  {0, 0, token});
    }
    if (part == 0) note_landing(p, at, source, token, slot);
    const std::uint32_t lanes = __ballot_sync(kAllLanes, slot.row >= 0);
    if (lanes == 0) return true;
    const Came came = await_tag(v, call.number, at.row_tags(own_memory(v), source, token) + part,
                                at.tag(), source, Stage::latency_rows);
    if (__any_sync(kAllLanes, came == Came::stop)) return false;
    if (__any_sync(kAllLanes, came != Came::here)) return true;
    if (p.waits != nullptr && threadIdx.x % 32 == 0) {
      atomicMax(reinterpret_cast<unsigned long long*>(p.waits + source), now_ns() - start);
    }
    copy(at.row(own_memory(v), source, token), part, slot, lanes);
    return true;
  }

  __device__ void copy(const std::byte* row, int part, const LandingSlot& slot,
                       std::uint32_t lanes) const {
    const LatencyView& v = p.view;
    const PartShape parts(v);
    const std::size_t row_bytes = static_cast<std::size_t>(v.hidden) * kBytes;
    const int begin = parts.begin(part), end = parts.end(v, part);
    const std::size_t skip = static_cast<std::size_t>(begin) * kBytes;
    const int bytes = (end - begin) * static_cast<int>(kBytes);
    if (row_bytes % 16 == 0) {
      copy_part<uint4>(row + skip, p.out + skip, row_bytes, bytes, slot, lanes);
    } else {
      copy_part<std::uint32_t>(row + skip, p.out + skip, row_bytes, bytes, slot, lanes);
    }
    if constexpr (kQuantized) {
      copy_scales(p, reinterpret_cast<const float*>(row + v.layout.scale_at), begin, end, slot,
                  lanes);
    }
  }
};

/// Whole last block: rows of ranks that were masked on the way are zero, all of them.
__device__ inline void clear_lost_rows(const LatencyDispatchParameters& p, const LatencyCall& call,
                                       std::size_t row_bytes) {
  const LatencyView& v = p.view;
  const auto rows = static_cast<std::size_t>(v.group.ranks * v.capacity);
  const bool packed = p.format == LatencyFormat::e4m3_packed;
  const std::size_t columns =
      (static_cast<std::size_t>(v.hidden) + (packed ? 511 : 127)) / (packed ? 512 : 128);
  for (int s = 0; s < v.group.ranks; ++s) {
    if (load_relaxed(&v.words->masked[s]) != call.number) continue;
    for (int i = 0; i < call.tokens[s] * v.topk; ++i) {
      const std::int32_t row =
          p.slots[static_cast<std::size_t>(s) * static_cast<std::size_t>(v.capacity * v.topk) +
                  static_cast<std::size_t>(i)];
      if (row < 0) continue;
      auto* words =
          reinterpret_cast<std::uint32_t*>(p.out + static_cast<std::size_t>(row) * row_bytes);
      for (std::size_t w = threadIdx.x; w < row_bytes / 4; w += blockDim.x) words[w] = 0;
      if (p.format == LatencyFormat::as_is) continue;
      const std::size_t expert = static_cast<std::size_t>(row) / rows,
                        place = static_cast<std::size_t>(row) % rows;
      for (std::size_t c = threadIdx.x; c < columns; c += blockDim.x) {
        static_cast<std::uint32_t*>(p.scales)[(expert * columns + c) * rows + place] = 0;
      }
    }
  }
}

}  // namespace ferry::cuda::device

// Latency dispatch, the receiving half of expert-major results: each slot of a row goes to its
// expert, behind the rows of the sources before and of the slots before, as the header says.
#pragma once
#include "cuda/kernels/latency/header_words.cuh"
#include "cuda/kernels/latency/kernels.hpp"
#include "cuda/kernels/latency/row.cuh"
#include "cuda/kernels/latency/wait.cuh"

namespace ferry::cuda::device {

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

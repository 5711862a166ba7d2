// Latency dispatch, the receiving half of rank-major results: no fan-out; each row goes to the
// block of its source, behind those of the tokens before it that came here, too.
//
// The source does not say how many those are, for it does not know the order that this rank takes:
// whoever moves a row counts the places of the tokens before it, which lie in the header.
#pragma once
#include "cuda/kernels/latency/header_words.cuh"
#include "cuda/kernels/latency/kernels.hpp"
#include "cuda/kernels/latency/wait.cuh"

namespace ferry::cuda::device {

/// Words that a lane loads at once.
inline constexpr int kPlacesAtOnce = 8;

/// One lane: whether `token` of `source` has a slot here. `came`: unless here, nobody knows.
__device__ __forceinline__ bool is_landing(const LatencyPlaces& at, const LatencyCall& call,
                                           int source, int token, WaitStatus& came) {
  const LatencyView& v = at.v;
  const std::uint64_t* places = at.places(v.sources[source], source) + token * v.topk;
  bool lands = false;
#pragma unroll 1
  for (int base = 0; base < v.topk && came == WaitStatus::here; base += kPlacesAtOnce) {
    std::uint64_t words[kPlacesAtOnce];
#pragma unroll
    for (int i = 0; i < kPlacesAtOnce; ++i) {
      if (base + i < v.topk) words[i] = load_relaxed(places + base + i);
    }
    bool here = true;
#pragma unroll
    for (int i = 0; i < kPlacesAtOnce; ++i) {
      if (base + i >= v.topk) continue;
      here = here && is_word_of(words[i], at.tag());
      lands = lands || static_cast<std::uint32_t>(words[i]) != kNoPlace;
    }
    if (here) continue;
    lands = false;
#pragma unroll 1
    for (int k = 0; k < v.topk && came == WaitStatus::here; ++k) {
      std::uint32_t word;
      came = await_word(v, call, places + k, at.tag(), source, Stage::latency_rows, word);
      lands = lands || (came == WaitStatus::here && word != kNoPlace);
    }
    return lands;
  }
  return lands;
}

/// Whole warp, all lanes alike: of the first `tokens` tokens of `source`, those with slots here.
__device__ inline WaitStatus count_landing(const LatencyPlaces& at, const LatencyCall& call,
                                           int source, int tokens, int& count) {
  int own = 0;
  WaitStatus came = WaitStatus::here;
  for (int t = static_cast<int>(threadIdx.x % 32); t < tokens && came == WaitStatus::here;
       t += 32) {
    own += is_landing(at, call, source, t, came) ? 1 : 0;
  }
  __syncwarp();
  count = __reduce_add_sync(kAllLanes, own);
  if (__any_sync(kAllLanes, came == WaitStatus::stop)) return WaitStatus::stop;
  return __any_sync(kAllLanes, came != WaitStatus::here) ? WaitStatus::missing : WaitStatus::here;
}

/// Whole warp: the number of a row's first entry in the tables [R, capacity, topk].
__device__ __forceinline__ std::size_t table_entry(const LatencyView& v, int source, int row) {
  return (static_cast<std::size_t>(source) * static_cast<std::size_t>(v.capacity) +
          static_cast<std::size_t>(row)) *
         static_cast<std::size_t>(v.topk);
}

/// Whole warp: what the caller reads of a row, and what the combine finds by its token: one slot,
/// the first here, with weight 1. `word`: of this lane's slot; `row`: among those of the source.
__device__ inline void note_ranked(const LatencyDispatchParameters& p, int source, int token,
                                   std::uint32_t word, std::uint32_t weight, int row) {
  const LatencyView& v = p.view;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const bool here = lane < v.topk && word != kNoPlace;
  const std::uint32_t lanes = __ballot_sync(kAllLanes, here);
  if (lane >= v.topk) return;
  const bool first = here && (lanes & ((1u << lane) - 1)) == 0;
  const auto out = static_cast<std::int32_t>(source * v.capacity + row);
  const std::size_t entry = table_entry(v, source, token) + static_cast<std::size_t>(lane);
  p.slots[entry] = first ? out : -1;
  p.ones[entry] = 1.0f;
  if (lanes == 0) return;
  const std::size_t told = table_entry(v, source, row) + static_cast<std::size_t>(lane);
  p.topk_out[told] = here ? static_cast<std::int32_t>(word >> 16) : -1;
  if (p.slot_weights != nullptr) p.slot_weights[told] = here ? __uint_as_float(weight) : 0.0f;
  if (first) p.source_token[out] = token;
}

/// What land_row says in place of a row.
inline constexpr int kNoRow = -1;    ///< no slot of the token is here
inline constexpr int kLostRow = -2;  ///< the source is masked, and its row goes nowhere
inline constexpr int kStopped = -3;  ///< the group has failed

/// Whole warp, all lanes alike: the row of a token among those of its source. `notes`: this warp
/// remembers it. Apart, for the rows in hand take the registers.
__device__ __noinline__ inline int land_row(const LatencyDispatchParameters& p,
                                            const LatencyCall& call, std::uint64_t generation,
                                            int source, int token, bool notes) {
  const LatencyView& v = p.view;
  const LatencyPlaces at{v, generation};
  const int lane = static_cast<int>(threadIdx.x % 32);
  std::uint32_t word = kNoPlace, weight = 0;
  WaitStatus came = WaitStatus::here;
  if (lane < v.topk) {
    const int entry = token * v.topk + lane;
    came = await_word(v, call, at.places(v.sources[source], source) + entry, at.tag(), source,
                      Stage::latency_rows, word);
    if (came == WaitStatus::here && notes && p.slot_weights != nullptr) {
      came = await_word(v, call, at.header_weights(v.sources[source], source) + entry, at.tag(),
                        source, Stage::latency_rows, weight);
    }
  }
  if (__any_sync(kAllLanes, came == WaitStatus::stop)) return kStopped;
  bool missing = __any_sync(kAllLanes, came != WaitStatus::here) != 0;
  if (missing) word = kNoPlace;
  const auto experts = static_cast<std::uint32_t>(v.placement.local_experts(v.group.rank));
  if (__any_sync(kAllLanes, word != kNoPlace && word >> 16 >= experts)) {
    fail_latency(v, call, Reason::violation, Stage::latency_rows, source, {0, 0, token});
    return kStopped;
  }
  const bool lands = __any_sync(kAllLanes, word != kNoPlace) != 0;
  int row = 0;
  if (lands) {
    came = count_landing(at, call, source, token, row);
    if (came == WaitStatus::stop) return kStopped;
    missing = came == WaitStatus::missing;
    if (missing) word = kNoPlace;
  }
  if (notes) note_ranked(p, source, token, word, weight, row);
  return missing ? kLostRow : lands ? row : kNoRow;
}

/// Whole warp: `row` of a source, and all behind it, are not valid.
__device__ inline void blank_rows(const LatencyDispatchParameters& p, int source, int row) {
  const LatencyView& v = p.view;
  const std::size_t end = table_entry(v, source + 1, 0);
  for (std::size_t i = table_entry(v, source, row) + threadIdx.x % 32; i < end; i += 32) {
    p.topk_out[i] = -1;
    if (p.slot_weights != nullptr) p.slot_weights[i] = 0.0f;
  }
}

/// One warp for each source: how many rows it has here. False: the group has failed.
__device__ inline bool count_sources(const LatencyDispatchParameters& p, const LatencyPlaces& at,
                                     LatencyCall& call, const HeaderWords& words) {
  const int blocks = static_cast<int>(gridDim.x);
  const int warp = static_cast<int>(threadIdx.x / 32);
  // From the other end than those that take rows.
  const int first = blocks - 1 - static_cast<int>(blockIdx.x) + warp * blocks;
  for (int s = first; s < p.view.group.ranks; s += blocks * kLatencyWarps) {
    int rows = 0;
    const WaitStatus came = count_landing(at, call, s, words.tokens(p.view, s), rows);
    if (came == WaitStatus::stop) return false;
    if (came == WaitStatus::missing) {
      call.lost = true;
      rows = 0;
    }
    if (threadIdx.x % 32 == 0) p.counts[s] = rows;
    blank_rows(p, s, rows);
  }
  return true;
}

/// Whole block, after all others: of a source that was masked on the way nothing is here.
__device__ __noinline__ inline void clear_lost_ranks(const LatencyDispatchParameters& p,
                                                     const LatencyCall& call,
                                                     std::size_t row_bytes) {
  const LatencyView& v = p.view;
  const auto capacity = static_cast<std::size_t>(v.capacity);
  const bool packed = p.format == LatencyFormat::e4m3_packed;
  const std::size_t columns =
      (static_cast<std::size_t>(v.hidden) + (packed ? 511 : 127)) / (packed ? 512 : 128);
  for (int s = 0; s < v.group.ranks; ++s) {
    if (call.tokens[s] == 0 || load_relaxed(&v.words->masked[s]) != call.number) continue;
    const auto source = static_cast<std::size_t>(s);
    // It takes no part in the combine, should its mask be taken back before.
    if (threadIdx.x == 0) p.handle->tokens[s] = 0;
    if (threadIdx.x == 0) p.handle->sent[s] = 0;
    if (threadIdx.x == 0) p.counts[s] = 0;
    if (threadIdx.x < 32) blank_rows(p, s, 0);
    auto* words = reinterpret_cast<std::uint32_t*>(p.out + source * capacity * row_bytes);
    for (std::size_t w = threadIdx.x; w < capacity * row_bytes / 4; w += blockDim.x) words[w] = 0;
    if (p.format == LatencyFormat::as_is) continue;
    auto* scales = static_cast<std::uint32_t*>(p.scales) + source * columns * capacity;
    for (std::size_t i = threadIdx.x; i < columns * capacity; i += blockDim.x) scales[i] = 0;
  }
}

}  // namespace ferry::cuda::device

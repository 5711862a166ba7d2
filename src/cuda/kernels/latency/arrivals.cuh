// Latency dispatch: what the headers say, when they are here: who sends how many tokens, and where
// the rows of each source begin among those of each expert.
#pragma once
#include "cuda/kernels/latency/header_words.cuh"
#include "cuda/kernels/latency/kernels.hpp"
#include "cuda/kernels/latency/team.cuh"
#include "cuda/kernels/latency/wait.cuh"

namespace ferry::cuda::device {

/// One thread: whether the header of `source` agrees with this rank's call. False: the group has
/// failed.
__device__ inline bool is_agreed(const LatencyDispatchParameters& p, const LatencyCall& call,
                                 int source, std::uint32_t head) {
  const int tokens = head_tokens(head);
  const std::uint32_t own = agreed_format(p), format = head_format(head);
  if (format == own && tokens <= p.view.capacity) return true;
  const Reason reason = format != own ? Reason::mismatch : Reason::violation;
  return fail_latency(p.view, call, reason, Stage::latency_headers, source, {own, format, tokens});
}

/// One thread of the leading block: of several refused sources the first is told of.
__device__ inline void tell_refused(const LatencyDispatchParameters& p, std::uint64_t generation,
                                    const HeaderWords& words, int source) {
#pragma unroll 1
  for (int s = 0; s < source; ++s) {
    if (words.refused[s] != 0) return;
  }
  const std::uint32_t refused = words.refused[source];
  p.failure->reason = refused == kNoPlace ? Reason::too_many : Reason::bad_route;
  p.failure->stage = Stage::latency_headers;
  p.failure->peer = source;
  p.failure->detail = refused == kNoPlace ? 0 : static_cast<std::int64_t>(refused) - 1;
  store_release(&p.failure->written, generation);
}

/// One thread: where the rows of each source begin among those of `expert`, in place of their
/// numbers. One block tells the caller. False: the group has failed, for a source counted what
/// cannot be.
__device__ __forceinline__ bool count_rows(const LatencyDispatchParameters& p,
                                           const LatencyPlaces& at, const LatencyCall& call,
                                           const Arrivals& arrivals, int expert) {
  const LatencyView& v = p.view;
  bool good = true;
  std::int32_t first = 0;
#pragma unroll 1
  for (int s = 0; s < v.group.ranks; ++s) {
    const int tokens = arrivals.words.tokens(v, s);
    std::int32_t* number = arrivals.numbers + s * arrivals.experts + expert;
    std::int32_t rows = 0;
    if (tokens > 0) rows = arrivals.numbers != nullptr ? *number : load_number(at, s, expert);
    // A source itself refuses routes that name an expert more often than the capacity.
    const int most = min(static_cast<int>(v.capacity), tokens * v.topk);
    if (rows < 0 || rows > most) {
      good = fail_latency(v, call, Reason::violation, Stage::latency_headers, s, {0, 0, rows});
      rows = 0;
    }
    if (arrivals.numbers != nullptr) *number = first;
    if (leads()) {
      p.ranges[static_cast<std::size_t>(expert) * static_cast<std::size_t>(v.group.ranks) +
               static_cast<std::size_t>(s)] = static_cast<std::int64_t>(first) << 32 | rows;
    }
    first += rows;
  }
  if (leads()) p.counts[expert] = first;
  return good;
}

/// Whole team, when all headers are here: judges and notes them, and counts the rows if `counts`.
/// False: the group has failed.
__device__ inline bool read_headers(Team team, const LatencyDispatchParameters& p,
                                    const LatencyPlaces& at, LatencyCall& call,
                                    const Arrivals& arrivals, bool counts) {
  const LatencyView& v = p.view;
  const HeaderWords& words = arrivals.words;
  bool good = true;
#pragma unroll 1
  for (int s = team.thread(); s < v.group.ranks; s += team.threads()) {
    const bool here = !call.masked[s] && !words.missing[s];
    if (here) good &= is_agreed(p, call, s, words.head[s]);
    call.tokens[s] = words.tokens(v, s);
    if (!leads()) continue;
    p.handle->tokens[s] = call.tokens[s];
    if (!here) p.handle->sent[s] = 0;
    if (words.refused[s] != 0 && p.failure != nullptr) tell_refused(p, at.generation, words, s);
  }
  // From the other end, beside the former.
#pragma unroll 1
  for (int e = team.threads() - 1 - team.thread();
       counts && e < arrivals.experts && (leads() || arrivals.numbers != nullptr);
       e += team.threads()) {
    good &= count_rows(p, at, call, arrivals, e);
  }
  return !team.any(!good);
}

}  // namespace ferry::cuda::device

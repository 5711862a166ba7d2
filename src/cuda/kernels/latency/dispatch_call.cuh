// A latency dispatch, whole: header and rows out, rows in and to where the caller reads them.
#pragma once
#include "cuda/kernels/base/entry.cuh"
#include "cuda/kernels/latency/arrivals.cuh"
#include "cuda/kernels/latency/entry.cuh"
#include "cuda/kernels/latency/header.cuh"
#include "cuda/kernels/latency/kernels.hpp"
#include "cuda/kernels/latency/receive.cuh"
#include "cuda/kernels/latency/send.cuh"
#include "cuda/kernels/latency/team.cuh"
#include "cuda/kernels/latency/verdict.cuh"

namespace ferry::cuda::device {

/// What the host computes for a kernel. Shared memory holds counters of headers, then the
/// receiver's bases, one after the other in the same place.
struct DispatchShape {
  SendShape send;
  int experts = 0;  ///< of this rank
  int header_warps = 1;
  bool bases = false;  ///< they fit
  std::size_t bytes = 0;
};

/// Up to so many tokens a header is counted while the call is opened. Of more, receivers that know
/// their places early only get in the way of rows that are still being sent.
inline constexpr int kTokensCountedEarly = 64;

/// Whole block; begins the call, too: the headers of the destinations that are this block's,
/// counted `early` or not. False: the group has failed.
__device__ inline bool send_headers(const LatencyDispatchParameters& p, const RankFinder& ranks,
                                    LatencyCall& call, std::uint32_t* counters, int warps,
                                    bool early) {
  __shared__ HeaderMaker::Words words;
  const LatencyView& v = p.view;
  const auto blocks = static_cast<int>(gridDim.x);
  const int first = blocks - 1 - static_cast<int>(blockIdx.x);
  HeaderMaker header(p, ranks, counters, warps, words);
  bool stopped = false;
  if (threadIdx.x < 32) {
    stopped = open_latency_call(v, nullptr, call);
  } else if (early) {
    header.count(first);
  }
  if (!join_latency_call(v, stopped)) return false;
  const LatencyPlaces at{v, call.generation};
#pragma unroll 1
  for (int d = first; d < v.group.ranks; d += blocks) {
    if (d != first || !early) {
      __syncthreads();
      header.count(d);
      __syncthreads();
    }
    if (call.open[d]) {
      header.write(at, d);
    } else {
      header.leave_out(at, d);
    }
  }
  __syncthreads();  // what follows has the same memory
  return true;
}

/// Whole block: what the combine finds of this dispatch.
__device__ inline void keep_dispatch(const LatencyDispatchParameters& p, const LatencyCall& call) {
  if (threadIdx.x == 0) p.handle->generation = call.generation;
#pragma unroll 1
  for (int r = static_cast<int>(threadIdx.x); r < p.view.group.ranks; r += kLatencyThreads) {
    p.handle->sent[r] = call.open[r] ? 1 : 0;
  }
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); p.routes != nullptr && i < p.tokens * p.topk;
       i += kLatencyThreads) {
    p.routes[i] = route_id(p, i / p.topk, i % p.topk);
    if (p.own_weights != nullptr) p.own_weights[i] = p.weights[i];
  }
}

/// Whole block; begins the call, too. `team`: the warps that send no rows, and do not wait for
/// those that do; where some blocks do nothing else, all warps of each. False: the group has
/// failed.
template <class T, bool kQuantized, bool kLL128>
__device__ bool send_half(const LatencyDispatchParameters& p, const RankFinder& ranks,
                          const DispatchShape& shape, LatencyCall& call, std::uint32_t* counters,
                          Team& team) {
  const LatencyView& v = p.view;
  const auto blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  const bool heads = blocks - 1 - block < v.group.ranks;
  if (heads) {
    const bool early = p.tokens <= kTokensCountedEarly || shape.send.only.of_row > 0;
    if (!send_headers(p, ranks, call, counters, shape.header_warps, early)) return false;
    if (leads()) keep_dispatch(p, call);
    if (shape.send.apart) return true;
  }
  RowSender<T, kQuantized, kLL128> sender(p, ranks, shape.send, block);
  if (!heads && !begin_latency_call(v, nullptr, call)) return false;
  team.first = shape.send.warps_of(block);
  const LatencyPlaces at{v, call.generation};
  if (!team.has_this_warp()) sender.send(at, call.open);
  if (kLL128 && shape.send.only.of_row > 0) team.first = 0;
  return true;
}

/// The rows that come, of this block's share. False: the group has failed.
template <class T, bool kQuantized, bool kRanked, bool kLL128>
__device__ __forceinline__ bool receive_half(const LatencyDispatchParameters& p,
                                             const LatencyPlaces& at, LatencyCall& call,
                                             const Arrivals& arrivals, const SendingBlocks& only) {
  const MostTokens most = find_most_tokens(p.view, arrivals.words, sizeof(T));
  const Receiver receiver{p, at, call, arrivals};
  PieceReceiver<LL<T, kQuantized>, kRanked> ll{receiver, only};
  if (most.ll > 0 && !ll.receive(most.ll)) return false;
  if (most.rows == 0) return true;
  if constexpr (kLL128) {
    return PieceReceiver<LL128<T, kQuantized>, kRanked>{receiver, only}.receive(most.rows);
  } else {
    return PartReceiver<T, kQuantized, kRanked>{receiver}.receive(most.rows);
  }
}

template <class T, bool kQuantized, bool kRanked, bool kLL128>
__global__ void __launch_bounds__(kLatencyThreads, kRanked ? 1 : kLatencyBlocksPerSm)
    latency_dispatch_kernel(const __grid_constant__ LatencyDispatchParameters p,
                            const __grid_constant__ RankFinder ranks,
                            const __grid_constant__ DispatchShape shape) {
  extern __shared__ std::uint32_t scratch[];
  __shared__ LatencyCall call;
  __shared__ HeaderWords words;
  const LatencyView& v = p.view;
  touch_view(v);
  tell_of_waits(call, p.wait_ns);
#pragma unroll 1
  for (int s = static_cast<int>(threadIdx.x); s < v.group.ranks; s += kLatencyThreads) {
    words.missing[s] = false;
  }
  await_kernel_before();
  // One that has its SM almost alone would have the next in the way of a rank that shares the GPU.
  if constexpr (!kRanked) let_next_kernel_come();
  const bool sends = p.halves != Halves::receive, receives = p.halves != Halves::send;
  Team team;
  if (sends) {
    if (!send_half<T, kQuantized, kLL128>(p, ranks, shape, call, scratch, team)) return;
  } else if (!begin_latency_call(v, p.handle, call, p.failure)) {
    return;
  }
  const LatencyPlaces at{v, call.generation};
  auto* numbers = shape.bases && !kRanked ? reinterpret_cast<std::int32_t*>(scratch) : nullptr;
  const Arrivals arrivals{words, numbers, shape.experts};
  if (receives) {
    start_clock(call);
    if (team.has_this_warp()) {
      const bool good = await_header_words(team, at, call, shape.experts, words, numbers) &&
                        read_headers(team, p, at, call, arrivals, !kRanked);
      if (!good) call.stopped = true;
      team.tell_others();
    } else {
      team.hear();
    }
  }
  const bool goes_on = !receives || __any_sync(kAllLanes, call.stopped) == 0;
  if (goes_on) note_latency_call(at, call, sends, receives);
  if (receives && goes_on) {
    const SendingBlocks& only = shape.send.only;
    const bool good = (kLL128 && only.sends_only(static_cast<int>(blockIdx.x))) ||
                      receive_half<T, kQuantized, kRanked, kLL128>(p, at, call, arrivals, only);
    if (!good) call.stopped = true;
    if constexpr (kRanked) {
      if (good && !count_sources(p, at, call, words)) call.stopped = true;
    }
  }
  if (end_latency_call(v, call)) {
    const std::size_t row_bytes = static_cast<std::size_t>(v.hidden) * (kQuantized ? 1 : sizeof(T));
    if constexpr (kRanked) {
      clear_lost_ranks(p, call, row_bytes);
    } else {
      clear_lost_rows(p, call, shape.experts, row_bytes);
    }
  }
}

using DispatchKernel = void (*)(LatencyDispatchParameters, RankFinder, DispatchShape);

template <bool kRanked, bool kLL128>
DispatchKernel dispatch_kernel(Dtype dtype, LatencyFormat format) {
  const bool quantized = format != LatencyFormat::as_is;
  switch (dtype) {
    case Dtype::f32:
      if constexpr (kLL128) return nullptr;
      return quantized ? latency_dispatch_kernel<float, true, kRanked, false>
                       : latency_dispatch_kernel<float, false, kRanked, false>;
    case Dtype::f16:
      return quantized ? latency_dispatch_kernel<Fp16, true, kRanked, kLL128>
                       : latency_dispatch_kernel<Bf16, false, kRanked, kLL128>;  // the same bytes
    case Dtype::bf16:
      return quantized ? latency_dispatch_kernel<Bf16, true, kRanked, kLL128>
                       : latency_dispatch_kernel<Bf16, false, kRanked, kLL128>;
    default: return nullptr;
  }
}

// Files of their own, that compilers keep what they make of others.
DispatchKernel rank_major_kernel(Dtype dtype, LatencyFormat format);
DispatchKernel ll128_kernel(Dtype dtype, LatencyFormat format);
DispatchKernel ll128_rank_major_kernel(Dtype dtype, LatencyFormat format);

}  // namespace ferry::cuda::device

// Latency combine with partial sums, when weights arrive with the call and some are late. Sums for
// other ranks must not wait for them, or those ranks would mask this one for another's delay. So a
// warp first sends all sums that it can, then waits, within the call's deadline. A function of its
// own, because the sums leave no registers for it.
#pragma once
#include "cuda/kernels/base/accumulate.cuh"
#include "cuda/kernels/latency/combine_wait.cuh"
#include "cuda/kernels/latency/row_ll.cuh"

namespace ferry::cuda::device {

/// Polls for weights on the first of the two turns; those of ranks that are not late are here.
inline constexpr int kPollsForRest = 64;

/// One lane: the weight of its slot, at last. False: `source` is masked, or the group has failed,
/// which `stop` tells.
__device__ __forceinline__ bool await_weight(const LatencyPlaces& at, const LatencyCall& call,
                                             int source, int token, int row, float& weight,
                                             bool& stop) {
  if (row < 0) return true;
  const LatencyView& v = at.v;
  const std::uint64_t* word =
      at.weights(v.sources[source], source) + token * v.topk + static_cast<int>(threadIdx.x % 32);
  std::uint32_t data = 0;
  const WaitStatus came =
      await_word<true>(v, call, word, at.tag(), source, Stage::latency_weights, data);
  weight = __uint_as_float(data);
  stop = came == WaitStatus::stop;
  return came == WaitStatus::here;
}

/// Whole warp: what is left of the sending half from unit `unit` on. `Row::send` takes a row's
/// parts with its weights to its owner. Rows that went on the first turn go once more on the
/// second: the same bytes to the same places. False: the group has failed.
template <class Row>
__device__ __noinline__ bool send_rest(const LatencyCombineParameters& p, const LatencyCall& call,
                                       int unit) {
  const LatencyView& v = p.view;
  const LatencyPlaces at{v, call.generation};
  const SendWalk walk(v, call);
#pragma unroll 1
  for (int next = unit, turn = 0; turn < 2; next += walk.step) {
    if (next >= walk.end) {
      next = unit - walk.step;
      ++turn;
      continue;
    }
    SentRow sent;
    if (!walk.find(v, call, next, sent)) continue;
    const std::int32_t row = static_cast<int>(threadIdx.x % 32) < v.topk
                                 ? __ldg(p.slots + slot_entry(v, sent.source, sent.token))
                                 : -1;
    const std::uint32_t lanes = __ballot_sync(kAllLanes, row >= 0);
    if (lanes == 0) continue;
    float weight = 0;
    if (turn == 0) {
      if (!poll_weights(at, sent.source, sent.token, row, kPollsForRest, weight)) continue;
    } else {
      bool stop = false;
      const bool here = await_weight(at, call, sent.source, sent.token, row, weight, stop);
      if (__any_sync(kAllLanes, stop) != 0) return false;
      if (__all_sync(kAllLanes, here) == 0) continue;
    }
    Row::send(p, at, call, sent, row, weight, lanes);
  }
  return true;
}

/// Whole warp, behind the data of a row's parts: they are there.
__device__ __forceinline__ void tell_parts(const LatencyPlaces& at, const SentRow& sent, int place,
                                           bool tells, std::uint32_t tag) {
  __syncwarp();
  if (!tells) return;
  std::uint32_t* tags = at.sum_tags(at.v.peers[sent.source], place, sent.token);
  fence_system();
  for (int part = sent.first; part <= sent.last; ++part) store_relaxed(tags + part, tag);
}

/// A row as it is, without haste.
template <class T>
struct PlainRow {
  __device__ static void send(const LatencyCombineParameters& p, const LatencyPlaces& at,
                              const LatencyCall& call, const SentRow& sent, int row, float weight,
                              std::uint32_t lanes) {
    const LatencyView& v = p.view;
    constexpr int kEach = kPerVector<T>;
    const PartShape parts(v);
    const std::size_t row_bytes = static_cast<std::size_t>(v.hidden) * sizeof(T);
    const int lane = static_cast<int>(threadIdx.x % 32);
    const bool ll = is_ll<T>(v, call.tokens[sent.source]);
    std::byte* base = v.peers[sent.source];
    const int line = v.line[sent.source];
    std::byte* to =
        ll ? ll_sum(at, base, line, sent.token) : at.sum(base, line, sent.token, row_bytes);
    const int begin = parts.begin(sent.first) / kEach, end = parts.end(v, sent.last) / kEach;
#pragma unroll 1
    for (int vector = begin + lane; vector - lane < end; vector += 32) {
      float acc[kEach] = {};
#pragma unroll 1
      for (std::uint32_t left = lanes; left != 0; left &= left - 1) {
        const int k = __ffs(static_cast<int>(left)) - 1;
        const int from = __shfl_sync(kAllLanes, row, k);
        const float factor = __shfl_sync(kAllLanes, weight, k);
        if (vector >= end) continue;
        const auto* data =
            reinterpret_cast<const uint4*>(p.rows + static_cast<std::size_t>(from) * row_bytes);
        add_vector<T, true>(acc, __ldg(data + vector), factor);
      }
      if (vector >= end) continue;
      const auto byte = static_cast<std::size_t>(vector) * 16;
      const uint4 sum = round_vector<T>(acc);
      if (ll) {
        store_ll(to, byte, sum, at.tag());
      } else {
        *reinterpret_cast<uint4*>(to + byte) = sum;
      }
    }
    tell_parts(at, sent, line, lane == 0 && !ll, at.sum_tag(false));
  }
};

}  // namespace ferry::cuda::device

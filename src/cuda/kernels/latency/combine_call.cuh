// A latency combine, whole: weights ahead of the rows where they come with it, rows out, sums in.
#pragma once
#include "cuda/kernels/base/entry.cuh"
#include "cuda/kernels/latency/combine_wait.cuh"
#include "cuda/kernels/latency/entry.cuh"

namespace ferry::cuda::device {

/// This thread's share of this rank's weights, to the ranks of their experts, ahead of the rows.
class WeightPusher {
 public:
  /// Loads the first, before the call's number is known.
  __device__ WeightPusher(const LatencyCombineParameters& p, const RankFinder& ranks)
      : p_(p), ranks_(ranks) {
    // The other end than the senders'.
    const auto block = static_cast<int>(gridDim.x - 1 - blockIdx.x);
    slot_ = block * kLatencyThreads + kLatencyThreads - 1 - static_cast<int>(threadIdx.x);
    load();
  }
  __device__ void push(const LatencyPlaces& at, const LatencyCall& call) {
    const LatencyView& v = p_.view;
    while (slot_ < p_.tokens * p_.topk) {
      if (dest_ >= 0 && call.open[dest_]) {
        const int token = slot_ / p_.topk, k = slot_ - token * p_.topk;
        store_word(at.weights(v.peers[dest_], v.line[dest_]) + token * v.topk + k,
                   __float_as_uint(weight_), at.tag());
      }
      slot_ += static_cast<int>(gridDim.x) * kLatencyThreads;
      load();
    }
  }

 private:
  __device__ void load() {
    if (slot_ >= p_.tokens * p_.topk) return;
    dest_ = ranks_.rank_of(combine_route(p_, slot_));
    weight_ = p_.weights[slot_];
  }
  const LatencyCombineParameters& p_;
  const RankFinder& ranks_;
  int slot_;
  int dest_ = -1;
  float weight_ = 0;
};

/// Whole block. Work: what one warp does of either half (Combiner, EncodedCombiner). kAlone: it has
/// its SM almost alone, where the next kernel would be in the way of a rank that shares the GPU.
template <class Work, bool kPerSlot, bool kTimed, bool kAlone>
__device__ __forceinline__ void run_combine(const LatencyCombineParameters& p,
                                            const RankFinder& ranks, LatencyCall& call) {
  const LatencyView& v = p.view;
  touch_view(v);
  if constexpr (kTimed) tell_of_waits(call, p.wait_ns);
  await_kernel_before();
  if constexpr (!kAlone) let_next_kernel_come();
  const bool sends = p.halves != Halves::receive, receives = p.halves != Halves::send;
  for (int s = static_cast<int>(threadIdx.x) - 32; s < v.group.ranks; s += kLatencyThreads) {
    if (s >= 0) call.tokens[s] = load_tokens(*p.handle, s);
  }
  const bool pushes = sends && !kPerSlot && p.slot_weights == nullptr;
  if (pushes) {
    WeightPusher pusher(p, ranks);
    if (!begin_latency_call(v, p.handle, call, p.failure)) return;
    if (call.tokens[v.group.rank] > 0) pusher.push(LatencyPlaces{v, call.generation}, call);
  } else if (!begin_latency_call(v, p.handle, call, p.failure)) {
    return;
  }
  const LatencyPlaces at{v, call.generation};
  Work work(p, ranks, at, call);
  if (sends) {
    if (leads() && p.kept_weights != nullptr) {
      for (int i = static_cast<int>(threadIdx.x); i < p.tokens * p.topk; i += kLatencyThreads) {
        p.kept_weights[i] = p.weights[i];
      }
    }
    if (!work.send()) call.stopped = true;
  }
  note_latency_call(at, call, false, false);
  if constexpr (kTimed) start_clock(call);
  // Once, or once more by the one block that clears up: a copy of the code would be as long.
#pragma unroll 1
  for (;;) {
    const bool goes_on = receives && __any_sync(kAllLanes, call.stopped) == 0;
    if (goes_on && !work.receive()) call.stopped = true;
    if (call.again || !end_latency_call(v, call)) return;
    if (threadIdx.x == 0) call.again = true;
    __syncthreads();
  }
}

using CombineKernel = void (*)(LatencyCombineParameters, RankFinder);

/// Whether a block of such a kernel takes an SM almost alone, for its registers.
FERRY_FN constexpr bool is_alone(Dtype dtype, CombineFormat format) {
  return dtype == Dtype::f32 && format == CombineFormat::logfmt10;
}

/// combine_format.cu: of formats that are not as_is.
CombineKernel encoded_kernel(Dtype dtype, CombinePath path, CombineFormat format);

}  // namespace ferry::cuda::device

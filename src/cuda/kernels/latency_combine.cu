// Latency combine: results to the owners of their tokens, who sum them. One kernel; with a hook,
// two.
#include <algorithm>

#include "cuda/kernels/latency_combiner.cuh"
#include "cuda/kernels/launch.hpp"
#include "cuda/kernels/load.hpp"

namespace ferry::cuda {

namespace {

using namespace device;

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
        store_word(at.weights(v.peers[dest_], v.group.rank) + token * v.topk + k,
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

template <class T, bool kPerSlot, bool kTimed, bool kFew>
__global__ void __launch_bounds__(kLatencyThreads, kTimed ? 1 : kLatencyBlocksPerSm)
    latency_combine_kernel(const __grid_constant__ LatencyCombineParameters p) {
  __shared__ LatencyCall call;
  const LatencyView& v = p.view;
  const RankFinder ranks(v.placement);
  touch_view(v);
  await_kernel_before();
  let_next_kernel_come();
  const bool sends = p.halves != Halves::receive, receives = p.halves != Halves::send;
  const auto block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
  for (int s = static_cast<int>(threadIdx.x) - 32; s < v.group.ranks; s += kLatencyThreads) {
    if (s >= 0) call.tokens[s] = load_tokens(*p.handle, s);
  }
  const bool pushes = sends && !kPerSlot && p.slot_weights == nullptr;
  if (pushes) {
    WeightPusher pusher(p, ranks);
    if (!begin_latency_call(v, p.handle, call)) return;
    if (call.tokens[v.group.rank] > 0) pusher.push(LatencyPlaces{v, call.generation}, call);
  } else if (!begin_latency_call(v, p.handle, call)) {
    return;
  }
  const LatencyPlaces at{v, call.generation};
  Combiner<T, kPerSlot, kTimed, kFew> combiner(p, ranks, at, call);
  bool good = true;
  if (sends) {
    if (block == 0 && p.kept_weights != nullptr) {
      for (int i = static_cast<int>(threadIdx.x); i < p.tokens * p.topk; i += kLatencyThreads) {
        p.kept_weights[i] = p.weights[i];
      }
    }
    good = combiner.send();
  }
  note_latency_call(at, call, false, false);
  if constexpr (kTimed) start_clock(call, p.waits);
  if (receives && good) good = combiner.receive(block, blocks, false);
  if (__syncthreads_or(!good) != 0) return;
  if (end_latency_call(v, call, receives && combiner.lost)) combiner.receive(0, 1, true);
}

using Kernel = void (*)(LatencyCombineParameters);

template <class T, bool kTimed>
Kernel kernel_of(bool slots, bool few) {
  if (slots) return latency_combine_kernel<T, true, kTimed, false>;
  if constexpr (sizeof(T) == 2) {
    if (few) return latency_combine_kernel<T, false, kTimed, true>;
  }
  return latency_combine_kernel<T, false, kTimed, false>;
}
template <class T>
Kernel kernel_of(bool slots, bool few, bool timed) {
  return timed ? kernel_of<T, true>(slots, few) : kernel_of<T, false>(slots, few);
}

Kernel kernel_of(Dtype dtype, CombinePath path, bool few, bool timed) {
  const bool slots = path == CombinePath::per_slot;
  switch (dtype) {
    case Dtype::f32: return kernel_of<float>(slots, few, timed);
    case Dtype::f16: return kernel_of<Fp16>(slots, few, timed);
    case Dtype::bf16: return kernel_of<Bf16>(slots, few, timed);
    default: return nullptr;
  }
}

}  // namespace

cudaError_t launch_latency_combine(const LatencyCombineParameters& parameters,
                                   cudaStream_t stream) {
  KernelLimits limits;
  const cudaError_t error = kernel_limits(limits);
  if (error != cudaSuccess) return error;
  const bool timed = parameters.waits != nullptr;
  const LatencyView& view = parameters.view;
  const bool few = is_few_of(view, parameters.tokens, size_of(view.dtype));
  const Kernel kernel = kernel_of(view.dtype, parameters.path, few, timed);
  // The place of a slot's row belongs to whoever holds the slot's expert: a rank that is masked and
  // writes late could spoil what another writes there in a later call.
  const bool spoils = parameters.path == CombinePath::per_slot && parameters.view.alarm != nullptr;
  if (kernel == nullptr || spoils || !fits_latency(parameters.view) || parameters.blocks < 1) {
    return cudaErrorInvalidValue;
  }
  LatencyCombineParameters copy = parameters;
  // It holds an SM almost alone: it comes when the kernel before has ended, so that ranks that
  // share a GPU have room for each other.
  if (timed) copy.blocks = std::min(copy.blocks, limits.sms);
  void* arguments[] = {&copy};
  return launch(reinterpret_cast<const void*>(kernel),
                {static_cast<unsigned>(copy.blocks), kLatencyThreads, 0}, arguments, stream,
                limits.bulk_copies && !timed);
}

cudaError_t load_latency_kernels() {
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    for (unsigned choice = 0; choice < 8; ++choice) {
      const auto path = choice / 4 == 0 ? CombinePath::per_slot : CombinePath::per_rank;
      const Kernel kernel = kernel_of(dtype, path, choice / 2 % 2 == 0, choice % 2 == 0);
      const cudaError_t error = load_kernel(reinterpret_cast<const void*>(kernel), 0);
      if (error != cudaSuccess) return error;
    }
  }
  for (const auto load : {load_latency_open_kernels, load_latency_mask_kernels,
                          load_latency_waits_kernels, load_latency_dispatch_kernels}) {
    const cudaError_t error = load();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ferry::cuda

// Latency combine: results to the owners of their tokens, who sum them. One kernel; with a hook,
// two. One warp takes one part of one row in each half.
#include "cuda/kernels/entry.cuh"
#include "cuda/kernels/latency_send.cuh"
#include "cuda/kernels/launch.hpp"
#include "cuda/kernels/load.hpp"

namespace ferry::cuda {

namespace {

using namespace device;

inline constexpr int kMaskWords = (kMaxDomain + 31) / 32;

/// Vectors of a row that a lane sums at once.
inline constexpr int kAtOnce = 2;

/// One call on one warp.
template <class T, bool kPerSlot>
class Combiner {
 public:
  __device__ Combiner(const LatencyCombineParameters& p, const LatencyPlaces& at,
                      const LatencyCall& call)
      : p_(p), at_(at), call_(call), parts_(p.view), given_(call.tokens[p.view.group.rank] > 0) {}

  __device__ void send() {
    const LatencyView& v = p_.view;
    const int ranks = v.group.ranks;
    int most = 0;
    for (int s = 0; s < ranks; ++s) most = max(most, call_.tokens[s]);
    const UnitWalk walk(static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
    for (int unit = walk.first; unit < most * ranks * v.parts; unit += walk.step) {
      const int part = unit % v.parts, token = unit / v.parts / ranks;
      const int source = (unit / v.parts + v.group.rank + token) % ranks;
      if (token < call_.tokens[source] && call_.open[source]) send_part(source, token, part);
    }
  }

  /// The receiving half, of `blocks` blocks of which this is one. `again`: all that comes has come,
  /// and masked ranks are left out. False: the group has failed.
  __device__ bool receive(int block, int blocks, bool again, std::uint64_t start) {
    const LatencyView& v = p_.view;
    // The other end of the block than the senders'.
    const int warp = kLatencyWarps - 1 - static_cast<int>(threadIdx.x / 32);
    for (int unit = warp * blocks + block; unit < p_.tokens * v.parts;
         unit += blocks * kLatencyWarps) {
      const int part = unit % v.parts, token = unit / v.parts;
      std::uint32_t here[kMaskWords];
      if (!await_part(token, part, again, start, here)) return false;
      sum_part(token, part, here);
    }
    return true;
  }

 private:
  static constexpr int kEach = kPerVector<T>;

  __device__ std::size_t row_bytes() const {
    return static_cast<std::size_t>(p_.view.hidden) * sizeof(T);
  }

  __device__ void send_part(int source, int token, int part) {
    const LatencyView& v = p_.view;
    const int lane = static_cast<int>(threadIdx.x % 32);
    const std::size_t entry =
        (static_cast<std::size_t>(source) * static_cast<std::size_t>(v.capacity) +
         static_cast<std::size_t>(token)) *
            static_cast<std::size_t>(v.topk) +
        static_cast<std::size_t>(lane);
    const std::int32_t row = lane < v.topk ? __ldg(p_.slots + entry) : -1;
    const std::uint32_t lanes = __ballot_sync(kAllLanes, row >= 0);
    if (lanes == 0) return;
    std::byte* base = v.peers[source];
    if constexpr (kPerSlot) {
      copy_slots(source, token, part, row, lanes);
      __syncwarp();
      if (row >= 0) store_release(at_.sum_tags(base, lane, token) + part, at_.tag());
    } else {
      float weight = 0;
      if (row >= 0) {
        weight = p_.slot_weights != nullptr
                     ? __ldg(p_.slot_weights + entry)
                     : load_weight(at_.weights(own_memory(v), source) + token * v.topk + lane);
      }
      sum_slots(at_.sum(base, v.group.rank, token, row_bytes()), part, row, weight, lanes);
      __syncwarp();
      if (lane == 0) store_release(at_.sum_tags(base, v.group.rank, token) + part, at_.tag());
    }
  }

  /// Written by a peer in this call.
  __device__ static float load_weight(const float* from) {
    return __uint_as_float(load_relaxed(reinterpret_cast<const std::uint32_t*>(from)));
  }

  __device__ const uint4* input(int row) const {
    return reinterpret_cast<const uint4*>(p_.rows + static_cast<std::size_t>(row) * row_bytes());
  }

  __device__ void copy_slots(int source, int token, int part, int row, std::uint32_t lanes) {
    const LatencyView& v = p_.view;
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int first = parts_.begin(part) / kEach + lane, last = parts_.end(v, part) / kEach;
    for (int base = first; base - lane < last; base += 32 * 2 * kAtOnce) {
      for (std::uint32_t left = lanes; left != 0; left &= left - 1) {
        const int k = __ffs(static_cast<int>(left)) - 1;
        const uint4* from = input(__shfl_sync(kAllLanes, row, k));
        auto* to = reinterpret_cast<uint4*>(at_.sum(v.peers[source], k, token, row_bytes()));
        uint4 data[2 * kAtOnce];
#pragma unroll
        for (int i = 0; i < 2 * kAtOnce; ++i) {
          if (base + 32 * i < last) data[i] = __ldg(from + base + 32 * i);
        }
#pragma unroll
        for (int i = 0; i < 2 * kAtOnce; ++i) {
          if (base + 32 * i < last) to[base + 32 * i] = data[i];
        }
      }
    }
  }

  /// The slots of one row on this rank, in ascending k, rounded once.
  __device__ void sum_slots(std::byte* out, int part, int row, float weight, std::uint32_t lanes) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int first = parts_.begin(part) / kEach + lane;
    const int last = parts_.end(p_.view, part) / kEach;
    auto* to = reinterpret_cast<uint4*>(out);
    for (int base = first; base - lane < last; base += 32 * kAtOnce) {
      float acc[kAtOnce][kEach] = {};
      std::uint32_t left = lanes;
      while (left != 0) {
        const int one = __ffs(static_cast<int>(left)) - 1;
        left &= left - 1;
        const bool pair = left != 0;
        const int two = pair ? __ffs(static_cast<int>(left)) - 1 : one;
        left &= left - 1;
        const uint4* from[2] = {input(__shfl_sync(kAllLanes, row, one)),
                                input(__shfl_sync(kAllLanes, row, two))};
        const float factors[2] = {__shfl_sync(kAllLanes, weight, one),
                                  __shfl_sync(kAllLanes, weight, two)};
        uint4 data[2][kAtOnce] = {};
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            if (base + 32 * i < last && (n == 0 || pair))
              data[n][i] = __ldg(from[n] + base + 32 * i);
          }
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          if (n == 1 && !pair) break;
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) add_vector<T, true>(acc[i], data[n][i], factors[n]);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (base + 32 * i < last) to[base + 32 * i] = round_vector<T>(acc[i]);
      }
    }
  }

  __device__ std::int64_t route(int token, int slot) const {
    if (slot >= p_.topk) return -1;
    const std::size_t at = static_cast<std::size_t>(token) * static_cast<std::size_t>(p_.topk) +
                           static_cast<std::size_t>(slot);
    const std::int64_t id =
        p_.wide ? __ldg(static_cast<const long long*>(p_.topk_idx) + at)
                : static_cast<std::int64_t>(__ldg(static_cast<const int*>(p_.topk_idx) + at));
    return id < p_.view.placement.experts ? id : -1;
  }

  /// Whole warp: which rows of the token are here: bits of slots or of ranks.
  __device__ bool await_part(int token, int part, bool again, std::uint64_t start,
                             std::uint32_t* here) {
    const LatencyView& v = p_.view;
    const int lane = static_cast<int>(threadIdx.x % 32);
    const std::int64_t id = given_ ? route(token, lane) : -1;
    const int rank = id >= 0 ? v.placement.rank_of(id) : -1;
    bool stopped = false;
#pragma unroll
    for (int w = 0; w < kMaskWords; ++w) {
      here[w] = 0;
      if (w * 32 >= v.group.ranks || (kPerSlot && w > 0)) continue;
      int peer = kPerSlot ? rank : w * 32 + lane;
      if constexpr (!kPerSlot) {
        const int local = rank - w * 32;
        const std::uint32_t bit = local >= 0 && local < 32 ? 1u << local : 0;
        if ((__reduce_or_sync(kAllLanes, bit) >> lane & 1) == 0) peer = -1;
      }
      bool came = false;
      const bool masked =
          peer >= 0 && (!call_.open[peer] || (again && load_relaxed(&v.words->masked[peer]) != 0));
      if (peer >= 0 && !masked) {
        const std::uint32_t* tag =
            at_.sum_tags(own_memory(v), kPerSlot ? lane : peer, token) + part;
        const Came what = await_tag(v, call_.number, tag, at_.tag(), peer, Stage::latency_sums);
        came = what == Came::here;
        stopped |= what == Came::stop;
        if (p_.waits != nullptr && !again) {
          atomicMax(reinterpret_cast<unsigned long long*>(p_.waits + peer), now_ns() - start);
        }
      }
      here[w] = __ballot_sync(kAllLanes, came);
    }
    return __any_sync(kAllLanes, stopped) == 0;
  }

  /// The sum of what is here, in ascending order, rounded once.
  __device__ void sum_part(int token, int part, const std::uint32_t* here) {
    const LatencyView& v = p_.view;
    const int lane = static_cast<int>(threadIdx.x % 32);
    const float weight =
        kPerSlot && lane < p_.topk ? __ldg(p_.weights + token * p_.topk + lane) : 0.0f;
    const int first = parts_.begin(part) / kEach + lane, last = parts_.end(v, part) / kEach;
    auto* to = reinterpret_cast<uint4*>(p_.out + static_cast<std::size_t>(token) * row_bytes());
    for (int base = first; base - lane < last; base += 32 * kAtOnce) {
      float acc[kAtOnce][kEach] = {};
#pragma unroll
      for (int w = 0; w < kMaskWords; ++w) {
        std::uint32_t left = here[w];
        while (left != 0) {
          // Four rows at once: their loads wait together.
          constexpr int kRows = 4;
          uint4 data[kRows][kAtOnce];
          float factors[kRows];
          int count = 0;
#pragma unroll
          for (int n = 0; n < kRows; ++n) {
            if (left == 0) continue;
            const int bit = __ffs(static_cast<int>(left)) - 1;
            left &= left - 1;
            count = n + 1;
            factors[n] = kPerSlot ? __shfl_sync(kAllLanes, weight, bit) : 0.0f;
            const auto* from = reinterpret_cast<const uint4*>(
                at_.sum(own_memory(v), w * 32 + bit, token, row_bytes()));
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
              if (base + 32 * i < last) data[n][i] = from[base + 32 * i];
            }
          }
#pragma unroll
          for (int n = 0; n < kRows; ++n) {
            if (n >= count) continue;
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
              add_vector<T, kPerSlot>(acc[i], data[n][i], factors[n]);
            }
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (base + 32 * i < last) to[base + 32 * i] = round_vector<T>(acc[i]);
      }
    }
  }

  const LatencyCombineParameters& p_;
  const LatencyPlaces& at_;
  const LatencyCall& call_;
  PartShape parts_;
  bool given_;  ///< false: the dispatch refused this rank's routes, and nothing comes back
};

/// Whole block: this rank's weights to the ranks of its experts, ahead of the rows.
__device__ void push_weights(const LatencyCombineParameters& p, const LatencyPlaces& at, int dest) {
  const LatencyView& v = p.view;
  float* to = at.weights(v.peers[dest], v.group.rank);
  for (int i = static_cast<int>(threadIdx.x); i < p.tokens * p.topk; i += kLatencyThreads) {
    to[i / p.topk * v.topk + i % p.topk] = p.weights[i];
  }
  __syncthreads();
  if (threadIdx.x == 0) store_release(at.weight_flag(v.peers[dest], v.group.rank), at.generation);
}

/// Whole block: waits for the weights of the sources. Who is late is sent nothing. False: the group
/// has failed.
__device__ bool await_weights(const LatencyPlaces& at, LatencyCall& call) {
  const LatencyView& v = at.v;
  bool stopped = false;
  for (int s = static_cast<int>(threadIdx.x); s < v.group.ranks; s += kLatencyThreads) {
    if (!call.open[s] || call.tokens[s] == 0) continue;
    const Came came = await_flag_or_mask(v, call.number, at.weight_flag(own_memory(v), s),
                                         {at.generation, at.generation}, s, Stage::latency_weights);
    if (came != Came::here) call.tokens[s] = 0;
    stopped |= came == Came::stop;
  }
  return __syncthreads_or(stopped) == 0;
}

template <class T, bool kPerSlot>
__global__ void __launch_bounds__(kLatencyThreads, kLatencyBlocksPerSm)
    latency_combine_kernel(const __grid_constant__ LatencyCombineParameters p) {
  __shared__ LatencyCall call;
  const LatencyView& v = p.view;
  await_kernel_before();
  let_next_kernel_come();
  for (int s = static_cast<int>(threadIdx.x); s < v.group.ranks; s += kLatencyThreads) {
    call.tokens[s] = p.handle->tokens[s];
  }
  if (!begin_latency_call(v, p.handle, call)) return;
  const LatencyPlaces at{v, call.generation};
  Combiner<T, kPerSlot> combiner(p, at, call);
  const std::uint64_t start = p.waits != nullptr ? now_ns() : 0;
  const auto block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
  if (p.halves != Halves::receive) {
    if (!kPerSlot && p.slot_weights == nullptr) {
      for (int d = blocks - 1 - block; d < v.group.ranks; d += blocks) {
        if (call.open[d]) push_weights(p, at, d);
      }
      if (!await_weights(at, call)) return;
    }
    if (block == 0 && p.kept_weights != nullptr) {
      for (int i = static_cast<int>(threadIdx.x); i < p.tokens * p.topk; i += kLatencyThreads) {
        p.kept_weights[i] = p.weights[i];
      }
    }
    combiner.send();
  }
  bool good = true;
  if (p.halves != Halves::send) good = combiner.receive(block, blocks, false, start);
  if (__syncthreads_or(!good) != 0) return;
  if (!latency_arrive_last(v)) return;
  if (p.halves != Halves::send && load_relaxed(&v.words->lost) == call.number) {
    combiner.receive(0, 1, true, start);
    __syncthreads();
  }
  if (threadIdx.x == 0) v.words->calls = call.number;
}

using Kernel = void (*)(LatencyCombineParameters);

Kernel kernel_of(Dtype dtype, CombinePath path) {
  const bool slots = path == CombinePath::per_slot;
  switch (dtype) {
    case Dtype::f32:
      return slots ? latency_combine_kernel<float, true> : latency_combine_kernel<float, false>;
    case Dtype::f16:
      return slots ? latency_combine_kernel<Fp16, true> : latency_combine_kernel<Fp16, false>;
    case Dtype::bf16:
      return slots ? latency_combine_kernel<Bf16, true> : latency_combine_kernel<Bf16, false>;
    default: return nullptr;
  }
}

}  // namespace

cudaError_t launch_latency_combine(const LatencyCombineParameters& parameters,
                                   cudaStream_t stream) {
  KernelLimits limits;
  const cudaError_t error = kernel_limits(limits);
  if (error != cudaSuccess) return error;
  const Kernel kernel = kernel_of(parameters.view.dtype, parameters.path);
  if (kernel == nullptr || !fits_latency(parameters.view) || parameters.blocks < 1) {
    return cudaErrorInvalidValue;
  }
  LatencyCombineParameters copy = parameters;
  void* arguments[] = {&copy};
  return launch(reinterpret_cast<const void*>(kernel),
                {static_cast<unsigned>(parameters.blocks), kLatencyThreads, 0}, arguments, stream,
                limits.bulk_copies);
}

cudaError_t load_latency_kernels() {
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    for (const CombinePath path : {CombinePath::per_slot, CombinePath::per_rank}) {
      const cudaError_t error =
          load_kernel(reinterpret_cast<const void*>(kernel_of(dtype, path)), 0);
      if (error != cudaSuccess) return error;
    }
  }
  const cudaError_t error = load_latency_open_kernels();
  return error != cudaSuccess ? error : load_latency_dispatch_kernels();
}

}  // namespace ferry::cuda

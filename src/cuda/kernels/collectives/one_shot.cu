// Collectives of small tensors in one trip: every rank stores its pieces into the inboxes of its
// peers, each 4 bytes beside their generation (base/message.cuh), while the heads of the call are
// on their way, too. A reduction is made by every rank that needs its result, in ascending order of
// the ranks, so all have the same bits.
//
// Inboxes lie double, by parity of the generation: a rank writes into those of call g + 2 when it
// has ended call g + 1, so it had the head of every peer there, which was posted when that peer had
// ended call g and read what lay there.
#include "cuda/kernels/base/launch.hpp"
#include "cuda/kernels/base/load.hpp"
#include "cuda/kernels/collectives/call.cuh"
#include "cuda/kernels/collectives/collective.hpp"

namespace ferry::cuda {
namespace {

using namespace device;

constexpr int kThreads = 512;
constexpr int kSources = 4;  // whose words are polled at once

/// A vector takes two places; the 32 places that a warp stores at once lie together.
__device__ __forceinline__ std::int64_t place_of(std::int64_t v, int half) {
  return v / 32 * 1024 + half * 512 + v % 32 * 16;
}

__device__ __forceinline__ void store_tagged(std::byte* slot, std::int64_t v, const uint4& vector,
                                             std::uint64_t tag) {
  store_pair(slot + place_of(v, 0), std::uint64_t{vector.y} << 32 | vector.x, tag);
  store_pair(slot + place_of(v, 1), std::uint64_t{vector.w} << 32 | vector.z, tag);
}

/// False: not all of it is here.
__device__ __forceinline__ bool load_tagged(const std::byte* slot, std::int64_t v,
                                            std::uint32_t tag, uint4& vector) {
  std::uint64_t words[4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(words[2 * half]), "=l"(words[2 * half + 1])
                 : "l"(slot + place_of(v, half))
                 : "memory");
  }
  bool here = true;
#pragma unroll
  for (int i = 0; i < 4; ++i) here = here && static_cast<std::uint32_t>(words[i] >> 32) == tag;
  vector = {static_cast<std::uint32_t>(words[0]), static_cast<std::uint32_t>(words[1]),
            static_cast<std::uint32_t>(words[2]), static_cast<std::uint32_t>(words[3])};
  return here;
}

/// The slot for `source`'s piece of this generation, in the inbox of a rank.
__device__ __forceinline__ std::byte* slot_in(const CollectiveParameters& p, std::byte* inbox,
                                              int source, std::uint64_t generation) {
  const std::uint64_t slot = generation % 2 * static_cast<std::uint64_t>(p.group.ranks) +
                             static_cast<std::uint64_t>(source);
  return inbox + p.layout.one_shot + slot * p.layout.one_shot_slot;
}

// A thread takes the same vectors in every loop, so that a tensor may be overwritten with its
// result.

__device__ void push(const CollectiveParameters& p, const CollectivePeers& peers,
                     std::uint64_t generation) {
  const int ranks = p.group.ranks, self = p.group.rank;
  const Walk at = grid_walk();
  const bool same = p.to.stride == 0 && p.to.only < 0;  // every rank gets all of x
  std::int64_t most = 0;
  for (int i = 1; i < ranks; ++i) {
    most = max(most, vectors_of(p.to.size(peer_after(p.group, i), ranks)));
  }
  for (std::int64_t v = at.first; v < most; v += at.step) {
    uint4 vector = same ? load_at(p.x, p.to.bytes, v) : uint4{0, 0, 0, 0};
#pragma unroll 1
    for (int i = 1; i < ranks; ++i) {
      const int peer = peer_after(p.group, i);
      const std::int64_t bytes = p.to.size(peer, ranks);
      if (v * kVectorBytes >= bytes) continue;
      if (!same) vector = load_at(p.x + p.to.offset(peer), bytes, v);
      store_tagged(slot_in(p, peers.inbox[peer], self, generation), v, vector, generation);
    }
  }
}

/// One thread: vector v of the pieces of `count` ranks from `source` on, of this rank's own x if it
/// is among them; those of other sizes than `bytes(rank)` > 16 v are left out. False: the group has
/// failed.
template <class Size>
__device__ __forceinline__ bool await_vectors(const CollectiveParameters& p, const std::byte* own,
                                              std::uint64_t generation, int source, std::int64_t v,
                                              const Size& bytes, uint4* vectors) {
  const auto tag = static_cast<std::uint32_t>(generation);
  const int self = p.group.rank;
  bool here[kSources];
#pragma unroll
  for (int j = 0; j < kSources; ++j) {
    const int rank = source + j;
    here[j] = rank >= p.group.ranks || v * kVectorBytes >= bytes(rank);
    vectors[j] = uint4{0, 0, 0, 0};
    if (!here[j] && rank == self) {
      vectors[j] = load_at(p.x + p.to.offset(self), p.to.size(self, p.group.ranks), v);
      here[j] = true;
    }
  }
  SpinDeadline spin_deadline;
  for (;;) {
    int missing = -1;
#pragma unroll
    for (int j = 0; j < kSources; ++j) {
      if (here[j]) continue;
      const std::byte* slot = slot_in(p, const_cast<std::byte*>(own), source + j, generation);
      here[j] = load_tagged(slot, v, tag, vectors[j]);
      if (!here[j]) missing = source + j;
    }
    if (missing < 0) return true;
    Reason reason;
    if (!spin_deadline.over(p.group, reason)) continue;
    if (reason == Reason::none) return false;
    return fail(p.group, generation, reason, p.stage, missing, {generation, generation - 1, 0});
  }
}

template <class T>
__device__ bool reduce(const CollectiveParameters& p, const std::byte* inbox,
                       std::uint64_t generation) {
  const int ranks = p.group.ranks;
  const std::int64_t bytes = p.to.size(p.group.rank, ranks);
  const Walk at = grid_walk();
  for (std::int64_t v = at.first; v * kVectorBytes < bytes; v += at.step) {
    Reducing<T> sum;
#pragma unroll 1
    for (int source = 0; source < ranks; source += kSources) {
      uint4 vectors[kSources];
      if (!await_vectors(p, inbox, generation, source, v, [&](int) { return bytes; }, vectors)) {
        return false;
      }
#pragma unroll
      for (int j = 0; j < kSources; ++j) {
        if (source + j >= ranks) break;
        if (source + j == 0)
          sum.begin(p.op, vectors[j]);
        else
          sum.add(p.op, vectors[j]);
      }
    }
    store_at(p.out, bytes, v, sum.end(p.op, ranks));
  }
  return true;
}

__device__ bool collect(const CollectiveParameters& p, const std::byte* inbox,
                        std::uint64_t generation) {
  const int ranks = p.group.ranks;
  const auto size = [&](int rank) { return p.from.size(rank, ranks); };
  const Walk at = grid_walk();
  for (std::int64_t v = at.first; v * kVectorBytes < p.from.bytes; v += at.step) {
#pragma unroll 1
    for (int source = 0; source < ranks; source += kSources) {
      uint4 vectors[kSources];
      if (!await_vectors(p, inbox, generation, source, v, size, vectors)) return false;
#pragma unroll
      for (int j = 0; j < kSources; ++j) {
        const int rank = source + j;
        if (rank >= ranks || v * kVectorBytes >= size(rank)) continue;
        store_at(p.out + p.from.offset(rank), size(rank), v, vectors[j]);
      }
    }
  }
  return true;
}

/// T void: copies.
template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    one_shot_kernel(const __grid_constant__ CollectiveParameters p) {
  __shared__ CollectivePeers peers;
  std::byte* control = first_control(p.group);
  if (thread() < p.group.ranks) {
    peers.inbox[thread()] = segment_of(p.group, thread(), p.segment).data;
  }
  std::uint64_t generation;
  if (!begin_call(p.group, generation)) return;
  post_collective(p, control, generation);
  push(p, peers, generation);
  if (!await_collective(p, generation)) return;
  bool there;
  if constexpr (std::is_void_v<T>)
    there = collect(p, peers.inbox[p.group.rank], generation);
  else
    there = reduce<T>(p, peers.inbox[p.group.rank], generation);
  if (__syncthreads_and(there) == 0) return;
  end_collective(p, generation);
}

using Kernel = void (*)(CollectiveParameters);
Kernel kernel_for(bool reduces, Dtype dtype) {
  if (!reduces) return one_shot_kernel<void>;
  switch (dtype) {
    case Dtype::f32: return one_shot_kernel<float>;
    case Dtype::bf16: return one_shot_kernel<Bf16>;
    case Dtype::f16: return one_shot_kernel<Fp16>;
    case Dtype::i32: return one_shot_kernel<std::int32_t>;
    case Dtype::i64: return one_shot_kernel<std::int64_t>;
    case Dtype::u8: return one_shot_kernel<std::uint8_t>;
    default: return nullptr;
  }
}

}  // namespace

cudaError_t launch_one_shot(const CollectiveParameters& parameters, cudaStream_t stream) {
  const Kernel kernel = kernel_for(parameters.reduces, parameters.dtype);
  if (kernel == nullptr || parameters.blocks < 1) return cudaErrorInvalidValue;
  CollectiveParameters copy = parameters;
  void* arguments[] = {&copy};
  return launch(reinterpret_cast<const void*>(kernel),
                {static_cast<unsigned>(parameters.blocks), kThreads, 0}, arguments, stream, false);
}

cudaError_t load_one_shot_kernels() {
  for (const Dtype dtype :
       {Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::i32, Dtype::i64, Dtype::u8}) {
    const auto* kernel = reinterpret_cast<const void*>(kernel_for(true, dtype));
    if (const cudaError_t error = load_kernel(kernel, 0); error != cudaSuccess) return error;
  }
  return load_kernel(reinterpret_cast<const void*>(kernel_for(false, Dtype::u8)), 0);
}

}  // namespace ferry::cuda

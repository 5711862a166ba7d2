// Latency mode: places in registered memory, tags, waits that mask who misses a deadline, and the
// end of a call.
//
// A mask set in a call counts for the calls after it: within the call all blocks must agree on who
// takes part. So a mask holds the number of its call, and what did not come in that call is made
// zero at its end by the last block.
#pragma once
#include "cuda/kernels/latency.hpp"
#include "cuda/kernels/wait.cuh"

namespace ferry::cuda::device {

__device__ __forceinline__ std::uint32_t load_acquire(const std::uint32_t* word) {
  std::uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ void store_release(std::uint32_t* word, std::uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// Places; `base` is any rank's registered memory.

struct LatencyPlaces {
  const LatencyView& v;
  std::uint64_t generation;

  __device__ std::size_t half() const { return generation % 2; }
  __device__ std::uint32_t tag() const { return static_cast<std::uint32_t>(generation); }
  __device__ std::size_t line(int source) const {
    return (half() * static_cast<std::size_t>(v.group.ranks) + static_cast<std::size_t>(source));
  }
  __device__ std::size_t slot(int source, std::int64_t token) const {
    return line(source) * static_cast<std::size_t>(v.capacity) + static_cast<std::size_t>(token);
  }
  __device__ std::size_t sum_slot(int row, std::int64_t token) const {
    return (half() * v.layout.sum_slots + static_cast<std::size_t>(row)) *
               static_cast<std::size_t>(v.capacity) +
           static_cast<std::size_t>(token);
  }
  __device__ std::uint64_t* header_flag(std::byte* base, int source) const {
    return reinterpret_cast<std::uint64_t*>(base + v.layout.header_flags +
                                            line(source) * kLineBytes);
  }
  __device__ std::uint64_t* weight_flag(std::byte* base, int source) const {
    return reinterpret_cast<std::uint64_t*>(base + v.layout.weight_flags +
                                            line(source) * kLineBytes);
  }
  __device__ std::uint64_t* released(std::byte* base, int receiver) const {
    return reinterpret_cast<std::uint64_t*>(base + v.layout.released +
                                            static_cast<std::size_t>(receiver) * kLineBytes);
  }
  __device__ std::byte* header(std::byte* base, int source) const {
    return base + v.layout.headers + line(source) * v.layout.header_bytes;
  }
  __device__ std::uint32_t* places(std::byte* base, int source) const {
    return reinterpret_cast<std::uint32_t*>(header(base, source) + v.layout.places_at);
  }
  __device__ std::uint32_t* row_tags(std::byte* base, int source, std::int64_t token) const {
    return reinterpret_cast<std::uint32_t*>(base + v.layout.row_tags) +
           slot(source, token) * kMaxParts;
  }
  __device__ std::byte* row(std::byte* base, int source, std::int64_t token) const {
    return base + v.layout.rows + slot(source, token) * v.layout.row_slot;
  }
  __device__ float* weights(std::byte* base, int source) const {
    return reinterpret_cast<float*>(base + v.layout.weights) +
           slot(source, 0) * static_cast<std::size_t>(v.topk);
  }
  __device__ std::uint32_t* sum_tags(std::byte* base, int row, std::int64_t token) const {
    return reinterpret_cast<std::uint32_t*>(base + v.layout.sum_tags) +
           sum_slot(row, token) * kMaxParts;
  }
  __device__ std::byte* sum(std::byte* base, int row, std::int64_t token,
                            std::size_t row_bytes) const {
    return base + v.layout.sums + sum_slot(row, token) * row_bytes;
  }
};

__device__ __forceinline__ std::byte* own_memory(const LatencyView& v) {
  return v.peers[v.group.rank];
}

// Masks.

/// `call`: the number of the running kernel call, of `LatencyWords::calls`.
__device__ __forceinline__ bool masked_before(const LatencyView& v, std::uint32_t call, int peer) {
  const std::uint32_t mask = load_relaxed(&v.words->masked[peer]);
  return mask != 0 && mask != call;
}

/// The peer missed its deadline. False: nobody may, and the group has failed.
__device__ inline bool mask_late(const LatencyView& v, std::uint32_t call, Stage stage, int peer,
                                 FatalDetail detail) {
  if (v.alarm == nullptr) return fail(v.group, call, Reason::deadline, stage, peer, detail);
  if (atomicCAS(&v.words->masked[peer], 0u, call) == 0) {
    auto* count = reinterpret_cast<unsigned long long*>(&v.alarm->masked);
    atomicAdd_system(count, 1ull);
  }
  return true;
}

enum class Came { here, missing, stop };

/// One thread, or several with the same word: waits for a tag that `peer` writes.
__device__ inline Came await_tag(const LatencyView& v, std::uint32_t call,
                                 const std::uint32_t* word, std::uint32_t tag, int peer,
                                 Stage stage) {
  Patience patience;
  for (;;) {
    const std::uint32_t seen = load_acquire(word);
    if (seen == tag) return Came::here;
    Reason reason;
    const bool over = patience.over(v.group, reason);
    if (patience.looks % Patience::kLooksPerCheck != 0) continue;
    if (load_relaxed(&v.words->masked[peer]) != 0) {
      v.words->lost = call;
      return Came::missing;
    }
    if (!over) continue;
    if (reason == Reason::none) return Came::stop;
    const FatalDetail detail{tag, seen, 0};
    if (reason != Reason::deadline) {
      fail(v.group, call, reason, stage, peer, detail);
      return Came::stop;
    }
    if (!mask_late(v, call, stage, peer, detail)) return Came::stop;
    v.words->lost = call;
    return Came::missing;
  }
}

/// What a flag of 64 bits is waited for.
struct Wanted {
  std::uint64_t least = 0;
  std::uint64_t most = UINT64_MAX;
};

/// The same for a flag.
__device__ inline Came await_flag_or_mask(const LatencyView& v, std::uint32_t call,
                                          const std::uint64_t* word, Wanted wanted, int peer,
                                          Stage stage) {
  if (masked_before(v, call, peer)) return Came::missing;
  Patience patience;
  for (;;) {
    const std::uint64_t seen = load_acquire(word);
    if (seen >= wanted.least && seen <= wanted.most) return Came::here;
    Reason reason;
    if (!patience.over(v.group, reason)) continue;
    if (reason == Reason::none) return Came::stop;
    const FatalDetail detail{wanted.least, seen, 0};
    if (reason != Reason::deadline) {
      fail(v.group, call, reason, stage, peer, detail);
      return Came::stop;
    }
    return mask_late(v, call, stage, peer, detail) ? Came::missing : Came::stop;
  }
}

/// One thread: waits for the header of `source`. All blocks get the same answer: only block 0
/// decides that it is missing. It first raises a suspicion, then looks once more; who sees the
/// header and no suspicion goes on at once, as the second look must then find it, too.
__device__ inline Came await_header(const LatencyPlaces& at, std::uint32_t call, int source) {
  const LatencyView& v = at.v;
  if (masked_before(v, call, source)) return Came::missing;
  const std::uint64_t generation = at.generation;
  const std::uint64_t* word = at.header_flag(own_memory(v), source);
  const std::uint64_t* suspected = &v.words->suspected[source];
  const std::uint64_t* cleared = &v.words->cleared[source];
  Patience patience;
  for (;;) {
    const std::uint64_t seen = load_acquire(word);
    const bool doubted = load_relaxed(suspected) == generation;
    if (seen == generation && !doubted) return Came::here;
    if (doubted) {
      const std::uint64_t verdict = load_acquire(cleared);
      if (verdict >> 1 == generation) return (verdict & 1) != 0 ? Came::here : Came::missing;
    }
    Reason reason;
    if (!patience.over(v.group, reason)) continue;
    if (reason == Reason::none) return Came::stop;
    const FatalDetail detail{generation, seen, 0};
    if (reason != Reason::deadline || v.alarm == nullptr) {
      fail(v.group, call, reason, Stage::latency_headers, source, detail);
      return Came::stop;
    }
    if (blockIdx.x != 0) {  // block 0 is about to say so
      if (now_ns() - patience.start < 2 * v.group.deadline_ns) continue;
      fail(v.group, call, reason, Stage::latency_headers, source, detail);
      return Came::stop;
    }
    store_relaxed(&v.words->suspected[source], generation);
    __threadfence();  // sequentially consistent: the store comes before the second look
    const bool here = load_acquire(word) == generation;
    if (!here) mask_late(v, call, Stage::latency_headers, source, detail);
    store_release(&v.words->cleared[source], generation << 1 | (here ? 1u : 0u));
  }
}

// Begin and end of a call.

/// What a block knows of its call; in shared memory, so that few ask the same few lines.
struct LatencyCall {
  std::uint64_t generation;
  std::uint32_t number;    ///< among the kernel calls, from 1
  bool open[kMaxDomain];   ///< the rank takes part
  int tokens[kMaxDomain];  ///< that each source sent
};

/// Whole block: fills `call` but for the tokens. `handle` null: the generation is a new one, and
/// peers are open once they have read what the buffer held before. False: the group has failed.
__device__ inline bool begin_latency_call(const LatencyView& v, const LatencyHandle* handle,
                                          LatencyCall& call) {
  bool stopped = false;
  if (threadIdx.x < 32) {
    const std::uint64_t* word = handle != nullptr ? &handle->generation : &v.words->generation;
    const std::uint32_t number = load_relaxed(&v.words->calls) + 1;
    const std::uint64_t generation = load_relaxed(word) + (handle != nullptr ? 0 : 1);
    stopped = has_failed(v.group);
    const std::uint64_t needed = handle == nullptr && generation > 2 ? generation - 2 : 0;
    const LatencyPlaces at{v, generation};
    // Of the results before the last none is alive, read or not. Before any wait for the peers',
    // who may wait for this.
    if (blockIdx.x == 0 && !stopped && load_relaxed(&v.words->released) < needed) {
      for (int r = static_cast<int>(threadIdx.x); r < v.group.ranks; r += 32) {
        store_release(at.released(v.peers[r], v.group.rank), needed);
      }
    }
    for (int r = static_cast<int>(threadIdx.x); r < v.group.ranks; r += 32) {
      const Came came = stopped ? Came::stop
                                : await_flag_or_mask(v, number, at.released(own_memory(v), r),
                                                     Wanted{needed}, r, Stage::latency_credit);
      call.open[r] = came == Came::here;
      stopped |= came == Came::stop;
    }
    if (threadIdx.x == 0) {
      call.generation = generation;
      call.number = number;
    }
  }
  return __syncthreads_or(stopped) == 0;
}

/// Whole block: true in every thread of the last block of the grid, which sees what the others did.
__device__ inline bool latency_arrive_last(const LatencyView& v) {
  __syncthreads();
  int last = 0;
  if (threadIdx.x == 0) {
    std::uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(&v.words->arrived)
                 : "memory");
    last = before == gridDim.x - 1;
    if (last != 0) v.words->arrived = 0;
  }
  return __syncthreads_or(last) != 0;
}

}  // namespace ferry::cuda::device

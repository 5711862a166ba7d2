// Entry and end of a collective, for all its kernels: the swap of heads, where the peers' tensors
// and inboxes lie, and waits for a word or a round of a peer.
#pragma once
#include "cuda/kernels/base/entry.cuh"
#include "cuda/kernels/collectives/collective.hpp"
#include "cuda/kernels/collectives/vectors.cuh"

namespace ferry::cuda::device {

/// In shared memory: what a block knows of the ranks.
struct CollectivePeers {
  std::byte* inbox[kMaxDomain];   ///< segments of that layout
  std::byte* tensor[kMaxDomain];  ///< what peers touch; when all are in registered memory
  std::byte* result[kMaxDomain];  ///< where this rank's results of a round go
  std::int64_t at[kMaxDomain];    ///< where this rank's piece goes there
  std::uint32_t segment[kMaxDomain];
  std::uint64_t offset[kMaxDomain];
  std::int64_t bytes[kMaxDomain];
};

__device__ __forceinline__ int thread() {
  return static_cast<int>(threadIdx.x);
}
__device__ __forceinline__ int threads() {
  return static_cast<int>(blockDim.x);
}
/// Vectors of the whole grid, and of a block alone.
__device__ __forceinline__ Walk grid_walk() {
  return {static_cast<std::int64_t>(blockIdx.x) * threads() + thread(),
          static_cast<std::int64_t>(gridDim.x) * threads()};
}
__device__ __forceinline__ Walk block_walk() {
  return {thread(), threads()};
}
/// The i-th rank from this one on, so that ranks do not all begin with the same peer.
__device__ __forceinline__ int peer_after(const GroupView& group, int i) {
  const int peer = group.rank + i;
  return peer < group.ranks ? peer : peer - group.ranks;
}

/// Counts of blocks of any size cross behind the head: [2, ranks] of 8 bytes.
struct CountsBody {
  const std::int64_t* counts;
  int ranks;
  __device__ int words(int) const { return counts != nullptr ? 4 * ranks : 0; }
  __device__ std::int32_t word(int, int i) const {
    return reinterpret_cast<const std::int32_t*>(counts)[i];
  }
};

/// Whole block: its part of the swap's first half.
__device__ inline void post_collective(const CollectiveParameters& p, std::byte* control,
                                       std::uint64_t generation) {
  if (blockIdx.x != 0) return;
  post_entry(
      p.group, control, generation, p.call,
      [&](DeviceHead& head) {
        head.segment = p.place.segment;
        head.offset = p.place.offset;
        head.rows = p.place.bytes;
      },
      CountsBody{p.counts, p.group.ranks});
}

/// Whole block: the second half. False: nothing moves, return at once.
template <class Poll = NoPoll>
__device__ inline bool await_collective(const CollectiveParameters& p, std::uint64_t generation,
                                        const Poll& poll = Poll{}) {
  Verdict verdict;
  if (!await_entry(p.group, generation, p.stage, p.call, nullptr, verdict, poll)) return false;
  if (verdict.reason == Reason::none) return true;
  refuse_call(p.group, generation, verdict, p.stage, nullptr, p.failure);
  return false;
}

/// One thread: a count that `rank` sent behind its head. False: the group has failed.
__device__ inline bool await_count(const CollectiveParameters& p, std::uint64_t generation,
                                   int rank, int index, std::int64_t& count) {
  const auto* words = reinterpret_cast<const std::uint64_t*>(
      posted_word(p.group, rank, generation, kHeadWords) + index * 16);
  std::uint64_t low = 0, high = 0;
  const bool there = await_words(p.group, generation, p.stage, rank, [&] {
    TagCheck check;
    low = load_relaxed(words), high = load_relaxed(words + 1);
    check.check_body(low, generation);
    check.check_body(high, generation);
    return check;
  });
  count = static_cast<std::int64_t>(high << 32 | (low & 0xffffffff));
  return there;
}

/// One thread, `source` sends another number than `target` expects.
__device__ inline void report_counts(const CollectiveParameters& p, std::uint64_t generation,
                                     int pair) {
  const int source = pair / p.group.ranks, target = pair % p.group.ranks;
  std::int64_t sent = 0, awaited = 0;
  await_count(p, generation, source, target, sent);
  await_count(p, generation, target, p.group.ranks + source, awaited);
  p.failure->reason = Reason::bad_counts;
  p.failure->stage = p.stage;
  p.failure->peer = source;
  p.failure->detail = target;
  p.failure->seen = static_cast<std::uint64_t>(sent);
  p.failure->expected = static_cast<std::uint64_t>(awaited);
  store_release(&p.failure->written, generation);
}

/// Whole block: whether all ranks' counts fit together; all come to the same decision. False:
/// nothing moves, return at once.
__device__ inline bool check_counts(const CollectiveParameters& p, std::uint64_t generation) {
  __shared__ int worst;
  const int ranks = p.group.ranks, pairs = ranks * ranks;
  if (thread() == 0) worst = pairs;
  __syncthreads();
  bool there = true;
  for (int pair = thread(); pair < pairs && there; pair += threads()) {
    const int source = pair / ranks, target = pair % ranks;
    std::int64_t sent = 0, awaited = 0;
    there = await_count(p, generation, source, target, sent) &&
            await_count(p, generation, target, ranks + source, awaited);
    if (there && sent != awaited) atomicMin(&worst, pair);
  }
  if (__syncthreads_and(there) == 0) return false;
  if (worst == pairs) return true;
  if (blockIdx.x == 0 && thread() == 0) report_counts(p, generation, worst);
  refuse_call(p.group, generation, {Reason::mismatch, worst / ranks}, p.stage, nullptr, nullptr);
  return false;
}

/// One thread waits until `word`, which `peer` raises, is `wanted` or more. False: the group has
/// failed.
__device__ inline bool await_round(const CollectiveParameters& p, std::uint64_t generation,
                                   const std::uint64_t* word, int peer, std::uint64_t wanted) {
  SpinDeadline spin_deadline;
  for (;;) {
    const std::uint64_t seen = load_acquire(word);
    if (seen >= wanted) return true;
    Reason reason;
    if (!spin_deadline.over(p.group, reason)) continue;
    if (reason == Reason::none) return false;
    return fail(p.group, generation, reason, p.stage, peer, {wanted, seen, 0});
  }
}

/// Whole grid, every block, with what it moved complete here: the call has ended.
__device__ inline void end_collective(const CollectiveParameters& p, std::uint64_t generation) {
  if (arrive_last(p.group, 0) && thread() == 0) end_call(p.group, generation);
}

}  // namespace ferry::cuda::device

// What every kernel of a group shares: flags, waits that end, failing, the entry swap, the end of a
// call. Functions that say "whole block" hold barriers: every thread of the block calls them.
//
// The words are those of protocol/sync.hpp and protocol/swap.hpp; their host sections (atomic_ref,
// futex) do not pass nvcc, so the device has its own.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/kernels/base/access.cuh"
#include "cuda/kernels/base/group_view.hpp"

namespace ferry::cuda::device {

// Places.

__device__ __forceinline__ LocalWords* local_words(const GroupView& group) {
  return reinterpret_cast<LocalWords*>(group.control + group.layout.local);
}
__device__ __forceinline__ std::byte* control_of(const GroupView& group, int peer) {
  return group.segments[static_cast<std::size_t>(peer) * kMaxSegments].data;
}
/// Whether the seat is empty, because its rank was lost: nothing is awaited from it. Who polls a
/// word asks each time, just before: so the two trips to the memory pass side by side.
__device__ __forceinline__ bool is_hole(const GroupView& group, int peer) {
  return group.segments[static_cast<std::size_t>(peer) * kMaxSegments].bytes == 0;
}
/// Line `index` of the flags that begin at `flags` in a control segment.
__device__ __forceinline__ std::uint64_t* flag_at(std::byte* control, std::size_t flags,
                                                  int index) {
  return reinterpret_cast<std::uint64_t*>(control + flags +
                                          static_cast<std::size_t>(index) * kLineBytes);
}
/// The slot for `source`'s message of this generation, in any rank's control segment.
__device__ __forceinline__ std::byte* mailbox_slot(const GroupView& group, std::byte* control,
                                                   int source, std::uint64_t generation) {
  const std::size_t slot = (generation % kMailboxDepth) * static_cast<std::size_t>(group.ranks) +
                           static_cast<std::size_t>(source);
  return control + group.layout.mailbox + slot * group.layout.message_bytes;
}
/// The flag of one block of `source`'s dispatch, in any rank's control segment.
__device__ __forceinline__ std::uint64_t* delivered_flag(const GroupView& group, std::byte* control,
                                                         int source, int block) {
  return reinterpret_cast<std::uint64_t*>(control + group.layout.delivered) + source * kMaxBlocks +
         block;
}

/// The same for `source`'s second grant, which few calls have.
__device__ __forceinline__ std::byte* second_slot(const GroupView& group, std::byte* control,
                                                  int source, std::uint64_t generation) {
  const std::size_t slot = (generation % kMailboxDepth) * static_cast<std::size_t>(group.ranks) +
                           static_cast<std::size_t>(source);
  return control + group.layout.second + slot * kSecondBytes;
}

/// A segment that a peer names; an empty one when there is none of that number.
__device__ __forceinline__ PeerSegment segment_of(const GroupView& group, int peer,
                                                  std::uint32_t segment) {
  if (segment >= kMaxSegments) return {};
  const PeerSegment* at = group.segments + static_cast<std::size_t>(peer) * kMaxSegments + segment;
  // Not from the first cache: the CPU may have added it since this kernel began.
  const auto* words = reinterpret_cast<const std::uint64_t*>(at);
  return {reinterpret_cast<std::byte*>(load_relaxed(words)), load_relaxed(words + 1)};
}
/// `bytes` bytes at `offset` of a segment; null when they do not lie inside it, or when the place
/// is not a multiple of 16.
__device__ __forceinline__ std::byte* place_in(const PeerSegment& segment, std::uint64_t offset,
                                               std::uint64_t bytes) {
  if (segment.data == nullptr || offset % 16 != 0) return nullptr;
  if (offset > segment.bytes || bytes > segment.bytes - offset) return nullptr;
  return segment.data + offset;
}
__device__ inline std::byte* checked_place(const GroupView& group, int peer, std::uint32_t segment,
                                           std::uint64_t offset, std::uint64_t bytes) {
  return place_in(segment_of(group, peer, segment), offset, bytes);
}

// Failing and waiting.

struct FatalDetail {
  std::uint64_t expected = 0;
  std::uint64_t seen = 0;
  std::int64_t detail = 0;
};

/// Fatal: the first to come tells the host; all blocks of this and of later calls stop. Always
/// false. The host takes the calls before `generation` for ended well.
__device__ inline bool fail(const GroupView& group, std::uint64_t generation, Reason reason,
                            Stage stage, int peer, FatalDetail more = {}) {
  auto* failed = reinterpret_cast<unsigned long long*>(&local_words(group)->failed);
  if (atomicCAS(failed, 0ull, static_cast<unsigned long long>(generation)) != 0) return false;
  Failure* fatal = group.fatal;
  fatal->reason = reason;
  fatal->stage = stage;
  fatal->peer = peer;
  fatal->expected = more.expected;
  fatal->seen = more.seen;
  fatal->detail = more.detail;
  store_release(&fatal->written, generation);
  return false;
}

/// The first call of the group that has not ended: for failures in a kernel that may run beside it.
__device__ __forceinline__ std::uint64_t first_running(const GroupView& group) {
  return load_relaxed(&local_words(group)->generation) + 1;
}

/// Whether this rank's group has failed, here or in another block.
__device__ __forceinline__ bool has_failed(const GroupView& group) {
  return load_relaxed(&local_words(group)->failed) != 0;
}

/// Bounds a wait of one thread: ask `over` after each poll that did not find what it waits for.
struct SpinDeadline {
  std::uint64_t start = 0;
  std::uint32_t spins = 0;
  static constexpr std::uint32_t kSpinsPerCheck = 32;  ///< the clock and `failed` cost a poll each
  static constexpr std::uint32_t kChecksPerAbort = 128;  ///< `abort` lies behind PCIe

  /// Whether the next `over` looks at the clock.
  __device__ bool is_next_check() const { return (spins + 1) % kSpinsPerCheck == 0; }
  /// A spin that no check follows; counted when it is one.
  __device__ bool passes() {
    if (is_next_check()) return false;
    ++spins;
    return true;
  }
  /// none: go on. deadline, aborted: give up with this reason; `failed`: another block has.
  __device__ bool over(const GroupView& group, Reason& reason) {
    reason = Reason::none;
    if (++spins % kSpinsPerCheck != 0) return false;
    const std::uint64_t now = now_ns();
    if (start == 0) start = now;
    if (has_failed(group)) return true;
    if (now - start > group.deadline_ns) {
      reason = Reason::deadline;
    } else if (spins / kSpinsPerCheck % kChecksPerAbort == 0 && load_relaxed(group.abort) != 0) {
      reason = Reason::aborted;
    }
    return reason != Reason::none;
  }
};

/// One thread waits for a flag of `peer`, unless it is a hole, in its own rank's memory. False: the
/// group has failed.
__device__ inline bool await_flag(const GroupView& group, const std::uint64_t* word, int peer,
                                  std::uint64_t generation, Stage stage) {
  SpinDeadline spin_deadline;
  for (;;) {
    const bool hole = is_hole(group, peer);
    const std::uint64_t seen = load_acquire(word);
    if (hole) return true;
    if (seen >= generation) {
      // Nobody ends call g + 1 without this rank, so g + 2 is a protocol violation.
      if (seen <= generation + 1) return true;
      return fail(group, generation, Reason::violation, stage, peer, {generation, seen, 0});
    }
    Reason reason;
    if (spin_deadline.over(group, reason)) {
      if (reason == Reason::none) return false;
      return fail(group, generation, reason, stage, peer, {generation, seen, 0});
    }
  }
}

/// Whole block: waits for the flags of all ranks. False: the group has failed, return at once.
__device__ inline bool await_all(const GroupView& group, std::size_t flags,
                                 std::uint64_t generation, Stage stage) {
  bool there = true;
  for (int peer = static_cast<int>(threadIdx.x); peer < group.ranks && there;
       peer += static_cast<int>(blockDim.x)) {
    there = await_flag(group, flag_at(group.control, flags, peer), peer, generation, stage);
  }
  return __syncthreads_and(there) != 0;
}

/// Whole block: raises this rank's flag at every peer. What the block did before, and what it has
/// seen of others by a counter, comes first.
__device__ inline void raise_all(const GroupView& group, std::size_t flags,
                                 std::uint64_t generation) {
  const int first = static_cast<int>(threadIdx.x);
  // Looked up before the barrier, which then hides it.
  std::byte* control = first < group.ranks ? control_of(group, first) : nullptr;
  __syncthreads();
  for (int i = first; i < group.ranks; i += static_cast<int>(blockDim.x)) {
    if (i != first) control = control_of(group, i);
    store_release(flag_at(control, flags, group.rank), generation);
  }
}

/// One thread: counts its block at arrived[counter]; true for the last of the grid, which then sees
/// what the others did before. Device scope orders the blocks; whoever then tells a peer does so by
/// a release of system scope, which takes along all that it has seen: causality order is transitive
/// over scopes, so no block needs a fence of system scope of its own.
__device__ __forceinline__ bool count_block(const GroupView& group, int counter) {
  std::uint32_t* word = &local_words(group)->arrived[counter];
  std::uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(word)
               : "memory");
  const bool last = before == gridDim.x - 1;
  if (last) *word = 0;  // the next call's kernel reads it
  return last;
}

/// Whole block: the same for what all its threads did before; true in every thread of the last.
__device__ inline bool arrive_last(const GroupView& group, int counter) {
  __syncthreads();
  const int last = threadIdx.x == 0 ? count_block(group, counter) : 0;
  return __syncthreads_or(last) != 0;
}

}  // namespace ferry::cuda::device

// A dispatch may be launched before the CPU knows how many rows come: its grant is a guess. If more
// come, every rank sees it in the head, and waits for the second grant, which the CPU of that rank
// makes while its kernel waits, too. Nobody has to launch anything twice.
#pragma once
#include <new>

#include "cuda/kernels/base/entry.cuh"
#include "cuda/kernels/throughput/kernels.hpp"

namespace ferry::cuda::device {

/// One thread: until the CPU has granted anew. False: the group has failed.
__device__ inline bool await_cpu_grant(const DispatchParameters& p, std::uint64_t generation) {
  SpinDeadline spin_deadline;
  while (load_acquire(&p.second->written) == 0) {
    Reason reason;
    if (spin_deadline.over(p.group, reason)) {
      if (reason == Reason::none) return false;
      return fail(p.group, generation, reason, Stage::grants, p.group.rank);
    }
  }
  return true;
}

/// Whole block 0, after post_entry, when more rows arrive than were guessed: hands on what the CPU
/// grants. False: the group has failed.
__device__ inline bool grant_again(const DispatchParameters& p, std::uint64_t generation) {
  __shared__ alignas(16) std::uint64_t head[kHeadWords];
  bool granted = true;
  if (threadIdx.x == 0) {
    granted = await_cpu_grant(p, generation);
    if (granted) {
      const SecondGrant grant = *p.second;
      auto* mine = new (head) DeviceHead{};
      mine->call = p.call;
      mine->status = grant.status;
      mine->segment = grant.segment;
      mine->offset = grant.offset;
      mine->side_segment = grant.side_segment;
      mine->side_offset = grant.side_offset;
      mine->rows = grant.rows;
      mine->detail = grant.detail;
      mine->blocks = gridDim.x;
    }
  }
  if (__syncthreads_and(granted) == 0) return false;
  const int lane = static_cast<int>(threadIdx.x % 32);
  fence_system();  // what the CPU has seen of the memory's users comes before what is posted
  for (int peer = static_cast<int>(threadIdx.x / 32); peer < p.group.ranks;
       peer += static_cast<int>(blockDim.x / 32)) {
    std::byte* control = control_of(p.group, peer);
    std::byte* slot = second_slot(p.group, control, p.group.rank, generation);
    if (lane < kHeadWords) store_pair(slot + lane * 16, head[lane], generation);
  }
  return true;
}

/// Sixteen lanes, each with its word of the peer's head: becomes that of its second grant, if it
/// guessed fewer rows than arrive there. False, in all of them: the group has failed.
__device__ __forceinline__ bool take_second(const DispatchParameters& p, int peer,
                                            std::uint64_t generation, std::int64_t arriving,
                                            std::uint64_t& word) {
  const unsigned lanes = 0xffffu << (threadIdx.x & 16);
  const auto status =
      static_cast<StepStatus>(__shfl_sync(lanes, word, kStatusWord, kHeadLanes) & 0xffffffff);
  const auto rows = static_cast<std::int64_t>(__shfl_sync(lanes, word, kRowsWord, kHeadLanes));
  if (status != StepStatus::guessed || arriving <= rows) return true;
  // In a call that is refused anyway there may be none.
  if (!__all_sync(lanes, complaint(word, p.call, INT64_MIN) == kNoComplaint)) return true;
  const int index = static_cast<int>(threadIdx.x % kHeadLanes);
  const std::byte* at = second_word(p.group, peer, generation, index);
  TaggedPair pair{};
  const bool there =
      index >= kHeadWords || await_words(p.group, generation, Stage::grants, peer, [&] {
        TagCheck check;
        pair = load_pair(at);
        // As in a body: how old the words before them are is not known.
        check.check_body(pair.low, generation);
        check.check_body(pair.high, generation);
        return check;
      });
  if (__all_sync(lanes, there) == 0) return false;
  word = data_of(pair);
  return true;
}

}  // namespace ferry::cuda::device

// Calls in which ranks touch each other's tensors where they lie: entry, with the places from the
// heads of all ranks, and the end, when all have said that they are done.
#pragma once
#include "cuda/kernels/collectives/call.cuh"
#include "cuda/kernels/collectives/collective.hpp"

namespace ferry::cuda::device {

/// Whole block: where the peers' tensors lie, from their heads. `direct`: all are in registered
/// memory. False: the group has failed.
__device__ inline bool find_tensors(const CollectiveParameters& p, CollectivePeers& peers,
                                    std::uint64_t generation, bool& direct) {
  const int ranks = p.group.ranks;
  const bool registered = thread() >= ranks || peers.bytes[thread()] >= 0;
  direct = __syncthreads_and(registered) != 0;
  if (!direct) return true;
  bool there = true;
  for (int rank = thread(); rank < ranks; rank += threads()) {
    peers.tensor[rank] = checked_place(p.group, rank, peers.segment[rank], peers.offset[rank],
                                       static_cast<std::uint64_t>(peers.bytes[rank]));
    std::int64_t at = p.from.offset(p.group.rank);
    if (p.counts != nullptr) {
      at = 0;
      for (int before = 0; before < p.group.rank && there; ++before) {
        std::int64_t count = 0;
        there = await_count(p, generation, rank, ranks + before, count);
        at += count * p.element_bytes;
      }
    }
    peers.at[rank] = at;
    const std::int64_t piece = p.to.size(rank, ranks);  // none: it goes nowhere
    const std::int64_t needed = p.reduces ? p.place.bytes : (piece > 0 ? at + piece : 0);
    const bool fits = peers.tensor[rank] != nullptr && needed <= peers.bytes[rank];
    if (there && !fits) {
      there =
          fail(p.group, generation, Reason::violation, p.stage, rank, {0, 0, peers.bytes[rank]});
    }
  }
  return __syncthreads_and(there) != 0;
}

/// Whole block: entry of a call. False: nothing moves, return at once.
__device__ inline bool enter(const CollectiveParameters& p, CollectivePeers& peers,
                             std::uint64_t& generation, bool& direct) {
  std::byte* control = first_control(p.group);
  if (thread() < p.group.ranks) {
    peers.inbox[thread()] = segment_of(p.group, thread(), p.segment).data;
  }
  if (!begin_call(p.group, generation)) return false;
  post_collective(p, control, generation);
  const auto take = [&](int peer, std::uint64_t word) {
    switch (thread() % kHeadLanes) {
      case kStatusWord: peers.segment[peer] = static_cast<std::uint32_t>(word >> 32); break;
      case kOffsetWord: peers.offset[peer] = word; break;
      case kRowsWord: peers.bytes[peer] = static_cast<std::int64_t>(word); break;
      default: break;
    }
  };
  if (!await_collective(p, generation, take)) return false;
  if (p.counts != nullptr && !check_counts(p, generation)) return false;
  return find_tensors(p, peers, generation, direct);
}

/// Whole grid: what this rank read of and stored to its peers is complete when all have said so.
__device__ inline void end_direct(const CollectiveParameters& p, std::uint64_t generation) {
  if (!arrive_last(p.group, 1)) return;
  raise_all(p.group, p.group.layout.done, generation);
  if (!await_all(p.group, p.group.layout.done, generation, p.stage)) return;
  if (thread() == 0) end_call(p.group, generation);
}

}  // namespace ferry::cuda::device

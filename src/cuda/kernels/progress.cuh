// How far the rows of a running dispatch have come, so that work on them can begin before its end.
//
// A source cuts its tokens into kProgressParts parts. Row warps take tokens in ascending order;
// when all of them have pushed a part, and the copies are complete, the last one tells every peer
// in the part's own word of the source's line: the generation (32 bits), then how many of its rows
// for that peer are here. It may name fewer than there are. Word 0: the routes are here. One warp
// of the receiver watches the lines and raises the local gate, for which a stream waits, not an SM.
#pragma once
#include "cuda/kernels/push_lanes.cuh"

namespace ferry::cuda::device {

static_assert(kProgressParts * sizeof(std::uint64_t) <= kLineBytes && kProgressParts < 64);

/// The first token that is not in the first `parts` parts.
__device__ __forceinline__ std::int64_t end_of_parts(std::int64_t tokens, int parts) {
  return tokens * parts / kProgressParts;
}

__device__ __forceinline__ std::uint64_t* progress_word(const GroupView& group, std::byte* control,
                                                        int source, int part) {
  return flag_at(control, group.layout.progress, source) + part;
}
__device__ __forceinline__ std::uint64_t progress_of(std::uint64_t generation, std::int64_t rows) {
  return generation << 32 | static_cast<std::uint32_t>(rows);
}
/// Whether a word is of this generation; no peer can be in a later one.
__device__ __forceinline__ bool is_of(std::uint64_t word, std::uint64_t generation) {
  return static_cast<std::uint32_t>(word >> 32) == static_cast<std::uint32_t>(generation);
}

/// Whole warp, whose lane 0 has seen what is told of: each peer's word of this part.
/// `rows(peer)`: asked of every lane.
template <class Rows>
__device__ inline void tell_peers(const GroupView& group, std::uint64_t generation, int part,
                                  const Rows& rows) {
  __syncwarp();
  for (int first = 0; first < group.ranks; first += 32) {
    const int peer = first + static_cast<int>(threadIdx.x % 32);
    const std::int64_t count = rows(peer);
    if (peer >= group.ranks) continue;
    store_release(progress_word(group, control_of(group, peer), group.rank, part),
                  progress_of(generation, count));
  }
}

/// Whole warp, lane 0 of which has fenced what the warp pushed: true in the last of `warps` warps.
__device__ inline bool count_pushed(const GroupView& group, int part, std::uint32_t warps) {
  __syncwarp();
  bool last = false;
  if (threadIdx.x % 32 == 0) {
    std::uint32_t* word = &local_words(group)->pushed[part];
    std::uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(word)
                 : "memory");
    last = before == warps - 1;
    if (last) *word = 0;
  }
  return __shfl_sync(~0u, last, 0);
}

/// Whole warp: for peer `first + lane`, its rows of tokens before `end`; 0 when the last tokens
/// before it have none for that peer.
__device__ inline std::int64_t rows_before(const DispatchParameters& p, int peer,
                                           std::int64_t end) {
  constexpr int kBatch = 2, kMost = 64;  // batches looked at
  std::int64_t rows = 0;
  bool found = peer >= p.group.ranks;
  for (int batch = 0; batch < kMost; ++batch) {
    LaneWords words[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const std::int64_t token = end - 1 - batch * kBatch - i;
      words[i] = load_lane_words(p, token);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const TokenLanes lanes = lanes_of_words(p, words[i]);
#pragma unroll 1
      for (int l = 0; l < lanes.count; ++l) {
        const DeviceLane to = lane_at(lanes, l);
        if (!found && to.rank == peer) found = true, rows = std::int64_t{to.row} + 1;
      }
    }
    if (__all_sync(~0u, found) != 0 || end - 1 - (batch + 1) * kBatch < 0) break;
  }
  return rows;
}

/// A row warp's part in telling.
class PushProgress {
 public:
  __device__ PushProgress(const DispatchParameters& p)
      : end_(p.tells_progress ? end_of_parts(p.plan.tokens, 1) : INT64_MAX) {}

  /// Whole warp: whether the tokens before `token` hold parts not yet counted.
  __device__ __forceinline__ bool due(std::int64_t token) const { return token >= end_; }

  /// Whole warp: its pushes of all tokens before `token` are complete and fenced by lane 0.
  __device__ void pass(const DispatchParameters& p, const PushShape& shape,
                       std::uint64_t generation, std::int64_t token) {
    const auto warps = gridDim.x * static_cast<std::uint32_t>(shape.row_warps);
    while (due(token)) {
      if (count_pushed(p.group, part_, warps)) {
        tell_peers(p.group, generation, part_,
                   [&](int peer) { return rows_before(p, peer, end_); });
      }
      ++part_;
      // What is after the last part is told by the flag of the delivery.
      end_ = part_ < kProgressParts ? end_of_parts(p.plan.tokens, part_) : INT64_MAX;
    }
  }
  /// The same for all that is left.
  __device__ void pass_all(const DispatchParameters& p, const PushShape& shape,
                           std::uint64_t generation) {
    pass(p, shape, generation, INT64_MAX - 1);
  }

 private:
  std::int64_t end_;  ///< of the part that is counted next
  int part_ = 1;
};

/// One side warp, after push_side.
__device__ inline void tell_routes(const DispatchParameters& p, const PushShape& shape,
                                   std::uint64_t generation) {
  if (!p.tells_progress || !p.carries_routes) return;
  if (!count_pushed(p.group, 0, gridDim.x * static_cast<std::uint32_t>(shape.side_warps))) return;
  tell_peers(p.group, generation, 0, [](int) { return std::int64_t{0}; });
}

/// One thread waits until `source` has told of `part`, or all its `blocks` have delivered: its rows
/// that are here, `all` of them at most. Negative: the group has failed.
__device__ inline std::int64_t await_part(const GroupView& group, int source, int part, int blocks,
                                          std::uint64_t generation, std::int64_t all) {
  const std::uint64_t* word = progress_word(group, group.control, source, part);
  Patience patience;
  int block = 0;  // those before have delivered
  for (;;) {
    const std::uint64_t told = load_acquire(word);
    if (is_of(told, generation)) return min(static_cast<std::int64_t>(told & 0xffffffff), all);
    const std::uint64_t seen = load_acquire(delivered_flag(group, group.control, source, block));
    if (seen >= generation) {
      if (++block >= blocks) return all;
      continue;
    }
    Reason reason;
    if (patience.over(group, reason)) {
      if (reason != Reason::none) {
        fail(group, generation, reason, Stage::rows, source, {generation, seen, 0});
      }
      return -1;
    }
#if defined(__CUDA_ARCH__)
    __nanosleep(100);
#endif
  }
}

__device__ __forceinline__ void raise_gate(const GroupView& group, std::uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(&local_words(group)->gate), "r"(value)
               : "memory");
}
/// How far the gate of a call is above its base.
__device__ __forceinline__ std::uint32_t gate_over(const GroupView& group, std::uint32_t base) {
  std::uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];"
               : "=r"(value)
               : "l"(&local_words(group)->gate)
               : "memory");
  return value - base;
}

__device__ __forceinline__ std::int32_t* come_at(const GroupView& group, int step) {
  return reinterpret_cast<std::int32_t*>(group.control + group.layout.come) +
         std::int64_t{step} * group.ranks;
}

/// One warp of block 0, once the call moves: raises the gate as the rows come. False: the group has
/// failed.
__device__ inline bool watch_rows(const DispatchParameters& p, const PushTarget* targets,
                                  std::uint64_t generation) {
  const GroupView& group = p.group;
  if (__all_sync(~0u, await_plan_end(p)) == 0) return false;
  const auto* offsets =
      reinterpret_cast<const std::int64_t*>(p.plan.data + p.plan.layout.recv_offset);
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (int step = -1; step < p.steps.count - 1; ++step) {
    bool there = true;
    for (int source = lane; source < group.ranks && there; source += 32) {
      if (step < 0 && !p.carries_routes) break;
      const int part = step < 0 ? 0 : p.steps.ends[step];
      const std::int64_t rows = await_part(group, source, part, targets[source].blocks, generation,
                                           offsets[source + 1] - offsets[source]);
      there = rows >= 0;
      if (step < 0) continue;
      const std::int32_t before = step > 0 ? come_at(group, step - 1)[source] : 0;
      come_at(group, step)[source] = max(before, static_cast<std::int32_t>(rows));
    }
    if (__all_sync(~0u, there) == 0) return false;
    if (lane != 0) continue;
    if (step < 0) local_words(group)->moving = generation;
    raise_gate(group, p.steps.base + static_cast<std::uint32_t>(step + 2));
  }
  return true;
}

/// One thread, at the end of a call that did not move its rows: nobody waits for them any more.
__device__ __forceinline__ void abandon_gate(const DispatchParameters& p) {
  if (p.steps.count > 0) raise_gate(p.group, p.steps.base + ArrivalSteps::kAbandoned);
}

}  // namespace ferry::cuda::device

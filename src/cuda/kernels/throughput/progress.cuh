// How far the rows of a running dispatch have come, so that work on them can begin before its end.
//
// A source cuts its tokens into parts. Row warps take tokens in ascending order; when all of them
// have pushed a part, and the copies are complete, the last one tells every peer in the part's own
// word of the source's line: the generation (32 bits), then how many of its rows for that peer are
// here. It may name fewer than there are. Word 0: the routes are here. The last part is told by the
// end of the call.
#pragma once
#include "cuda/kernels/throughput/push_destinations.cuh"

namespace ferry::cuda::device {

static_assert(kProgressParts * sizeof(std::uint64_t) <= kLineBytes && kProgressParts < 32);

/// The first token that is not in the first `part` parts.
__device__ __forceinline__ std::int64_t end_of_part(const DispatchParameters& p, int part) {
  return p.plan.tokens * part / p.parts;
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

/// Warps of this block that have pushed a part. Shared memory.
__device__ inline std::uint32_t* pushed_in_block() {
  __shared__ std::uint32_t words[kProgressParts];
  return words;
}
/// Whole block, before a barrier.
__device__ __forceinline__ void begin_progress() {
  if (threadIdx.x < kProgressParts) pushed_in_block()[threadIdx.x] = 0;
}

/// Whole warp, lane 0 of which has fenced what the warp pushed: true in the last of the grid, of
/// `warps` in each block. First in the block: an ordered access of the whole GPU waits for much.
__device__ inline bool count_pushed(const GroupView& group, int part, int warps) {
  __syncwarp();
  bool last = false;
  if (threadIdx.x % 32 == 0) {
    std::uint32_t before;
    asm volatile(
        "atom.acq_rel.cta.shared.add.u32 %0, [%1], 1;"
        : "=r"(before)
        : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(pushed_in_block() + part)))
        : "memory");
    if (before == static_cast<std::uint32_t>(warps) - 1) {
      std::uint32_t* word = &local_words(group)->pushed[part];
      asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                   : "=r"(before)
                   : "l"(word)
                   : "memory");
      last = before == gridDim.x - 1;
      if (last) *word = 0;
    }
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
    DestinationWords words[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const std::int64_t token = end - 1 - batch * kBatch - i;
      words[i] = load_destination_words(p, token);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const TokenDestinations destinations = destinations_of_words(p, words[i]);
#pragma unroll 1
      for (int l = 0; l < destinations.count; ++l) {
        const DeviceDestination to = destination_at(destinations, l);
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
      : end_(p.parts > 0 ? end_of_part(p, 1) : INT64_MAX) {}

  /// Whole warp: whether the tokens before `token` hold parts not yet counted.
  __device__ __forceinline__ bool due(std::int64_t token) const { return token >= end_; }

  /// Whole warp: its pushes of all tokens before `token` are complete and fenced by lane 0.
  __device__ void pass(const DispatchParameters& p, const PushShape& shape,
                       std::uint64_t generation, std::int64_t token) {
    if (part_ >= p.parts) end_ = INT64_MAX;
    while (due(token)) {
      if (count_pushed(p.group, part_, shape.row_warps)) {
        tell_peers(p.group, generation, part_,
                   [&](int peer) { return rows_before(p, peer, end_); });
      }
      ++part_;
      end_ = part_ < p.parts ? end_of_part(p, part_) : INT64_MAX;
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
  if (p.parts == 0 || !p.carries_routes) return;
  if (!count_pushed(p.group, 0, shape.side_warps)) return;
  tell_peers(p.group, generation, 0, [](int) { return std::int64_t{0}; });
}

/// Whole warp polls once: whether the first `rows` rows of a source are here. They are when it has
/// said so, or when the call has ended.
__device__ __forceinline__ bool rows_are_here(const GroupView& group, std::uint64_t generation,
                                              int source, std::int64_t rows) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  bool here = false;
  if (lane == 0) {
    here = load_acquire(&local_words(group)->generation) >= generation;
  } else if (lane < kProgressParts) {
    const std::uint64_t told = load_acquire(progress_word(group, group.control, source, lane));
    here = is_of(told, generation) && static_cast<std::int64_t>(told & 0xffffffff) >= rows;
  }
  __syncwarp();
  return __any_sync(~0u, here) != 0;
}

/// One thread polls once: whether a source's routes are here.
__device__ __forceinline__ bool routes_are_here(const GroupView& group, std::uint64_t generation,
                                                int source) {
  return is_hole(group, source) ||
         is_of(load_acquire(progress_word(group, group.control, source, 0)), generation) ||
         load_acquire(&local_words(group)->generation) >= generation;
}

}  // namespace ferry::cuda::device

// In what order received rows are summed, and how the readers learn how far the sums are. A slice
// holds an equal share of each source's rows, so that all readers find rows at the same pace;
// owners read in the order of their tokens, which is the order of their rows.
#pragma once
#include "cuda/kernels/base/wait.cuh"

namespace ferry::cuda::device {

/// Ranges of rows, one for each slice and source.
inline constexpr int kMostRanges = 288;
static_assert(kMostRanges >= kMaxDomain);
/// Fewer rows are not worth a flag.
inline constexpr std::uint32_t kLeastSlice = 128;

/// How many slices `rows` received rows are cut in, as a power of two.
__device__ __forceinline__ int slice_bits(std::uint32_t rows, int ranks) {
  const int most = min(kMostSlices, kMostRanges / ranks);
  int bits = 0;
  while ((2 << bits) <= most && rows >> (bits + 1) >= kLeastSlice) ++bits;
  return bits;
}
/// Rows of a source that has `rows` in all, in the first `slices` slices.
__device__ __forceinline__ std::uint32_t rows_within(std::uint32_t rows, std::uint32_t slices,
                                                     int bits) {
  return static_cast<std::uint32_t>(std::uint64_t{rows} * slices >> bits);
}

/// The order of the sums: position → row. Shared memory.
struct SumOrder {
  std::uint32_t begin[kMostRanges + 1];  ///< positions, ascending
  std::uint32_t shift[kMostRanges];      ///< row − position

  __device__ std::uint32_t row_at(std::uint32_t position, int ranges) const {
    int low = 0, high = ranges;  // begin[low] <= position < begin[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (begin[middle] <= position) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return position + shift[low];
  }
};

/// Whole block. `recv_offset`: the plan's; rows from `capacity` on are left out.
__device__ inline void make_order(const std::int64_t* recv_offset, int ranks, std::int64_t capacity,
                                  int bits, SumOrder& order) {
  const auto first_of = [&](int source) {
    return static_cast<std::uint32_t>(min(recv_offset[source], capacity));
  };
  const int ranges = ranks << bits;
  for (int i = static_cast<int>(threadIdx.x); i <= ranges; i += static_cast<int>(blockDim.x)) {
    const auto slice = static_cast<std::uint32_t>(i / ranks);
    std::uint32_t position = 0;
    for (int s = 0; s < ranks; ++s) {
      const std::uint32_t rows = first_of(s + 1) - first_of(s);
      const bool before = s < i % ranks;
      position += rows_within(rows, before ? slice + 1 : slice, bits);
    }
    order.begin[i] = position;
    if (i == ranges) continue;
    const std::uint32_t first = first_of(i % ranks);
    const std::uint32_t rows = first_of(i % ranks + 1) - first;
    order.shift[i] = first + rows_within(rows, slice, bits) - position;
  }
  __syncthreads();
}

// The flag: generation and complete slices.
inline constexpr int kSliceBits = 8;

/// What a warp has done of each slice; the last one tells.
struct SliceCount {
  const GroupView& group;
  std::uint64_t generation;
  const SumOrder& order;
  int slices;
  std::uint32_t warps;  ///< of the grid
  int next = 0;

  /// Whole warp: all of its items before this position are stored.
  __device__ void reached(std::uint32_t position) {
    for (; next < slices && position >= order.begin[(next + 1) * group.ranks]; ++next) {
      __syncwarp();
      if (threadIdx.x % 32 != 0) continue;
      std::uint32_t* word = &local_words(group)->summed[next];
      std::uint32_t before;
      asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                   : "=r"(before)
                   : "l"(word)
                   : "memory");
      if (before != warps - 1) continue;
      *word = 0;  // the next call's kernel counts in it
      store_release(flag_at(group.control, group.layout.summed, 0),
                    generation << kSliceBits | static_cast<std::uint64_t>(next + 1));
    }
  }
};

/// Nobody asks how far the sums are.
struct NoCount {
  __device__ void reached(std::uint32_t) const {}
};

inline constexpr std::uint32_t kAllRows = ~0u;

/// Rows of each peer that this rank may read, kAllRows once they all are. Shared memory.
struct SummedRows {
  std::uint32_t rows[kMaxDomain];
};

__device__ __forceinline__ std::uint32_t load_acquire_block(const std::uint32_t* word) {
  std::uint32_t value;
  asm volatile("ld.acquire.cta.shared.u32 %0, [%1];"
               : "=r"(value)
               : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(word)))
               : "memory");
  return value;
}
/// By an exchange: racecheck takes even a releasing store for a race.
__device__ __forceinline__ void store_release_block(std::uint32_t* word, std::uint32_t value) {
  asm volatile("atom.release.cta.shared.exch.b32 _, [%0], %1;" ::"r"(
                   static_cast<std::uint32_t>(__cvta_generic_to_shared(word))),
               "r"(value)
               : "memory");
}

/// One thread polls once how far a peer's sums are. `rows`: that it makes for this rank. False:
/// violation.
__device__ inline bool poll_sums(const GroupView& group, std::uint64_t generation, int peer,
                                 std::uint32_t rows, int bits, SummedRows& summed) {
  const std::uint64_t word = load_acquire(flag_at(control_of(group, peer), group.layout.summed, 0));
  if (word >> kSliceBits != generation) return true;  // an earlier call's
  const auto slices = static_cast<std::uint32_t>(word & ((1u << kSliceBits) - 1));
  if (slices > 1u << bits) {
    return fail(group, generation, Reason::violation, Stage::sums, peer, {1u << bits, slices, 0});
  }
  const bool all = slices == 1u << bits;
  store_release_block(&summed.rows[peer], all ? kAllRows : rows_within(rows, slices, bits));
  return true;
}

/// One warp: keeps `summed` up to date until all rows are summed that this rank reads. `to_me`: i32
/// [ranks], rows of each peer; `of_all`: i64 [ranks], rows that each peer sums.
__device__ inline void watch_sums(const GroupView& group, std::uint64_t generation,
                                  const std::int32_t* to_me, const std::int64_t* of_all,
                                  SummedRows& summed) {
  SpinDeadline spin_deadline;
  for (bool all = false; !all;) {
    all = true;
    int missing = -1;
    for (int peer = static_cast<int>(threadIdx.x % 32); peer < group.ranks; peer += 32) {
      const auto rows = static_cast<std::uint32_t>(to_me[peer]);
      if (load_acquire_block(&summed.rows[peer]) >= rows) continue;
      const int bits = slice_bits(static_cast<std::uint32_t>(of_all[peer]), group.ranks);
      if (!poll_sums(group, generation, peer, rows, bits, summed)) return;
      if (load_acquire_block(&summed.rows[peer]) >= rows) continue;
      all = false;
      missing = peer;
    }
    Reason reason;
    if (all || !spin_deadline.over(group, reason)) continue;
    if (reason != Reason::none) fail(group, generation, reason, Stage::sums, missing);
    return;
  }
}

/// One thread: until a peer has summed this many of this rank's rows, or all. False: the group has
/// failed.
__device__ inline bool await_sum(const GroupView& group, std::uint64_t generation, int peer,
                                 std::uint32_t rows, const SummedRows& summed) {
  SpinDeadline spin_deadline;
  while (load_acquire_block(&summed.rows[peer]) < rows) {
    Reason reason;
    if (!spin_deadline.over(group, reason)) continue;
    if (reason == Reason::none) return false;
    return fail(group, generation, reason, Stage::sums, peer);
  }
  return true;
}

}  // namespace ferry::cuda::device

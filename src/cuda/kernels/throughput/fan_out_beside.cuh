// A fan-out beside its dispatch: some SMs copy rows to their experts while the dispatch still runs.
// Blocks claim work piece by piece, so a block that starts late, when an SM gets free, delays no
// other. A block waits only for what a running block has claimed, or for the dispatch, which runs
// and bounds its own waits.
#pragma once
#include "cuda/kernels/throughput/copy_order.cuh"
#include "cuda/kernels/throughput/fan_out_copy.cuh"
#include "cuda/kernels/throughput/fan_out_place.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

namespace ferry::cuda::device {

__device__ __forceinline__ std::uint32_t load_acquire_device(const std::uint32_t* word) {
  std::uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ std::uint32_t add_device(std::uint32_t* word) {
  std::uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(word)
               : "memory");
  return before;
}

/// Whole block: whether the dispatch beside moves its rows, or has; its generation.
__device__ inline bool call_moves(const GroupView& group, std::uint64_t& generation) {
  __shared__ std::uint64_t moving;
  if (threadIdx.x == 0) {
    const LocalWords* words = local_words(group);
    const std::uint64_t running = load_acquire(&words->generation) + 1;
    moving = load_acquire(&words->moving);
    if (moving != running) {
      // Then it has ended, and what it left is sure to be seen once the kernel has. A call that was
      // refused is none that moves.
      await_kernel_before();
      const std::uint64_t ended = load_acquire(&words->generation);
      moving = load_acquire(&words->moving);
      if (moving != ended || has_failed(group)) moving = 0;
    }
  }
  __syncthreads();
  generation = moving;
  return generation != 0;
}

/// Whole block, once: the last one leaves the words as the next call wants them.
__device__ inline void leave(const GroupView& group) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  BesideWords* words = &local_words(group)->beside;
  if (add_device(&words->left) == gridDim.x - 1) *words = {};
}

/// Whole block: the next block of rows; gridDim.x and more: none is left.
__device__ inline std::uint32_t claim_block(std::uint32_t* counter) {
  __shared__ std::uint32_t claimed;
  __syncthreads();
  if (threadIdx.x == 0) claimed = atomicAdd(counter, 1u);
  __syncthreads();
  return claimed;
}
/// Whole block: a block of rows is done. True, in one thread: it was the last.
__device__ inline bool block_done(std::uint32_t* counter) {
  __syncthreads();
  return threadIdx.x == 0 && add_device(counter) == gridDim.x - 1;
}
/// Whole block: until all blocks of rows are done. False: the group has failed.
__device__ inline bool await_blocks(const GroupView& group, const std::uint32_t* counter) {
  bool good = true;
  if (threadIdx.x == 0) {
    while (good && load_acquire_device(counter) < gridDim.x) good = !has_failed(group);
  }
  return __syncthreads_and(good) != 0;
}

/// Whole block: until the routes of all sources are here. False: the group has failed.
__device__ inline bool await_routes(const FanOutParameters& p, std::uint64_t generation) {
  bool good = true;
  for (int s = static_cast<int>(threadIdx.x); s < p.group.ranks; s += kFanOutThreads) {
    while (good && !routes_are_here(p.group, generation, s)) {
      good = !has_failed(p.group);
      __nanosleep(200);
    }
  }
  return __syncthreads_and(good) != 0;
}

/// Whole block: slot_rows and expert_offsets, by all blocks that are here. False: the group has
/// failed.
__device__ inline bool make_slot_rows(const FanOutLaunch& launch, std::uint64_t generation,
                                      std::int32_t* shared) {
  const FanOutParameters& p = launch.p;
  BesideWords* words = &local_words(p.group)->beside;
  if (p.awaits_routes && !await_routes(p, generation)) return false;
  std::uint32_t claimed;
  while ((claimed = claim_block(&words->counts)) < gridDim.x) {
    const int block = static_cast<int>(claimed);
    count_slots(launch, block, block_counters(launch, shared, block));
    block_done(&words->counted);
  }
  if (!await_blocks(p.group, &words->counted)) return false;
  const std::int64_t received = received_rows(p);
  while ((claimed = claim_block(&words->places)) < gridDim.x) {
    const int block = static_cast<int>(claimed);
    std::int32_t* counters = block_counters(launch, shared, block);
    find_places(launch, block, counters);
    SlotPlacer placer(launch,
                      counters + static_cast<std::int64_t>(threadIdx.x / 32) * launch.experts,
                      share_of_warp(received, block));
    for (std::int64_t row = placer.rows.begin; row < placer.rows.end; ++row) placer.place(row);
    fill_absent(p, received, block);
    if (block_done(&words->placed) && p.made != nullptr) store_release(p.made, 1);
  }
  return await_blocks(p.group, &words->placed);
}

/// One lane claims; whole warp takes.
__device__ __forceinline__ std::uint32_t claim(std::uint32_t* counter) {
  std::uint32_t mine = 0;
  if (threadIdx.x % 32 == 0) mine = atomicAdd(counter, 1u);
  return mine;
}
__device__ __forceinline__ std::uint32_t taken(std::uint32_t claimed) {
  return __shfl_sync(~0u, claimed, 0);
}

/// Padding of the experts and rows behind the last, some at a time.
struct Padding {
  const FanOutParameters& p;
  int experts;
  std::int64_t rows;       ///< at a time
  std::int64_t of_expert;  ///< times
  std::int64_t tail;       ///< first row behind the last expert
  bool left = true;

  __device__ explicit Padding(const FanOutLaunch& launch)
      : p(launch.p),
        experts(launch.experts),
        rows(max(std::int64_t{1}, 16384 / launch.p.row_bytes)),
        of_expert((min(launch.p.alignment - 1, launch.p.out_capacity) + rows - 1) / rows),
        tail(min(launch.p.expert_offsets[launch.experts], launch.p.out_capacity)) {}

  /// Whole warp: planned slots of an expert.
  __device__ std::int64_t slots_of(int expert) const {
    const auto* slots =
        reinterpret_cast<const std::int32_t*>(p.plan.data + p.plan.layout.expert_slots);
    std::int32_t sum = 0;
    for (int s = static_cast<int>(threadIdx.x % 32); s < p.group.ranks; s += 32) {
      sum += slots[static_cast<std::int64_t>(s) * experts + expert];
    }
    return __reduce_add_sync(~0u, sum);
  }

  /// Whole warp: zeroes the next rows, if there are any.
  __device__ void zero_next() {
    const std::int64_t index = taken(claim(&local_words(p.group)->beside.zeros));
    const std::int64_t of_experts = of_expert * experts;
    std::int64_t begin, end;
    if (index < of_experts) {
      const int expert = static_cast<int>(index / of_expert);
      end = min(p.expert_offsets[expert + 1], p.out_capacity);
      begin = p.expert_offsets[expert] + slots_of(expert) + index % of_expert * rows;
    } else {
      end = p.out_capacity;
      begin = tail + (index - of_experts) * rows;
      left = begin < end;
    }
    zero_rows(p, begin, min(begin + rows, end));
  }
};

/// Whole warp: until the rows of a group are here; padding meanwhile. False: the group has failed.
__device__ inline bool await_rows(const GroupView& group, std::uint64_t generation,
                                  const CopyGroup& rows, Padding& padding) {
  while (!rows_are_here(group, generation, rows.source, rows.end)) {
    if (padding.left) {
      padding.zero_next();
      continue;
    }
    if (__any_sync(~0u, has_failed(group)) != 0) return false;
    __nanosleep(200);
  }
  return true;
}

/// Whole warp: where the slots of a row go.
__device__ inline SlotRows slots_of(const FanOutParameters& p, std::int64_t row) {
  const int lane = static_cast<int>(threadIdx.x % 32), topk = p.plan.topk;
  SlotRows to{-1, -1};
  if (lane < topk) to.low = p.slot_rows[row * topk + lane];
  if (lane + 32 < topk) to.high = p.slot_rows[row * topk + lane + 32];
  if (to.low >= p.out_capacity) to.low = -1;
  if (to.high >= p.out_capacity) to.high = -1;
  return to;
}

/// Where a ring is: the next stage to be filled and awaited.
struct RingPlace {
  int stage = 0;
  std::uint32_t parity = 0;
  __device__ void next(const Ring& ring) {
    if (++stage == ring.stages) stage = 0, parity ^= 1u;
  }
};

/// Whole warp: rows that are here to all of their slots, as copy_rows does. False: the group has
/// failed.
__device__ inline bool copy_group(const FanOutLaunch& launch, RowRange rows, const Ring& ring,
                                  RingPlace& at) {
  const FanOutParameters& p = launch.p;
  constexpr int kLag = 2;
  const bool pulls = threadIdx.x % 32 == 0;
  const auto pieces =
      static_cast<std::uint32_t>((p.row_bytes + ring.piece_bytes - 1) / ring.piece_bytes);
  PieceCursor cursor{p.rows + rows.begin * p.row_bytes, rows.end - rows.begin, pieces};
  SlotRows next = slots_of(p, rows.begin);
  bulk_wait_read<0>();  // the stages of the group before
  __syncwarp();
  fence_proxy_async();  // what ordinary loads saw of the rows' arrival, before TMA reads them
  int refill = at.stage;
  const auto pull = [&] {
    if (pulls) cursor.pull_next(p, ring, refill);
    if (++refill == ring.stages) refill = 0;
  };
  for (int i = 0; i < ring.stages - kLag; ++i) pull();
  for (std::int64_t row = rows.begin; row < rows.end; ++row) {
    const SlotRows to = next;
    if (row + 1 < rows.end) next = slots_of(p, row + 1);
    copy_scales(p, row, to);
    for (std::uint32_t piece = 0; piece < pieces; ++piece) {
      bulk_wait_read<kLag - 1>();  // of this lane's stores
      __syncwarp();
      pull();
      const bool come = await_stage(ring, at.stage, at.parity);
      if (!__all_sync(0xffffffffu, come)) {
        // Pieces that have come or are on their way: this one and those pulled after it.
        const std::int64_t left = (rows.end - row) * pieces - piece;
        for (std::int64_t i = min(left, std::int64_t{ring.stages - kLag + 1}); i > 0; --i) {
          drain_load(ring.barriers + at.stage, at.parity);
          at.next(ring);
        }
        return false;
      }
      const std::int64_t offset = static_cast<std::int64_t>(piece) * ring.piece_bytes;
      const std::int64_t left = p.row_bytes - offset;
      const auto bytes =
          left < ring.piece_bytes ? static_cast<std::uint32_t>(left) : ring.piece_bytes;
      const std::byte* data = ring.data + static_cast<std::uint32_t>(at.stage) * ring.piece_bytes;
      if (to.low >= 0) bulk_store(p.out + to.low * p.row_bytes + offset, data, bytes);
      if (to.high >= 0) bulk_store(p.out + to.high * p.row_bytes + offset, data, bytes);
      bulk_commit();
      at.next(ring);
    }
  }
  return true;
}

/// Whole warp: claims and copies until nothing is left, then what is left of the padding.
__device__ inline void copy_groups(const FanOutLaunch& launch, std::uint64_t generation,
                                   const CopyOrder& order) {
  const FanOutParameters& p = launch.p;
  std::uint32_t* copies = &local_words(p.group)->beside.copies;
  const Ring ring =
      ring_of_warp(p.group, generation, kFanOutWarps, launch.stages, launch.piece_bytes);
  Padding padding(launch);
  RingPlace place;
  const std::uint32_t all = order.begin[order.ranges()];
  std::uint32_t mine = taken(claim(copies));
  bool good = true;
  while (good && mine < all) {
    const CopyGroup group = group_at(order, mine);
    const std::uint32_t later = claim(copies);  // its answer is on its way meanwhile
    good = await_rows(p.group, generation, group, padding) &&
           copy_group(launch, group.rows, ring, place);
    mine = taken(later);
  }
  bulk_wait<0>();
  while (good && padding.left) padding.zero_next();
}

/// Whole block.
__device__ inline void fan_out_beside(const FanOutLaunch& launch, std::uint64_t generation,
                                      std::int32_t* shared, CopyOrder& order) {
  const FanOutParameters& p = launch.p;
  const bool made = p.may_be_made && p.made != nullptr && load_acquire(p.made) == 1;
  if (__syncthreads_and(made) == 0 && !make_slot_rows(launch, generation, shared)) return;
  make_copy_order(launch, order);
  copy_groups(launch, generation, order);
}

}  // namespace ferry::cuda::device

#endif

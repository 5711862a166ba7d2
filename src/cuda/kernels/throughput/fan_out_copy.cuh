// A warp's received rows, each read once and stored to all of its slots.
#pragma once
#include "cuda/kernels/base/ring_sm90.cuh"
#include "cuda/kernels/throughput/combine_sm80.cuh"
#include "cuda/kernels/throughput/expert_major.cuh"

namespace ferry::cuda::device {

/// Whole warp: a row's scales to all of its slots.
__device__ inline void copy_scales(const FanOutParameters& p, std::int64_t row,
                                   const SlotRows& to) {
  copy_scales(p, row, to.low);
  if (p.plan.topk > 32) copy_scales(p, row, to.high);
}

/// The rows of one warp in order, and where their slots go: ids are loaded a row ahead.
struct SlotPlacer {
  const FanOutLaunch& launch;
  std::int32_t* counters;  // this warp's
  RowRange rows;
  int low, high;  // ids of the next row to be placed

  __device__ SlotPlacer(const FanOutLaunch& what, std::int32_t* own, RowRange range)
      : launch(what), counters(own), rows(range), low(-1), high(-1) {
    load(range.begin);
  }
  __device__ void load(std::int64_t row) {
    const FanOutParameters& p = launch.p;
    const int lane = static_cast<int>(threadIdx.x % 32), topk = p.plan.topk;
    low = high = -1;
    if (row >= rows.end) return;
    if (lane < topk) low = p.ids[row * topk + lane];
    if (lane + 32 < topk) high = p.ids[row * topk + lane + 32];
  }
  /// Whole warp: where `row` goes, in ascending calls from rows.begin; tells the caller's tensor.
  __device__ SlotRows place(std::int64_t row) {
    const FanOutParameters& p = launch.p;
    const int lane = static_cast<int>(threadIdx.x % 32), topk = p.plan.topk;
    const int id = low, id_high = high;
    load(row + 1);
    SlotRows to{place_slots(id, launch.experts, counters), -1};
    if (topk > 32) to.high = place_slots(id_high, launch.experts, counters);
    if (to.low >= p.out_capacity) to.low = -1;  // only if a peer's routes are not those it counted
    if (to.high >= p.out_capacity) to.high = -1;
    if (lane < topk) p.slot_rows[row * topk + lane] = to.low;
    if (lane + 32 < topk) p.slot_rows[row * topk + lane + 32] = to.high;
    return to;
  }
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

/// The pieces of a warp's rows, in order, as they are pulled into the ring.
struct PieceCursor {
  const std::byte* from;  // of the next row
  std::int64_t rows_left;
  std::uint32_t row_pieces;
  std::uint32_t piece = 0;

  __device__ void pull_next(const FanOutParameters& p, const Ring& ring, int stage) {
    if (rows_left <= 0) return;
    const std::int64_t offset = static_cast<std::int64_t>(piece) * ring.piece_bytes;
    const std::int64_t left = p.row_bytes - offset;
    const auto bytes =
        left < ring.piece_bytes ? static_cast<std::uint32_t>(left) : ring.piece_bytes;
    barrier_expect(ring.barriers + stage, bytes);
    bulk_load(ring.data + static_cast<std::uint32_t>(stage) * ring.piece_bytes, from + offset,
              bytes, ring.barriers + stage);
    if (++piece == row_pieces) {
      piece = 0;
      from += p.row_bytes;
      --rows_left;
    }
  }
};

/// Every lane stores to its own slots; one lane pulls. Needs three stages. False: the group has
/// failed.
__device__ inline bool copy_rows(const FanOutLaunch& launch, SlotPlacer& placer, const Ring& ring) {
  const FanOutParameters& p = launch.p;
  const RowRange rows = placer.rows;
  fence_proxy_async();  // what ordinary loads saw of the rows' arrival, before TMA reads them
  const bool pulls = threadIdx.x % 32 == 0;
  const auto pieces =
      static_cast<std::uint32_t>((p.row_bytes + ring.piece_bytes - 1) / ring.piece_bytes);
  PieceCursor cursor{p.rows + rows.begin * p.row_bytes, rows.end - rows.begin, pieces};
  // Stores from two stages may still be reading them while the next is awaited: these two are
  // pulled anew last.
  constexpr int kLag = 2;
  for (int i = 0; pulls && i < ring.stages - kLag; ++i) cursor.pull_next(p, ring, i);
  int stage = 0, refill = ring.stages - kLag;
  std::uint32_t parity = 0;
  for (std::int64_t row = rows.begin; row < rows.end; ++row) {
    const SlotRows to = placer.place(row);
    copy_scales(p, row, to);
    for (std::uint32_t piece = 0; piece < pieces; ++piece) {
      bulk_wait_read<kLag - 1>();  // of this lane's stores
      __syncwarp();
      if (pulls) cursor.pull_next(p, ring, refill);
      if (++refill == ring.stages) refill = 0;
      const bool come = await_stage(ring, stage, parity);
      if (!__all_sync(0xffffffffu, come)) {
        // Pieces that have come or are on their way: this one and those pulled after it.
        const std::int64_t left = (rows.end - row) * pieces - piece;
        for (std::int64_t i = min(left, std::int64_t{ring.stages - kLag + 1}); i > 0; --i) {
          drain_load(ring.barriers + stage, parity);
          if (++stage == ring.stages) stage = 0, parity ^= 1u;
        }
        bulk_wait<0>();
        return false;
      }
      const std::int64_t offset = static_cast<std::int64_t>(piece) * ring.piece_bytes;
      const std::int64_t left = p.row_bytes - offset;
      const auto bytes =
          left < ring.piece_bytes ? static_cast<std::uint32_t>(left) : ring.piece_bytes;
      const std::byte* data = ring.data + static_cast<std::uint32_t>(stage) * ring.piece_bytes;
      if (to.low >= 0) bulk_store(p.out + to.low * p.row_bytes + offset, data, bytes);
      if (to.high >= 0) bulk_store(p.out + to.high * p.row_bytes + offset, data, bytes);
      bulk_commit();
      if (++stage == ring.stages) {
        stage = 0;
        parity ^= 1u;
      }
    }
  }
  bulk_wait<0>();
  return true;
}

#endif

/// Whole warp: one row to its slots by 16-byte loads and stores.
__device__ inline void copy_row_by_loads(const FanOutParameters& p, std::int64_t row,
                                         const SlotRows& to) {
  constexpr int kVectors = 4;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::uint32_t low = __ballot_sync(0xffffffffu, to.low >= 0);
  const std::uint32_t high = __ballot_sync(0xffffffffu, to.high >= 0);
  for (std::int64_t offset = 0; offset < p.row_bytes; offset += kVectors * 512) {
    const int count =
        static_cast<int>(min(p.row_bytes - offset, std::int64_t{kVectors * 512}) / 16);
    uint4 vectors[kVectors];
    load_piece(vectors, p.rows + row * p.row_bytes + offset, count);
    for (int word = 0; word < 2; ++word) {
      for (std::uint32_t left = word == 0 ? low : high; left != 0; left &= left - 1) {
        const std::int64_t slot =
            __shfl_sync(0xffffffffu, word == 0 ? to.low : to.high, __ffs(left) - 1);
        auto* out = reinterpret_cast<uint4*>(p.out + slot * p.row_bytes + offset);
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          if (lane + 32 * v < count) out[lane + 32 * v] = vectors[v];
        }
      }
    }
  }
}

/// copy_rows before sm_90.
__device__ inline void copy_rows_by_loads(const FanOutLaunch& launch, SlotPlacer& placer) {
  for (std::int64_t row = placer.rows.begin; row < placer.rows.end; ++row) {
    const SlotRows to = placer.place(row);
    copy_scales(launch.p, row, to);
    copy_row_by_loads(launch.p, row, to);
  }
}

}  // namespace ferry::cuda::device

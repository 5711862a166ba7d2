// The rows of one step of a fan-out, which the places of their slots are known of: some of every
// source. All warps share them by pieces, so that a step of few rows keeps all SMs busy.
#pragma once
#include "cuda/kernels/fan_out_copy.cuh"

namespace ferry::cuda::device {

/// A step's rows: source s has [first[s], end[s]); `before[s]` rows of the step lie ahead of them.
struct StepRows {
  std::int64_t first[kMaxDomain];
  std::int64_t end[kMaxDomain];
  std::int64_t before[kMaxDomain + 1];
  int sources;
};

/// Whole block.
__device__ inline void find_step_rows(const FanOutParameters& p, int step, StepRows& rows) {
  const auto* offsets =
      reinterpret_cast<const std::int64_t*>(p.plan.data + p.plan.layout.recv_offset);
  const int ranks = p.group.ranks;
  const bool last = step == p.steps.count - 1;
  for (int s = static_cast<int>(threadIdx.x); s < ranks; s += static_cast<int>(blockDim.x)) {
    const std::int64_t begin = step > 0 ? come_at(p.group, step - 1)[s] : 0;
    const std::int64_t end = last ? offsets[s + 1] - offsets[s] : come_at(p.group, step)[s];
    rows.first[s] = offsets[s] + begin;
    rows.end[s] = offsets[s] + end;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    rows.sources = ranks;
    rows.before[0] = 0;
    for (int s = 0; s < ranks; ++s) {
      rows.before[s + 1] = rows.before[s] + rows.end[s] - rows.first[s];
    }
  }
  __syncthreads();
}

/// Walks over the pieces of a step's rows.
struct PieceWalk {
  const StepRows& rows;
  std::uint32_t pieces;  ///< of a row
  int source = 0;
  std::int64_t row = 0;
  std::uint32_t piece = 0;

  /// At piece `index` of all, which exists.
  __device__ PieceWalk(const StepRows& of, std::uint32_t pieces_of_row, std::int64_t index)
      : rows(of), pieces(pieces_of_row) {
    const std::int64_t ordinal = index / pieces;
    piece = static_cast<std::uint32_t>(index - ordinal * pieces);
    while (source + 1 < rows.sources && ordinal >= rows.before[source + 1]) ++source;
    row = rows.first[source] + ordinal - rows.before[source];
  }
  __device__ void next_row() {
    piece = 0;
    ++row;
    while (source + 1 < rows.sources && row >= rows.end[source]) row = rows.first[++source];
  }
  __device__ void next() {
    if (++piece == pieces) next_row();
  }
};

/// Whole warp: where the slots of a row go.
__device__ inline SlotRows slots_of(const FanOutParameters& p, std::int64_t row) {
  const int lane = static_cast<int>(threadIdx.x % 32), topk = p.plan.topk;
  SlotRows to{-1, -1};
  if (lane < topk) to.low = p.slot_rows[row * topk + lane];
  if (lane + 32 < topk) to.high = p.slot_rows[row * topk + lane + 32];
  return to;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

__device__ __forceinline__ std::uint32_t piece_size(const FanOutParameters& p, const Ring& ring,
                                                    std::uint32_t piece) {
  const std::int64_t left = p.row_bytes - static_cast<std::int64_t>(piece) * ring.piece_bytes;
  return left < ring.piece_bytes ? static_cast<std::uint32_t>(left) : ring.piece_bytes;
}

/// One lane.
__device__ __forceinline__ void pull_piece(const FanOutParameters& p, const Ring& ring,
                                           const PieceWalk& at, int stage) {
  const std::uint32_t bytes = piece_size(p, ring, at.piece);
  barrier_expect(ring.barriers + stage, bytes);
  bulk_load(ring.data + static_cast<std::uint32_t>(stage) * ring.piece_bytes,
            p.rows + at.row * p.row_bytes + static_cast<std::int64_t>(at.piece) * ring.piece_bytes,
            bytes, ring.barriers + stage);
}

/// Whole warp: its share of the step's pieces, to all slots: one lane pulls, every lane stores to
/// its own slots, as in copy_rows.
__device__ inline void copy_step(const FanOutLaunch& launch, const StepRows& rows,
                                 const Ring& ring) {
  const FanOutParameters& p = launch.p;
  const auto pieces =
      static_cast<std::uint32_t>((p.row_bytes + ring.piece_bytes - 1) / ring.piece_bytes);
  const RowRange share = share_of_warp(rows.before[rows.sources] * pieces);
  if (share.begin >= share.end) return;
  constexpr int kLag = 2;
  const bool pulls = threadIdx.x % 32 == 0;
  PieceWalk at(rows, pieces, share.begin), ahead = at;
  std::int64_t left = share.end - share.begin;  // to be pulled
  const auto pull_next = [&](int stage) {
    if (left <= 0) return;
    pull_piece(p, ring, ahead, stage);
    ahead.next();
    --left;
  };
  fence_proxy_async();  // what ordinary loads saw of the rows' arrival, before TMA reads them
  for (int i = 0; pulls && i < ring.stages - kLag; ++i) pull_next(i);
  int stage = 0, refill = ring.stages - kLag;
  std::uint32_t parity = 0;
  SlotRows to = slots_of(p, at.row);
  if (at.piece == 0) copy_scales(p, at.row, to);
  for (std::int64_t i = share.begin; i < share.end; ++i) {
    bulk_wait_read<kLag - 1>();  // of this lane's stores
    __syncwarp();
    if (pulls) pull_next(refill);
    if (++refill == ring.stages) refill = 0;
    const bool come = await_stage(ring, stage, parity);
    if (!__all_sync(0xffffffffu, come)) {
      // Pieces that have come or are on their way: this one and those pulled after it.
      for (std::int64_t n = share.end - i - left; pulls && n > 0; --n) {
        drain_load(ring.barriers + stage, parity);
        if (++stage == ring.stages) stage = 0, parity ^= 1u;
      }
      break;
    }
    const std::byte* data = ring.data + static_cast<std::uint32_t>(stage) * ring.piece_bytes;
    const std::int64_t offset = static_cast<std::int64_t>(at.piece) * ring.piece_bytes;
    const std::uint32_t bytes = piece_size(p, ring, at.piece);
    if (to.low >= 0) bulk_store(p.out + to.low * p.row_bytes + offset, data, bytes);
    if (to.high >= 0) bulk_store(p.out + to.high * p.row_bytes + offset, data, bytes);
    bulk_commit();
    at.next();
    if (at.piece == 0 && i + 1 < share.end) {
      to = slots_of(p, at.row);
      copy_scales(p, at.row, to);
    }
    if (++stage == ring.stages) {
      stage = 0;
      parity ^= 1u;
    }
  }
  bulk_wait<0>();
}

#endif

/// The same by 16-byte loads and stores, whole rows.
__device__ inline void copy_step_by_loads(const FanOutLaunch& launch, const StepRows& rows) {
  const RowRange share = share_of_warp(rows.before[rows.sources]);
  if (share.begin >= share.end) return;
  PieceWalk at(rows, 1, share.begin);
  for (std::int64_t i = share.begin; i < share.end; ++i) {
    const SlotRows to = slots_of(launch.p, at.row);
    copy_scales(launch.p, at.row, to);
    copy_row_by_loads(launch.p, at.row, to);
    if (i + 1 < share.end) at.next();
  }
}

}  // namespace ferry::cuda::device

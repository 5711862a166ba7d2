// Pushing rows by bulk copies: sm_90 and later. Each warp has a ring of stages in shared memory;
// its first lane lets the copy engine bring the next rows while the rows before fly to the peers.
#pragma once
#include "cuda/kernels/base/bulk_copy_sm90.cuh"
#include "cuda/kernels/throughput/dispatch_quantize_sm90.cuh"
#include "cuda/kernels/throughput/progress.cuh"
#include "cuda/kernels/throughput/push_destinations.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

namespace ferry::cuda::device {

__device__ __forceinline__ std::uint32_t piece_bytes(const PushShape& shape, int piece) {
  const std::int64_t left = shape.x_row_bytes - std::int64_t{piece} * shape.piece;
  return left < shape.piece ? static_cast<std::uint32_t>(left) : shape.piece;
}

/// One lane: brings one piece, and with the first the scales, into a stage.
__device__ __forceinline__ void bring(const DispatchParameters& p, const PushShape& shape,
                                      std::int64_t token, int piece, std::byte* stage,
                                      std::uint64_t* barrier) {
  const std::uint32_t bytes = piece_bytes(shape, piece);
  const std::uint32_t scales = piece == 0 ? shape.scale_bytes : 0;
  barrier_expect(barrier, bytes + scales);
  bulk_load(stage, p.x + token * shape.x_row_bytes + std::int64_t{piece} * shape.piece, bytes,
            barrier);
  if (scales > 0) {
    bulk_load(stage + shape.piece, p.scales + token * p.scale_token_stride, scales, barrier);
  }
}

/// One lane: a stage has its piece. False: the group has failed. The rows are this GPU's own
/// memory, so nothing but a fault can hold them back.
__device__ __forceinline__ bool await_piece(const DispatchParameters& p, std::uint64_t generation,
                                            std::uint64_t* barrier, std::uint32_t parity) {
  SpinDeadline spin_deadline;
  while (!barrier_try_wait(barrier, parity)) {
    Reason reason;
    if (spin_deadline.over(p.group, reason)) {
      if (reason == Reason::none) return false;
      return fail(p.group, generation, reason, Stage::rows, p.group.rank);
    }
  }
  return true;
}

/// Rows that go out as they come in. Quantized (dispatch_quantize_sm90.cuh) is the other kind.
struct AsIs {
  __device__ __forceinline__ static void prepare(const DispatchParameters&, const PushShape&,
                                                 std::uint32_t, std::byte*, std::uint64_t*,
                                                 std::uint32_t) {}

  /// Whole warp: sends a stage to one peer.
  __device__ __forceinline__ static void send(const DispatchParameters& p, const PushShape& shape,
                                              const PushTarget& target, std::int32_t row, int piece,
                                              std::uint32_t bytes, const std::byte* stage) {
    if (threadIdx.x % 32 != 0) return;
    bulk_store(target.rows + row * p.row_bytes + std::int64_t{piece} * shape.piece, stage, bytes);
    if (piece == 0 && shape.scale_bytes > 0) {
      bulk_store(target.scales + row * p.scale_columns, stage + shape.piece, shape.scale_bytes);
    }
  }
};

/// A warp's part of the shared memory.
struct RowRing {
  std::byte* stages;
  std::uint64_t* barriers;
};
__device__ __forceinline__ RowRing row_ring(const DispatchParameters& p, const PushShape& shape,
                                            std::byte* shared) {
  const PushShared at =
      make_push_shared(p.group.ranks, shape.row_warps, shape.stages, shape.stage_bytes);
  const auto slot = static_cast<std::size_t>(static_cast<int>(threadIdx.x / 32) * shape.stages);
  return {shared + at.stages + slot * shape.stage_bytes,
          reinterpret_cast<std::uint64_t*>(shared + at.barriers) + slot};
}

/// Pieces that are brought ahead of the one that goes.
__host__ __device__ constexpr int pieces_ahead(int stages) {
  return stages / 2;
}

/// The first tokens of a row warp are fixed, so that they can be brought before anything is agreed
/// and nobody waits for a counter. Each later one goes to the warp that asks first: some SMs are
/// slower than others, and a fixed share makes all wait for them.
__device__ __forceinline__ std::int64_t fixed_token(const DispatchParameters& p,
                                                    const PushShape& shape, int index) {
  const std::int64_t stride = std::int64_t{gridDim.x} * shape.row_warps;
  const std::int64_t token =
      index * stride + std::int64_t{threadIdx.x / 32} * gridDim.x + blockIdx.x;
  return token < p.plan.tokens ? token : -1;
}

/// One lane of a warp: the tokens after the fixed ones.
class TokenClaims {
 public:
  __device__ TokenClaims(const DispatchParameters& p, const PushShape& shape, int fixed)
      : counter_(&local_words(p.group)->arrived[kTokenCounter]),
        first_(std::int64_t{gridDim.x} * shape.row_warps * fixed),
        tokens_(p.plan.tokens) {}

  /// The answer is on its way until take().
  __device__ __forceinline__ void ask() {
    if (first_ + answer_ < tokens_) answer_ = atomicAdd(counter_, 1u);
  }
  __device__ __forceinline__ std::int64_t take() const {
    return first_ + answer_ < tokens_ ? first_ + answer_ : -1;
  }

 private:
  std::uint32_t* counter_;
  std::int64_t first_, tokens_;
  std::uint32_t answer_ = 0;  ///< the last one: they only grow
};

/// One row warp: asks for the destinations of its first token.
__device__ __forceinline__ DestinationWords ask_first_destinations(const DispatchParameters& p,
                                                                   const PushShape& shape) {
  return load_destination_words(p, fixed_token(p, shape, 0));
}

/// One row warp, before it is known where rows go: brings the first pieces.
__device__ inline void begin_rows(const DispatchParameters& p, const PushShape& shape,
                                  std::byte* shared) {
  if (threadIdx.x % 32 != 0) return;
  const RowRing ring = row_ring(p, shape, shared);
  for (int s = 0; s < shape.stages; ++s) barrier_init(ring.barriers + s, 1);
  barrier_init_fence();
  int piece = 0, index = 0;
  for (int s = 0; s < pieces_ahead(shape.stages); ++s) {
    const std::int64_t token = fixed_token(p, shape, index);
    if (token < 0) break;
    bring(p, shape, token, piece, ring.stages + s * shape.stage_bytes, ring.barriers + s);
    if (++piece == shape.pieces) piece = 0, ++index;
  }
}

/// Pieces that begin_rows brings.
__device__ __forceinline__ int first_pieces(const DispatchParameters& p, const PushShape& shape) {
  int count = 0;
  while (count < pieces_ahead(shape.stages) && fixed_token(p, shape, count / shape.pieces) >= 0) {
    ++count;
  }
  return count;
}

/// One row warp, instead of push_rows.
__device__ inline void drop_rows(const DispatchParameters& p, const PushShape& shape,
                                 std::uint64_t /*generation*/, std::byte* shared) {
  if (threadIdx.x % 32 != 0) return;
  const RowRing ring = row_ring(p, shape, shared);
  for (int s = first_pieces(p, shape); s-- > 0;) drain_load(ring.barriers + s, 0);
}

/// Whole warp: the piece in `stage` to all ranks of its token.
template <class Rows>
__device__ __forceinline__ void send_to_all(const DispatchParameters& p, const PushShape& shape,
                                            const PushTarget* targets,
                                            const TokenDestinations& destinations,
                                            std::int64_t token, int piece, const std::byte* stage) {
  const int begin = first_destination(p, destinations, token);
  const std::uint32_t bytes = piece_bytes(shape, piece);
#pragma unroll 1
  for (int i = 0; i < destinations.count; ++i) {
    const DeviceDestination to = destination_at(
        destinations, begin + i < destinations.count ? begin + i : begin + i - destinations.count);
    Rows::send(p, shape, targets[to.rank], to.row, piece, bytes, stage);
  }
  if (threadIdx.x % 32 == 0) bulk_commit();
}

template <class Rows, int kStages, bool kTells>
__device__ bool push_rows_staged(const DispatchParameters& p, const PushShape& shape,
                                 const PushTarget* targets, std::uint64_t generation,
                                 const RowRing& ring, DestinationWords next) {
  constexpr int kAhead = pieces_ahead(kStages);
  const bool leader = threadIdx.x % 32 == 0;
  TokenClaims claims(p, shape, kAhead + 1);
  if (leader) claims.ask();
  std::int64_t tokens[kAhead + 1];  // the one that goes, and those after it
#pragma unroll
  for (int i = 0; i <= kAhead; ++i) tokens[i] = fixed_token(p, shape, i);
  TokenDestinations destinations = destinations_of_words(p, next);
  next = load_destination_words(p, tokens[1]);
  int going = 0, coming = kAhead % shape.pieces, coming_token = kAhead / shape.pieces;
  int stage = 0, good = 1;
  std::uint32_t parity = 0;
  int flying = first_pieces(p, shape);  // pieces on their way: into `stage` and those after it
  PushProgress progress(p);
  std::int64_t last = -1;  // token of the piece before
  while (tokens[0] >= 0) {
    if (leader) {
      std::int64_t brought = tokens[0];
#pragma unroll
      for (int i = 1; i <= kAhead; ++i) brought = i == coming_token ? tokens[i] : brought;
      // The stage that is filled now was last sent from kStages - kAhead pieces ago.
      bulk_wait_read<kStages - kAhead - 1>();
      const int free = stage + kAhead < kStages ? stage + kAhead : stage + kAhead - kStages;
      if (brought >= 0) {
        bring(p, shape, brought, coming, ring.stages + free * shape.stage_bytes,
              ring.barriers + free);
        ++flying;
      }
      good = await_piece(p, generation, ring.barriers + stage, parity);
      flying -= good;
    }
    if (++coming == shape.pieces) coming = 0, ++coming_token;
    if (__shfl_sync(~0u, good, 0) == 0) break;
    std::byte* ready = ring.stages + stage * shape.stage_bytes;
    Rows::prepare(p, shape, piece_bytes(shape, going), ready, ring.barriers + stage, parity);
    send_to_all<Rows>(p, shape, targets, destinations, tokens[0], going, ready);
    if (kTells && progress.due(last)) {
      // All but this piece and the one before, so nobody stands still: the others have long gone.
      if (leader) {
        bulk_wait<2>();
        fence_proxy_async();
      }
      progress.pass(p, shape, generation, last);
    }
    if (kTells) last = tokens[0];
    if (++going == shape.pieces) {
      going = 0, --coming_token;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) tokens[i] = tokens[i + 1];
      tokens[kAhead] = __shfl_sync(~0u, claims.take(), 0);
      if (leader) claims.ask();
      destinations = destinations_of_words(p, next);
      next = load_destination_words(p, tokens[1]);
    }
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  if (leader) {
    for (; flying > 0; --flying) {  // the group has failed
      drain_load(ring.barriers + stage, parity);
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
    bulk_wait<0>();
    fence_proxy_async();
  }
  if (kTells && __shfl_sync(~0u, good, 0) != 0) progress.pass_all(p, shape, generation);
  return good != 0;
}

/// One row warp, after begin_rows: pushes rows until no token is left. `first`: what
/// ask_first_destinations gave. `kTells`: as the parameters have it. False: the group has failed.
template <bool kQuantizes, bool kTells>
__device__ inline bool push_rows(const DispatchParameters& p, const PushShape& shape,
                                 const PushTarget* targets, std::uint64_t generation,
                                 std::byte* shared, const DestinationWords& first) {
  const RowRing ring = row_ring(p, shape, shared);
  const auto push = [&]<class Rows, int kStages>() {
    return push_rows_staged<Rows, kStages, kTells>(p, shape, targets, generation, ring, first);
  };
  if constexpr (kQuantizes) {
    switch (p.x_dtype) {
      case Dtype::bf16: return push.template operator()<Quantized<Bf16>, 3>();
      case Dtype::f16: return push.template operator()<Quantized<Fp16>, 3>();
      default: return push.template operator()<Quantized<float>, 3>();
    }
  } else {
    return shape.stages == 3 ? push.template operator()<AsIs, 3>()
                             : push.template operator()<AsIs, 4>();
  }
}

}  // namespace ferry::cuda::device

#endif

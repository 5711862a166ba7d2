// Counting and placing the tokens of one rank: from routes to destinations, by one block.
#pragma once
#include "cuda/kernels/base/wait.cuh"
#include "cuda/kernels/throughput/kernels.hpp"

namespace ferry::cuda::plan {

inline constexpr int kThreads = 1024;
inline constexpr int kWarps = kThreads / 32;
inline constexpr std::int64_t kSharedExperts = 8192;  // 40 KB: fits beside the rest on every chip

/// What the host divides, so that no thread has to.
struct PlanShape {
  int width = 1;                  ///< lanes that read a token side by side, a power of two
  std::int32_t block = 0;         ///< experts of a rank, at least
  std::int32_t larger = 0;        ///< the first ranks, which hold one more
  std::uint64_t block_magic = 0;  ///< divides by `block`, by `block` + 1
  std::uint64_t large_magic = 0;

  __device__ __forceinline__ std::int32_t first_expert(int rank) const {
    return rank * block + (rank < larger ? rank : larger);
  }
  __device__ __forceinline__ std::int32_t local_experts(int rank) const {
    return block + (rank < larger ? 1 : 0);
  }
};

/// kWords: 32-bit words of a token's mask of ranks. A thread places up to kPerThread tokens a
/// round: as few as it takes, so that few tokens are spread over many warps.
template <int kWords>
struct Round {
  static constexpr int kPerThread = kWords == 1 ? 4 : 2;
  static constexpr int kTokens = kThreads * kPerThread;  ///< of a full round
  static constexpr int kUnroll = kWords == 1 ? 8 : 4;    ///< loads in flight of one lane
};

/// Where things lie in dynamic shared memory.
struct SharedLayout {
  std::size_t counts = 0;   ///< i32 [kWarps, R]: tokens of a warp for a rank, then its first row
  std::size_t totals = 0;   ///< i32 [R]: tokens for each rank so far
  std::size_t masks = 0;    ///< u32 [kWords, kTokens]; after the swap: i32 [R, R]
  std::size_t slots = 0;    ///< i32 [E]
  std::size_t rank_of = 0;  ///< u8 [E]
  std::size_t bytes = 0;
};

__host__ __device__ constexpr SharedLayout make_shared_layout(int ranks, std::int64_t experts,
                                                              int words) {
  const auto r = static_cast<std::size_t>(ranks);
  const std::size_t tokens = words == 1 ? Round<1>::kTokens : Round<3>::kTokens;
  const auto e = static_cast<std::size_t>(experts <= kSharedExperts ? experts : 0);
  SharedLayout layout{};
  Carver carver{};
  layout.counts = carver.take(kWarps * r * 4, 16);
  layout.totals = carver.take(r * 4, 16);
  layout.masks = carver.take(tokens * static_cast<std::size_t>(words) * 4, 16);
  layout.slots = carver.take(e * 4, 16);
  layout.rank_of = carver.take(e, 16);
  layout.bytes = carver.end;
  return layout;
}
static_assert(std::size_t{kMaxDomain} * kMaxDomain <= Round<3>::kTokens * 3,
              "the matrix of counts takes the place of the masks");
static_assert(32 * 32 <= Round<1>::kTokens, "the same");

struct Workplace {
  std::int32_t* counts;
  std::int32_t* totals;
  std::uint32_t* masks;
  std::int32_t* slots;    ///< in shared memory; null: too many experts
  std::uint8_t* rank_of;  ///< the same
  std::int32_t* scratch;  ///< slots, then

  __device__ __forceinline__ std::int32_t* slots_anywhere() const {
    return slots != nullptr ? slots : scratch;
  }
};

/// n / d for any n below 2^32 by one multiplication: `magic` is 2^64 / d, rounded up; 0 when d
/// is 1.
__device__ __forceinline__ std::uint32_t divide(std::uint32_t n, std::uint64_t magic) {
  return magic == 0 ? n : static_cast<std::uint32_t>(__umul64hi(n, magic));
}
__device__ __forceinline__ std::uint32_t find_rank(const PlanShape& shape, std::uint32_t expert) {
  const auto larger = static_cast<std::uint32_t>(shape.larger);
  const std::uint32_t border = (static_cast<std::uint32_t>(shape.block) + 1) * larger;
  return expert < border ? divide(expert, shape.large_magic)
                         : larger + divide(expert - border, shape.block_magic);
}

/// Whole block: zero counts, and which rank holds which expert. A barrier follows.
__device__ inline void prepare(const PlanParameters& p, const PlanShape& shape,
                               const Workplace& work) {
  const int thread = static_cast<int>(threadIdx.x);
  const auto experts = static_cast<int>(p.plan.placement.experts);
  std::int32_t* slots = work.slots_anywhere();
#pragma unroll 1  // here and below: code that runs once is as slow as it is long
  for (int e = thread; e < experts; e += kThreads) slots[e] = 0;
#pragma unroll 1
  for (int d = thread; d < p.group.ranks; d += kThreads) work.totals[d] = 0;
  if (work.rank_of == nullptr) return;
#pragma unroll 1
  for (int d = thread / 32; d < p.group.ranks; d += kWarps) {
    const int end = shape.first_expert(d + 1);
#pragma unroll 1
    for (int e = shape.first_expert(d) + thread % 32; e < end; e += 32) {
      work.rank_of[e] = static_cast<std::uint8_t>(d);
    }
  }
}

/// Whole block: from each warp's tokens for each rank to the first row of each warp.
__device__ inline void scan_counts(const Workplace& work, int ranks) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll 1
  for (int d = static_cast<int>(threadIdx.x / 32); d < ranks; d += kWarps) {
    std::int32_t* cell = work.counts + lane * ranks + d;
    const std::int32_t own = *cell;
    std::int32_t sum = own;
    for (int step = 1; step < 32; step *= 2) {
      const std::int32_t below = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += below;
    }
    const std::int32_t before = work.totals[d];
    *cell = before + sum - own;
    __syncwarp();
    if (lane == 31) work.totals[d] = before + sum;
  }
}

/// Whole block: destinations of the `count` tokens of one round from `first` on; each thread has
/// `per`.
template <int kWords>
__device__ void place_round(const PlanParameters& p, const Workplace& work, std::int64_t first,
                            int count, int per) {
  using R = Round<kWords>;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int ranks = p.group.ranks, destinations = destinations_of(p.plan.topk, ranks);
  const int mine = warp * per * 32 + lane;  // the first of this thread's tokens
  std::uint32_t mask[R::kPerThread][kWords];
#pragma unroll
  for (int j = 0; j < R::kPerThread; ++j) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const bool there = j < per && mine + j * 32 < count;
      mask[j][w] = there ? work.masks[w * R::kTokens + mine + j * 32] : 0;
    }
  }
  const auto bit_of = [&](int j, int d) {
    if (kWords == 1) return mask[j][0] >> d & 1;
    const std::uint32_t word = d < 32 ? mask[j][0] : d < 64 ? mask[j][1] : mask[j][kWords - 1];
    return word >> d % 32 & 1;
  };
#pragma unroll 1
  for (int d = 0; d < ranks; ++d) {
    int count = 0;
#pragma unroll
    for (int j = 0; j < R::kPerThread; ++j) count += __popc(__ballot_sync(~0u, bit_of(j, d)));
    if (lane == 0) work.counts[warp * ranks + d] = count;
  }
  __syncthreads();
  scan_counts(work, ranks);
  __syncthreads();
  auto* out = reinterpret_cast<DeviceDestination*>(p.plan.data + p.plan.layout.destinations) +
              (first + mine) * destinations;
  int used[R::kPerThread] = {};
#pragma unroll 1  // ranks many rounds: small code starts faster
  for (int d = 0; d < ranks; ++d) {
    int row = work.counts[warp * ranks + d];
#pragma unroll
    for (int j = 0; j < R::kPerThread; ++j) {
      const std::uint32_t all = __ballot_sync(~0u, bit_of(j, d));
      if (bit_of(j, d)) {
        out[std::int64_t{j} * 32 * destinations + used[j]++] = {
            d, row + __popc(all & ((1u << lane) - 1))};
      }
      row += __popc(all);
    }
  }
#pragma unroll
  for (int j = 0; j < R::kPerThread; ++j) {
    if (j >= per || mine + j * 32 >= count) continue;
#pragma unroll 1
    for (int i = used[j]; i < destinations; ++i)
      out[std::int64_t{j} * 32 * destinations + i] = {-1, -1};
  }
}

}  // namespace ferry::cuda::plan

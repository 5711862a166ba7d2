// Where a combine's rows and weights are: what the peers' heads say, checked, and the plan's
// destinations.
#pragma once
#include "cuda/kernels/base/entry.cuh"
#include "cuda/kernels/throughput/kernels.hpp"
#include "cuda/kernels/throughput/sum_shape.hpp"
#include "cuda/kernels/throughput/sum_slices.cuh"
#include "cuda/kernels/throughput/sum_work.cuh"

namespace ferry::cuda::device {

struct CombineLaunch {
  CombineParameters p{};
  SumShape shape{};
  std::int64_t row_bytes = 0;
  const std::byte* biases[2] = {nullptr, nullptr};  // those that there are, in their order
  int bias_count = 0;
  int destination_count = 1;  // of a token
  int entry_count = 1;        // and with the biases
  int group_bits = 0;         // rows are waited for by groups, named in few bits
};

template <class T>
__device__ const T* plan_part(const PlanView& plan, std::size_t offset) {
  return reinterpret_cast<const T*>(plan.data + offset);
}

/// This rank's first row at each peer, and its row of weights there. Shared memory.
struct Bases {
  const std::byte* rows[kMaxDomain];
  const float* weights[kMaxDomain];
};

/// Entry j of a token: its destinations, which are rows of ranks in ascending order, then the
/// biases. Some ranks may still make their rows.
struct CombineSource {
  const GroupView* group;
  std::uint64_t generation;
  const SummedRows* summed;
  const DeviceDestination* destinations;
  int destination_count;
  int entry_count;
  int group_bits;
  const Bases* bases;
  const std::byte* const* biases;
  std::int64_t row_bytes;

  using Raw = int2;
  static constexpr bool kWaits = true;
  static constexpr int kRankBits = 7, kGroups = 1 << (kDueBits - 1 - kRankBits);
  static_assert(kMaxDomain <= 1 << kRankBits);
  /// For so many tokens, which are at least as many as the rows of one rank.
  static int group_bits_for(std::int64_t tokens) {
    int bits = 7;
    while (tokens >> bits >= kGroups) ++bits;
    return bits;
  }
  __device__ std::uint32_t row_of(std::uint32_t token) const { return token; }
  __device__ int entries() const { return entry_count; }
  __device__ bool is_rank(int rank) const {
    return static_cast<unsigned>(rank) < static_cast<unsigned>(group->ranks);
  }
  __device__ Raw load(std::uint32_t token, int j) const {
    if (j >= destination_count) return {-1, 0};
    return __ldg(reinterpret_cast<const int2*>(
        destinations + static_cast<std::int64_t>(token) * destination_count + j));
  }
  __device__ Entry resolve(const Raw& raw, std::uint32_t token, int j) const {
    if (j >= destination_count) {
      return {biases[j - destination_count] + static_cast<std::int64_t>(token) * row_bytes, 0.0f};
    }
    if (!is_rank(raw.x)) return {nullptr, 0.0f};
    return {bases->rows[raw.x] + static_cast<std::int64_t>(raw.y) * row_bytes, 0.0f};
  }
  __device__ std::uint32_t due(const Raw& raw, int j) const {
    const auto row = static_cast<std::uint32_t>(raw.y);
    if (j >= destination_count || !is_rank(raw.x)) return 0;
    if (load_acquire_block(&summed->rows[raw.x]) > row) return 0;
    return (min(row >> group_bits, kGroups - 1) << kRankBits | static_cast<std::uint32_t>(raw.x)) +
           1;
  }
  __device__ bool await(std::uint32_t due) const {
    const std::uint32_t group_number = (due - 1) >> kRankBits;
    return await_sum(*group, generation, static_cast<int>((due - 1) % (1u << kRankBits)),
                     (group_number + 1) << group_bits, *summed);
  }
};

/// What is known of a peer's rows before its head has come.
struct PeerRows {
  std::uint64_t rows;   ///< in all
  std::int64_t mine;    ///< the first of mine
  PeerSegment segment;  ///< where they likely are: in that of the number `guess`
};
__device__ inline PeerRows peer_rows_of(const PlanView& plan, int peer, std::uint32_t guess,
                                        const GroupView& group) {
  return {static_cast<std::uint64_t>(plan_part<std::int64_t>(plan, plan.layout.peer_rows)[peer]),
          plan_part<std::int64_t>(plan, plan.layout.peer_row)[peer],
          segment_of(group, peer, guess)};
}

/// What a peer's head says of them.
struct HeadPlace {
  std::uint32_t segment, side_segment;
  std::uint64_t offset, side_offset;
  bool coming;  // the rows are still made
};
/// Sixteen lanes, each with its word.
__device__ inline HeadPlace place_of(std::uint64_t word) {
  const unsigned lanes = 0xffffu << (threadIdx.x & 16);
  const auto get = [&](int i) { return __shfl_sync(lanes, word, i, kHeadLanes); };
  HeadPlace place{};
  place.segment = static_cast<std::uint32_t>(get(kStatusWord) >> 32);
  place.offset = get(kOffsetWord);
  place.side_segment = static_cast<std::uint32_t>(get(kSideWord));
  place.side_offset = get(kSideOffsetWord);
  place.coming = static_cast<std::uint32_t>(get(kBlocksWord)) != 0;
  return place;
}

/// One thread: where a peer says that its rows are, if that can be. A rank that got nothing need
/// not have any.
__device__ inline bool find_base(const CombineLaunch& launch, std::uint64_t generation, int peer,
                                 const PeerRows& plan, const HeadPlace& head, Bases& bases,
                                 SummedRows& summed) {
  const CombineParameters& p = launch.p;
  const auto [rows, mine, likely] = plan;
  const std::size_t weight_bytes =
      p.has_weights ? static_cast<std::size_t>(p.plan.topk) * sizeof(float) : 0;
  summed.rows[peer] = head.coming ? 0 : kAllRows;
  bases.rows[peer] = nullptr;
  bases.weights[peer] = nullptr;
  if (rows == 0) return true;
  // An entry of the table that was empty may have been filled since.
  const bool guessed = head.segment == p.segment && likely.data != nullptr;
  const PeerSegment segment = guessed ? likely : segment_of(p.group, peer, head.segment);
  const std::byte* at =
      place_in(segment, head.offset, rows * static_cast<std::uint64_t>(launch.row_bytes));
  const std::byte* weights_at = p.has_weights ? checked_place(p.group, peer, head.side_segment,
                                                              head.side_offset, rows * weight_bytes)
                                              : at;
  if (at == nullptr || weights_at == nullptr) {
    return fail(p.group, generation, Reason::violation, Stage::descriptors, peer);
  }
  bases.rows[peer] = at + mine * launch.row_bytes;
  if (p.has_weights) {
    bases.weights[peer] =
        reinterpret_cast<const float*>(weights_at + static_cast<std::size_t>(mine) * weight_bytes);
  }
  return true;
}

/// Whole block. `first`: of the peer whose number is that of the thread. `places`: of all.
__device__ inline bool find_bases(const CombineLaunch& launch, std::uint64_t generation,
                                  const PeerRows& first, const HeadPlace* places, Bases& bases,
                                  SummedRows& summed) {
  const GroupView& group = launch.p.group;
  bool found = true;
  const int thread = static_cast<int>(threadIdx.x);
  for (int peer = thread; peer < group.ranks && found; peer += static_cast<int>(blockDim.x)) {
    const bool own = peer == thread;
    found = find_base(launch, generation, peer,
                      own ? first : peer_rows_of(launch.p.plan, peer, launch.p.segment, group),
                      places[peer], bases, summed);
  }
  return __syncthreads_and(found) != 0;
}

__device__ __forceinline__ void add_weights(float& acc, float more) {
  acc = __fadd_rn(acc, more);
}
__device__ __forceinline__ void add_weights(float4& acc, const float4& more) {
  add_weights(acc.x, more.x);
  add_weights(acc.y, more.y);
  add_weights(acc.z, more.z);
  add_weights(acc.w, more.w);
}

/// Weights: of one slot or of four. Those of up to four ranks are in flight at once.
template <class Weights>
__device__ inline Weights sum_weight(const CombineSource& source, std::int64_t token, int slot,
                                     int topk) {
  const DeviceDestination* destinations = source.destinations + token * source.destination_count;
  Weights acc{};
  for (int base = 0; base < source.destination_count; base += 4) {
    Weights weights[4];
    bool there[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      DeviceDestination destination{-1, 0};
      if (base + i < source.destination_count) destination = destinations[base + i];
      there[i] = source.is_rank(destination.rank);
      if (there[i]) {
        weights[i] = __ldcg(reinterpret_cast<const Weights*>(
            source.bases->weights[destination.rank] +
            static_cast<std::int64_t>(destination.row) * topk + slot));
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (there[i]) add_weights(acc, weights[i]);
    }
  }
  return acc;
}

/// By the warps beside those that sum rows: each token's weights, summed over ranks. `Weights`
/// divides a token's.
template <class Weights>
__device__ inline void sum_weights(const CombineParameters& p, const CombineSource& source,
                                   int warp) {
  constexpr int kSlots = sizeof(Weights) / sizeof(float);
  const int each = p.plan.topk / kSlots;  // of a token
  const std::int64_t count = p.plan.tokens * each;
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * kWeightWarps * 32;
  const auto sum = [&](std::int64_t number) {
    return sum_weight<Weights>(source, number / each, static_cast<int>(number % each) * kSlots,
                               p.plan.topk);
  };
  auto* out = reinterpret_cast<Weights*>(p.out_weights);
  std::int64_t at = (static_cast<std::int64_t>(blockIdx.x) * kWeightWarps + warp) * 32 +
                    static_cast<std::int64_t>(threadIdx.x % 32);
  for (; at < count; at += 2 * threads) {
    const std::int64_t second = at + threads;
    const Weights a = sum(at);
    if (second < count) out[second] = sum(second);
    out[at] = a;
  }
}

}  // namespace ferry::cuda::device

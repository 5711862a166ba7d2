// Where a combine's rows and weights are: what the peers' heads say, checked, and the plan's lanes.
#pragma once
#include "cuda/kernels/entry.cuh"
#include "cuda/kernels/sum_shape.hpp"
#include "cuda/kernels/sum_work.cuh"
#include "cuda/kernels/throughput.hpp"

namespace ferry::cuda::device {

struct CombineLaunch {
  CombineParameters p{};
  SumShape shape{};
  std::int64_t row_bytes = 0;
  const std::byte* biases[2] = {nullptr, nullptr};  // those that there are, in their order
  int bias_count = 0;
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

/// Entry j of a token: its lanes, which are rows of ranks in ascending order, then the biases.
struct CombineSource {
  const DeviceLane* lanes;
  int lane_count;
  int entry_count;
  int ranks;
  const Bases* bases;
  const std::byte* const* biases;
  std::int64_t row_bytes;

  using Raw = int2;
  __device__ int entries() const { return entry_count; }
  __device__ Raw load(std::uint32_t token, int j) const {
    if (j >= lane_count) return {-1, 0};
    return __ldg(
        reinterpret_cast<const int2*>(lanes + static_cast<std::int64_t>(token) * lane_count + j));
  }
  __device__ Entry resolve(const Raw& raw, std::uint32_t token, int j) const {
    if (j >= lane_count) {
      return {biases[j - lane_count] + static_cast<std::int64_t>(token) * row_bytes, 0.0f};
    }
    if (static_cast<unsigned>(raw.x) >= static_cast<unsigned>(ranks)) return {nullptr, 0.0f};
    return {bases->rows[raw.x] + static_cast<std::int64_t>(raw.y) * row_bytes, 0.0f};
  }
};

/// What the plan says of a peer: its rows in all, and the first of mine.
struct PeerRows {
  std::uint64_t rows;
  std::int64_t mine;
};
__device__ inline PeerRows peer_rows_of(const PlanView& plan, int peer) {
  return {static_cast<std::uint64_t>(plan_part<std::int64_t>(plan, plan.layout.peer_rows)[peer]),
          plan_part<std::int64_t>(plan, plan.layout.peer_row)[peer]};
}

/// One thread: where a peer says that its rows are, if that can be. A rank that got nothing need
/// not have any.
__device__ inline bool find_base(const CombineLaunch& launch, std::uint64_t generation, int peer,
                                 const PeerRows& plan, Bases& bases) {
  const CombineParameters& p = launch.p;
  const auto word = [&](int i) { return head_word(p.group, peer, generation, i); };
  const auto segment = static_cast<std::uint32_t>(word(kStatusWord) >> 32);
  const std::uint64_t offset = word(kOffsetWord);
  const auto side_segment = static_cast<std::uint32_t>(word(kSideWord));
  const std::uint64_t side_offset = word(kSideOffsetWord);
  const auto [rows, mine] = plan;
  const std::size_t weight_bytes =
      p.has_weights ? static_cast<std::size_t>(p.plan.topk) * sizeof(float) : 0;
  bases.rows[peer] = nullptr;
  bases.weights[peer] = nullptr;
  if (rows == 0) return true;
  const std::byte* at = checked_place(p.group, peer, segment, offset,
                                      rows * static_cast<std::uint64_t>(launch.row_bytes));
  const std::byte* weights_at =
      p.has_weights ? checked_place(p.group, peer, side_segment, side_offset, rows * weight_bytes)
                    : at;
  if (at == nullptr || weights_at == nullptr) {
    return fail(p.group, generation, Reason::distrust, Stage::descriptors, peer);
  }
  bases.rows[peer] = at + mine * launch.row_bytes;
  if (p.has_weights) {
    bases.weights[peer] =
        reinterpret_cast<const float*>(weights_at + static_cast<std::size_t>(mine) * weight_bytes);
  }
  return true;
}

/// Whole block. `first`: of the peer whose number is that of the thread.
__device__ inline bool find_bases(const CombineLaunch& launch, std::uint64_t generation,
                                  const PeerRows& first, Bases& bases) {
  bool found = true;
  const int thread = static_cast<int>(threadIdx.x);
  for (int peer = thread; peer < launch.p.group.ranks && found;
       peer += static_cast<int>(blockDim.x)) {
    const PeerRows plan = peer == thread ? first : peer_rows_of(launch.p.plan, peer);
    found = find_base(launch, generation, peer, plan, bases);
  }
  return __syncthreads_and(found) != 0;
}

/// Up to four ranks' weights of one slot are in flight at once.
__device__ inline float sum_weight(const CombineSource& source, std::int64_t token, int slot,
                                   int topk) {
  const DeviceLane* lanes = source.lanes + token * source.lane_count;
  float acc = 0.0f;
  for (int base = 0; base < source.lane_count; base += 4) {
    float weights[4];
    bool there[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      DeviceLane lane{-1, 0};
      if (base + i < source.lane_count) lane = lanes[base + i];
      there[i] = static_cast<unsigned>(lane.rank) < static_cast<unsigned>(source.ranks);
      if (there[i]) {
        weights[i] = __ldcg(source.bases->weights[lane.rank] +
                            static_cast<std::int64_t>(lane.row) * topk + slot);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (there[i]) acc = __fadd_rn(acc, weights[i]);
    }
  }
  return acc;
}

/// By the warps beside those that sum rows: each token's weights, summed over ranks.
__device__ inline void sum_weights(const CombineParameters& p, const CombineSource& source,
                                   int warp) {
  const std::int64_t count = p.plan.tokens * p.plan.topk;
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * kWeightWarps * 32;
  std::int64_t at = (static_cast<std::int64_t>(blockIdx.x) * kWeightWarps + warp) * 32 +
                    static_cast<std::int64_t>(threadIdx.x % 32);
  for (; at < count; at += 2 * threads) {
    const std::int64_t second = at + threads;
    const float a =
        sum_weight(source, at / p.plan.topk, static_cast<int>(at % p.plan.topk), p.plan.topk);
    if (second < count) {
      p.out_weights[second] = sum_weight(source, second / p.plan.topk,
                                         static_cast<int>(second % p.plan.topk), p.plan.topk);
    }
    p.out_weights[at] = a;
  }
}

}  // namespace ferry::cuda::device

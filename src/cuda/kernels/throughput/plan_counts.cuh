// The counts of a plan as they cross: what a rank sends behind its head, and how it takes the
// others'.
#pragma once
#include "cuda/kernels/base/entry.cuh"
#include "cuda/kernels/throughput/kernels.hpp"
#include "cuda/kernels/throughput/plan_routes.cuh"

namespace ferry::cuda::plan {

using namespace device;

/// Which ranks are lost: each thread's own number, as registers are short. Shared memory.
__device__ __forceinline__ bool* holes_of_block() {
  __shared__ bool holes[kMaxDomain];
  return holes;
}
/// Whole block.
__device__ __forceinline__ void note_holes(const GroupView& group) {
  const int peer = static_cast<int>(threadIdx.x);
  if (peer < group.ranks) holes_of_block()[peer] = is_hole(group, peer);
}
/// Whole block, once all are counted, before a barrier: no route may name a lost rank's experts.
__device__ __forceinline__ void blame_lost(const GroupView& group, const Workplace& work,
                                           unsigned long long* bad) {
  const int peer = static_cast<int>(threadIdx.x);
  if (peer >= group.ranks || !holes_of_block()[peer] || work.totals[peer] == 0) return;
  atomicMin(bad, static_cast<unsigned long long>(kLostRoute + peer));
}

/// What follows the head: my tokens for each rank, then my slots for each expert of the peer.
struct CountBody {
  const std::int32_t* totals;
  const volatile std::int32_t* slots;  // atomics wrote them: never from the first cache
  PlanShape shape;
  int ranks;
  __device__ int words(int peer) const { return ranks + shape.local_experts(peer); }
  __device__ std::int32_t word(int peer, int i) const {
    return i < ranks ? totals[i] : slots[shape.first_expert(peer) + i - ranks];
  }
};

/// What one thread found of the peers' messages.
struct Findings {
  bool there = true;                         ///< all messages came
  std::uint32_t found = kNoComplaint << 16;  ///< as worst_of takes it
  int offender = -1;                         ///< a peer that counted what cannot be
  std::int32_t claim = 0;
};

/// One warp: a lost rank has no counts.
__device__ __forceinline__ void collect_none(const PlanParameters& p, const PlanShape& shape, int s,
                                             std::int32_t* matrix) {
  const int ranks = p.group.ranks, local = shape.local_experts(p.group.rank);
  auto* tokens = reinterpret_cast<std::int32_t*>(p.plan.data + p.plan.layout.rank_tokens);
  auto* slots = reinterpret_cast<std::int32_t*>(p.plan.data + p.plan.layout.expert_slots);
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll 1
  for (int i = lane; i < ranks; i += 32) tokens[s * ranks + i] = matrix[s * ranks + i] = 0;
#pragma unroll 1
  for (int i = lane; i < local; i += 32) slots[s * local + i] = 0;
}

/// One warp: waits for the counts of source `s`; they go to the plan and to `matrix` [R, R]. Head
/// and counts come in one trip to the memory. False: the group has failed.
__device__ __forceinline__ bool collect(const PlanParameters& p, const PlanShape& shape,
                                        std::uint64_t generation, int s, std::int32_t* matrix,
                                        Findings& mine) {
  constexpr int kBatch = 3;  // words of one lane on their way at the same time
  const int ranks = p.group.ranks, me = p.group.rank;
  const int local = shape.local_experts(me), words = ranks + local;
  auto* tokens = reinterpret_cast<std::int32_t*>(p.plan.data + p.plan.layout.rank_tokens);
  auto* slots = reinterpret_cast<std::int32_t*>(p.plan.data + p.plan.layout.expert_slots);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int head_lane = min(lane % kHeadLanes, kHeadWords - 1);
  const auto* message =
      reinterpret_cast<const std::uint64_t*>(posted_word(p.group, s, generation, 0));
  std::uint64_t head = 0;
  std::int32_t count[kBatch], to_me = 0;
#pragma unroll 1
  for (int first = lane; first - lane < words; first += 32 * kBatch) {
    const bool there = await_words(p.group, generation, Stage::counts, s, [&] {
      TagCheck check;
      const std::uint64_t kind = load_relaxed(message);
      const std::uint64_t status = load_relaxed(message + 2 * kStatusWord);
      const std::uint64_t own = load_relaxed(message + 2 * kHeadWords + me);
      std::uint64_t word[kBatch];
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        word[u] = own;
        if (first + 32 * u < words)
          word[u] = load_relaxed(message + 2 * kHeadWords + first + 32 * u);
      }
      // Last: what comes after an acquire waits for it.
      const TaggedPair pair =
          load_pair(reinterpret_cast<const std::byte*>(message + 2 * head_lane));
      check.check_head(pair, generation);
      check.check_body(kind, generation);
      check.check_body(status, generation);
      head = data_of(pair);
      to_me = static_cast<std::int32_t>(own);
#pragma unroll
      for (int u = 0; u < kBatch; ++u) count[u] = static_cast<std::int32_t>(word[u]);
      // Who is in another call, or has no memory for a plan, sends no counts.
      if (static_cast<CallKind>(kind) != CallKind::plan ||
          static_cast<StepStatus>(status) != StepStatus::ok) {
        return check;
      }
      check.check_body(own, generation);
#pragma unroll
      for (int u = 0; u < kBatch; ++u) check.check_body(word[u], generation);
      return check;
    });
    if (__all_sync(~0u, there) == 0) return false;
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const int i = first + 32 * u;
      if (i >= words) break;
      const std::int64_t most = i < ranks ? INT32_MAX : std::int64_t{to_me} * p.plan.topk;
      if (count[u] < 0 || count[u] > most) mine.offender = s, mine.claim = count[u];
      const int at = i < ranks ? s * ranks + i : s * local + i - ranks;
      if (i < ranks) matrix[at] = count[u];
      (i < ranks ? tokens : slots)[at] = count[u];
    }
  }
  const std::uint32_t what =
      lane % kHeadLanes < kHeadWords ? complaint(head, p.call, INT64_MIN) : kNoComplaint;
  if (what != kNoComplaint) {
    mine.found = min(mine.found, what << 16 | static_cast<std::uint32_t>(s));
  }
  return true;
}

}  // namespace ferry::cuda::plan

// How a dispatch begins: every rank grants memory to all, and all decide alike whether rows move.
#pragma once
#include "cuda/kernels/base/entry.cuh"
#include "cuda/kernels/throughput/kernels.hpp"
#include "cuda/kernels/throughput/plan_view.cuh"
#include "cuda/kernels/throughput/push.hpp"
#include "cuda/kernels/throughput/second_grant.cuh"

namespace ferry::cuda::device {

inline constexpr std::int64_t kMostRows = INT32_MAX;  ///< that a rank may receive

/// Whole block: rows of the expert-major output; 0 when they need not be known.
__device__ inline std::int64_t count_out_rows(const DispatchParameters& p, const PushShape& shape,
                                              bool holds_counts) {
  __shared__ unsigned long long rows;
  if (p.out_capacity == 0 || !holds_counts) return 0;
  if (threadIdx.x == 0) rows = 0;
  __syncthreads();
  const auto* slots =
      reinterpret_cast<const std::int32_t*>(p.plan.data + p.plan.layout.expert_slots);
  const int experts = shape.local_experts(p.group.rank);
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += static_cast<int>(blockDim.x)) {
    std::int64_t total = 0;
    for (int s = 0; s < p.group.ranks; ++s) total += slots[std::int64_t{s} * experts + e];
    const std::int64_t padded = (total + p.out_alignment - 1) / p.out_alignment * p.out_alignment;
    atomicAdd(&rows, static_cast<unsigned long long>(padded));
  }
  __syncthreads();
  return static_cast<std::int64_t>(rows);
}

__device__ inline void fill_head(const DispatchParameters& p, bool holds_counts,
                                 std::int64_t out_rows, DeviceHead& head) {
  head.status = p.status;
  head.segment = p.segment;
  head.offset = p.offset;
  head.side_segment = p.side_segment;
  head.side_offset = p.side_offset;
  head.refused = holds_counts ? Reason::none : Reason::bad_plan;
  head.rows = p.capacity;
  head.detail = p.need_bytes;
  head.blocks = gridDim.x;
  if (p.status == StepStatus::ok && p.second != nullptr) head.status = StepStatus::guessed;
  if (p.status == StepStatus::ok && out_rows > p.out_capacity) {
    head.status = StepStatus::too_many;
    head.detail = out_rows;
  }
}

/// The first peer that a thread polls, and what can be known of it before the kernel before this
/// one has ended.
struct FirstPeer {
  PeerSegment segment{};  ///< of the peer, the one whose number is this thread's of its sixteen
  PlannedRows rows{};
  std::uint64_t head = 0;  ///< this thread's word of it, if it has come
  bool has_head = false;
};
__device__ __forceinline__ int first_peer() {
  return static_cast<int>(threadIdx.x / kHeadLanes);
}
__device__ inline PeerSegment first_segment(const GroupView& group) {
  if (first_peer() >= group.ranks) return {};
  return group
      .segments[static_cast<std::size_t>(first_peer()) * kMaxSegments + threadIdx.x % kHeadLanes];
}

/// Sixteen lanes: a segment of the peer. `known`: each lane's of its own number; empty: not known.
__device__ __forceinline__ PeerSegment find_segment(const GroupView& group, int peer,
                                                    std::uint32_t number,
                                                    const PeerSegment& known) {
  const unsigned lanes = 0xffffu << (threadIdx.x & 16);
  const int at = static_cast<int>(number % kHeadLanes);
  const auto data = __shfl_sync(lanes, reinterpret_cast<std::uint64_t>(known.data), at, kHeadLanes);
  const std::uint64_t bytes = __shfl_sync(lanes, known.bytes, at, kHeadLanes);
  // It may have been added meanwhile.
  if (number >= kHeadLanes || bytes == 0 || data == 0) return segment_of(group, peer, number);
  return {reinterpret_cast<std::byte*>(data), bytes};
}

/// What a peer granted.
struct Grant {
  std::uint32_t segment, side_segment;
  std::uint64_t offset, side_offset;
  std::int64_t rows;
  std::uint32_t blocks;
};

/// Sixteen lanes, each with its word of the peer's head.
__device__ inline Grant grant_of(std::uint64_t word) {
  const unsigned lanes = 0xffffu << (threadIdx.x & 16);
  const auto get = [&](int i) { return __shfl_sync(lanes, word, i, kHeadLanes); };
  Grant grant;
  grant.segment = static_cast<std::uint32_t>(get(kStatusWord) >> 32);
  grant.offset = get(kOffsetWord);
  grant.side_segment = static_cast<std::uint32_t>(get(kSideWord));
  grant.side_offset = get(kSideOffsetWord);
  grant.rows = static_cast<std::int64_t>(get(kRowsWord));
  grant.blocks = static_cast<std::uint32_t>(get(kBlocksWord));
  return grant;
}

/// Sixteen lanes: where this rank's rows go at `peer`, the first of them at row `mine`, if what it
/// granted lies inside its segments. `known`: as find_segment.
__device__ __forceinline__ bool find_target(const DispatchParameters& p, int peer,
                                            const Grant& grant, std::int64_t mine,
                                            const PeerSegment& known, PushTarget& target) {
  if (grant.rows < 0 || grant.rows > kMostRows) return false;
  if (grant.blocks < 1 || grant.blocks > kMaxBlocks) return false;  // they are waited for
  const int topk = p.plan.topk;
  const ReceiveLayout receive =
      make_receive_layout(grant.rows, static_cast<std::size_t>(p.row_bytes), p.scale_columns);
  const WideSideLayout side =
      make_wide_side_layout(grant.rows, topk, p.carries_routes, p.has_weights);
  // An empty region may lie nowhere. Both places are looked up before either is judged.
  const PeerSegment rows_in = find_segment(p.group, peer, grant.segment, known);
  const PeerSegment side_in = find_segment(p.group, peer, grant.side_segment, known);
  std::byte* to = place_in(rows_in, grant.offset, receive.bytes);
  std::byte* beside = place_in(side_in, grant.side_offset, side.bytes);
  if (to == nullptr && receive.bytes > 0) return false;
  if (beside == nullptr && side.bytes > 0) return false;
  target.rows = to + receive.rows + mine * p.row_bytes;
  target.scales = reinterpret_cast<float*>(to + receive.scales) + mine * p.scale_columns;
  target.source_token = reinterpret_cast<std::int32_t*>(beside + side.source_token) + mine;
  target.ids = reinterpret_cast<std::int32_t*>(beside + side.topk_idx) + mine * topk;
  target.wide_ids = reinterpret_cast<std::int64_t*>(beside + side.wide_ids) + mine * topk;
  target.weights = reinterpret_cast<float*>(beside + side.weights) + mine * topk;
  target.blocks = static_cast<std::int32_t>(grant.blocks);
  return true;
}

/// Whole grid: waits for the heads; true when this rank may push to `targets`. Sixteen threads poll
/// one peer, and one barrier tells the block that all is well; the order in which complaints
/// count is sorted out only when there is one. Whether the plan holds counts every rank knows
/// alike, and an early head cannot say it.
__device__ __forceinline__ bool agree(const DispatchParameters& p, const PushShape& shape,
                                      std::uint64_t generation, bool holds_counts,
                                      const FirstPeer& first, PushTarget* targets) {
  const auto* needed = reinterpret_cast<const std::int64_t*>(p.plan.data + p.plan.layout.peer_rows);
  constexpr std::uint32_t kBadPlan = 2;
  std::uint32_t found = (holds_counts ? kNoComplaint : kBadPlan) << 16;
  int offender = -1;
  std::int64_t claim = 0;
  bool there = true;
  for (int peer = first_peer(); peer < p.group.ranks;
       peer += static_cast<int>(blockDim.x / kHeadLanes)) {
    const bool is_first = peer == first_peer();
    if (is_hole(p.group, peer)) {
      if (threadIdx.x % kHeadLanes == 0) targets[peer] = PushTarget{};
      continue;
    }
    const unsigned lanes = 0xffffu << (threadIdx.x & 16);
    there = is_first || __all_sync(lanes, await_plan_end(p)) != 0;
    if (!there) break;
    const auto [rows, mine] = is_first ? first.rows : rows_at(p.plan, peer);
    std::uint64_t word = first.head;
    there = ((is_first && first.has_head) ||
             await_head(p.group, peer, generation, Stage::grants, word)) &&
            (!holds_counts || take_second(p, peer, generation, rows, word));
    if (!there) break;
    const std::uint32_t what = complaint(word, p.call, rows);
    if (what != kNoComplaint) found = min(found, what << 16 | static_cast<std::uint32_t>(peer));
    const Grant grant = grant_of(word);
    PushTarget target{};
    const PeerSegment known = is_first ? first.segment : PeerSegment{};
    if (!find_target(p, peer, grant, mine, known, target)) offender = peer, claim = grant.rows;
    target.first_expert = shape.first_expert(peer);
    target.local_experts = shape.local_experts(peer);
    if (threadIdx.x % kHeadLanes == 0) targets[peer] = target;
  }
  if (__syncthreads_and(there && found >> 16 == kNoComplaint && offender < 0) != 0) return true;
  if (__syncthreads_and(there) == 0) return false;
  const Verdict verdict = worst_of(found);
  if (verdict.reason != Reason::none) {
    (void)await_plan_end(p);  // `needed` is told
    refuse_call(p.group, generation, verdict, Stage::grants, needed, p.failure);
  } else if (offender >= 0) {
    fail(p.group, generation, Reason::violation, Stage::grants, offender, {0, 0, claim});
  }
  return false;
}

/// Whole block 0: whether more rows arrive than this rank has guessed.
__device__ __forceinline__ bool guessed_too_few(const DispatchParameters& p, bool holds_counts) {
  if (p.second == nullptr || p.status != StepStatus::ok || !holds_counts) return false;
  if (__syncthreads_and(await_plan_end(p)) == 0) return false;
  const auto* arriving =
      reinterpret_cast<const std::int64_t*>(p.plan.data + p.plan.layout.peer_rows);
  return arriving[p.group.rank] > p.capacity;
}

/// Whole block 0, before it grants memory: of a graph's, until no lost rank can write there any
/// more. False: the group has failed.
__device__ __forceinline__ bool await_free(const DispatchParameters& p) {
  if (!p.fixed) return true;
  bool free = true;
  if (threadIdx.x == 0) {
    SpinDeadline spin_deadline;
    while (free && load_relaxed(&local_words(p.group)->held) != 0) {
      Reason reason;
      if (!spin_deadline.over(p.group, reason)) continue;
      free = false;
      if (reason != Reason::none) {
        fail(p.group, first_running(p.group), reason, Stage::grants, p.group.rank);
      }
    }
  }
  return __syncthreads_and(free) != 0;
}

/// Whole block 0, before anything that ran before this kernel is known to have ended: posts the
/// head while the plan, which comes directly before in the group's calls, still swaps its counts.
/// What the head grants has had no user since. Gives the generation; 0: the group has failed.
__device__ inline std::uint64_t post_early(const DispatchParameters& p, std::byte* control) {
  const std::uint64_t generation = load_acquire(&local_words(p.group)->planning) + 1;
  const bool failed = has_failed(p.group);
  fence_system();
  if (__syncthreads_or(failed) != 0 || !await_free(p)) return 0;
  post_entry(p.group, control, generation, p.call,
             [&](DeviceHead& head) { fill_head(p, true, 0, head); });
  return generation;
}

/// One thread: until the plan, whose kernel runs and bounds its own waits, has said where rows go
/// at `peer`, or has been refused: then it holds no counts. False: the group has failed.
__device__ __forceinline__ bool await_placed(const DispatchParameters& p, std::uint64_t planning,
                                             int peer, PlannedRows& rows, bool& holds_counts) {
  constexpr std::uint32_t kPolls = 16;  // between polls of what seldom happens
  const std::byte* at = placed_at(p.plan, peer);
  for (std::uint32_t polls = 1;; ++polls) {
    const TaggedPair pair = load_pair(at);
    TagCheck check;
    check.check_body(pair.low, planning);
    check.check_body(pair.high, planning);
    if (check.there) {
      rows = {static_cast<std::uint32_t>(pair.high), static_cast<std::uint32_t>(pair.low)};
      return holds_counts = true;
    }
    if (polls % kPolls != 0) continue;
    if (has_failed(p.group)) return false;
    const bool ended = load_acquire(&local_words(p.group)->generation) >= planning;
    if (ended && load_relaxed(state_of(p.plan)) == 0) return true;
  }
}

/// Whole block, of a glued call: heads of peers, which come while the plan still swaps its counts,
/// and then what the plan says. False: the group has failed.
__device__ __forceinline__ bool await_plan(const DispatchParameters& p, std::uint64_t generation,
                                           FirstPeer& first, bool& holds_counts) {
  const bool polls = first_peer() < p.group.ranks && !is_hole(p.group, first_peer());
  bool there = true;
  if (polls) {
    there = first.has_head =
        await_head(p.group, first_peer(), generation, Stage::grants, first.head, true);
  }
  // Every warp: nobody reads what the plan made before it has said so.
  const int peer = polls ? first_peer() : p.group.rank;
  there = there && await_placed(p, generation - 1, peer, first.rows, holds_counts);
  return there;
}

}  // namespace ferry::cuda::device

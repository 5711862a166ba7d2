// A token's destinations in the registers of a warp, and what the side warps push.
#pragma once
#include "cuda/kernels/base/wait.cuh"
#include "cuda/kernels/throughput/kernels.hpp"
#include "cuda/kernels/throughput/push.hpp"

namespace ferry::cuda::device {

/// The destinations of one token: lane l of the warp holds entries l and l + 32.
struct TokenDestinations {
  DeviceDestination low;
  DeviceDestination high;
  int count;
};

/// Destinations on their way from memory: nothing waits for them before destinations_of_words.
struct DestinationWords {
  std::uint64_t low;
  std::uint64_t high;
};

/// Whole warp. A token past the end, or −1, has none.
__device__ __forceinline__ DestinationWords load_destination_words(const DispatchParameters& p,
                                                                   std::int64_t token) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int most = destinations_of(p.plan.topk, p.group.ranks);
  const bool there = token >= 0 && token < p.plan.tokens;
  const auto* from =
      reinterpret_cast<const std::uint64_t*>(p.plan.data + p.plan.layout.destinations) +
      token * most;
  DestinationWords words{~0ull, ~0ull};
  if (there && lane < most) words.low = from[lane];
  if (there && lane + 32 < most) words.high = from[lane + 32];
  return words;
}

/// Whole warp.
__device__ __forceinline__ TokenDestinations destinations_of_words(const DispatchParameters& p,
                                                                   const DestinationWords& words) {
  const auto split = [](std::uint64_t word) {
    return DeviceDestination{static_cast<std::int32_t>(word),
                             static_cast<std::int32_t>(word >> 32)};
  };
  TokenDestinations destinations{split(words.low), split(words.high), 0};
  destinations.count = __popc(__ballot_sync(~0u, destinations.low.rank >= 0));
  if (destinations_of(p.plan.topk, p.group.ranks) > 32) {
    destinations.count += __popc(__ballot_sync(~0u, destinations.high.rank >= 0));
  }
  return destinations;
}

__device__ __forceinline__ TokenDestinations load_destinations(const DispatchParameters& p,
                                                               std::int64_t token) {
  return destinations_of_words(p, load_destination_words(p, token));
}

/// Whole warp: entry `index`, which may differ from lane to lane.
__device__ __forceinline__ DeviceDestination destination_at(const TokenDestinations& destinations,
                                                            int index) {
  DeviceDestination found{__shfl_sync(~0u, destinations.low.rank, index & 31),
                          __shfl_sync(~0u, destinations.low.row, index & 31)};
  if (destinations.count > 32) {
    const DeviceDestination high{__shfl_sync(~0u, destinations.high.rank, index & 31),
                                 __shfl_sync(~0u, destinations.high.row, index & 31)};
    if (index >= 32) found = high;
  }
  return found;
}

/// Whole warp: where to begin, so that ranks and tokens do not all rush to the same peer.
__device__ __forceinline__ int first_destination(const DispatchParameters& p,
                                                 const TokenDestinations& destinations,
                                                 std::int64_t token) {
  const auto ranks = static_cast<std::uint32_t>(p.group.ranks);
  const auto from = static_cast<std::int32_t>(
      (static_cast<std::uint32_t>(token) + static_cast<std::uint32_t>(p.group.rank) + 1) % ranks);
  const std::uint32_t later = __ballot_sync(~0u, destinations.low.rank >= from);
  return later == 0 ? 0 : __ffs(static_cast<int>(later)) - 1;
}

/// Whole warp: source token, local ids and weights of one token to all its peers. `width` lanes
/// share a row.
__device__ inline void push_routes(const DispatchParameters& p, const PushShape& shape,
                                   const PushTarget* targets, const TokenDestinations& destinations,
                                   std::int64_t token) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int slot0 = lane & (shape.width - 1), side_by_side = 32 / shape.width;
  const int topk = p.plan.topk;
  const auto* ids =
      reinterpret_cast<const std::int32_t*>(p.plan.data + p.plan.layout.ids) + token * topk;
  const std::int32_t name =
      p.token_names != nullptr ? p.token_names[token] : static_cast<std::int32_t>(token);
  for (int slot = slot0; slot - slot0 < topk; slot += 32) {
    const bool there = slot < topk;
    const std::int32_t id = there ? ids[slot] : -1;
    const float weight = there && p.has_weights ? p.weights[token * topk + slot] : 0.0f;
#pragma unroll 1
    for (int i = lane / shape.width; i - lane / shape.width < destinations.count;
         i += side_by_side) {
      const DeviceDestination to = destination_at(destinations, i < destinations.count ? i : 0);
      if (i >= destinations.count || !there) continue;
      const PushTarget& target = targets[to.rank];
      const std::int32_t local = id - target.first_expert;
      const bool is_local = id >= 0 && local >= 0 && local < target.local_experts;
      const std::int64_t at = std::int64_t{to.row} * topk + slot;
      if (p.carries_routes) {
        target.ids[at] = is_local ? local : -1;
        target.wide_ids[at] = is_local ? local : -1;
        if (slot == 0) target.source_token[to.row] = name;
      }
      if (p.has_weights) target.weights[at] = is_local ? weight : 0.0f;
    }
  }
}

/// Whole warp: one token's scales, however they lie, to all its peers.
__device__ inline void push_scales(const DispatchParameters& p, const PushTarget* targets,
                                   const TokenDestinations& destinations, std::int64_t token) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (std::int64_t column = lane; column - lane < p.scale_columns; column += 32) {
    const bool there = column < p.scale_columns;
    const float scale =
        there ? p.scales[token * p.scale_token_stride + column * p.scale_column_stride] : 0.0f;
#pragma unroll 1
    for (int i = 0; i < destinations.count; ++i) {
      const DeviceDestination to = destination_at(destinations, i);
      if (there) targets[to.rank].scales[to.row * p.scale_columns + column] = scale;
    }
  }
}

/// One thread: all that the plan has written can be read. A glued call needs but little of it, and
/// begins before. False: the group has failed.
__device__ inline bool await_plan_end(const DispatchParameters& p) {
  if (!p.glued) return true;
  const LocalWords* words = local_words(p.group);
  const std::uint64_t planning = load_acquire(&words->planning);
  while (load_acquire(&words->generation) < planning) {
    if (has_failed(p.group)) return false;
  }
  return true;
}

/// The side warps of the whole grid: routes and weights of rows past those that come to this rank,
/// which no peer writes.
__device__ inline void fill_tails(const DispatchParameters& p, const PushShape& shape) {
  if (!await_plan_end(p)) return;
  const auto* recv_offset =
      reinterpret_cast<const std::int64_t*>(p.plan.data + p.plan.layout.recv_offset);
  const std::int64_t received = recv_offset[p.group.ranks], topk = p.plan.topk;
  if (received >= p.capacity) return;
  const auto layout =
      make_wide_side_layout(p.capacity, p.plan.topk, p.carries_routes, p.has_weights);
  std::byte* side = segment_of(p.group, p.group.rank, p.side_segment).data + p.side_offset;
  auto* tokens = reinterpret_cast<std::int32_t*>(side + layout.source_token);
  auto* ids = reinterpret_cast<std::int64_t*>(side + layout.wide_ids);
  auto* weights = reinterpret_cast<float*>(side + layout.weights);
  const std::int64_t side_threads = std::int64_t{shape.side_warps} * 32;
  const std::int64_t thread = std::int64_t{blockIdx.x} * side_threads +
                              static_cast<int>(threadIdx.x) - shape.row_warps * 32;
  const std::int64_t stride = gridDim.x * side_threads;
  for (std::int64_t i = received * topk + thread; i < p.capacity * topk; i += stride) {
    if (p.carries_routes) ids[i] = -1;
    if (p.has_weights) weights[i] = 0.0f;
  }
  if (!p.carries_routes) return;
  for (std::int64_t row = received + thread; row < p.capacity; row += stride) tokens[row] = -1;
}

/// One side warp: all that does not ride with the rows.
__device__ inline void push_side(const DispatchParameters& p, const PushShape& shape,
                                 const PushTarget* targets) {
  const std::int64_t stride = std::int64_t{gridDim.x} * shape.side_warps;
  const std::int64_t warp = std::int64_t{threadIdx.x / 32} - shape.row_warps;
  const bool routes = p.carries_routes || p.has_weights;
  std::int64_t token = warp * gridDim.x + blockIdx.x;
  TokenDestinations destinations = load_destinations(p, token);
  for (; token < p.plan.tokens; token += stride) {
    const TokenDestinations next = load_destinations(p, token + stride);
    if (routes) push_routes(p, shape, targets, destinations, token);
    if (shape.side_scales) push_scales(p, targets, destinations, token);
    destinations = next;
  }
  if (routes) fill_tails(p, shape);
}

}  // namespace ferry::cuda::device

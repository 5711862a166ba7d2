// Latency dispatch: from the routes to the header of one destination: rows for each of its experts,
// and every slot's ordinal among this rank's rows for its expert. Work of one whole block.
//
// Each warp counts a stretch of the slots; prefix sums over the warps; each counts its stretch
// again, now from where the warps before it end. Slots of one expert keep their order.
#pragma once
#include "cuda/kernels/latency_wait.cuh"

namespace ferry::cuda::device {

inline constexpr int kLatencyWarps = kLatencyThreads / 32;
inline constexpr std::uint32_t kAllLanes = 0xffffffff;

/// A slot's global expert id; −1: none. `entry` counts [tokens, topk of the configuration].
__device__ __forceinline__ std::int64_t route_id(const LatencyDispatchParameters& p, int token,
                                                 int slot) {
  if (slot >= p.topk) return -1;
  const std::int64_t at = token * p.token_stride + slot * p.slot_stride;
  return p.wide ? __ldg(static_cast<const long long*>(p.topk_idx) + at)
                : static_cast<std::int64_t>(__ldg(static_cast<const int*>(p.topk_idx) + at));
}

/// The slots of this rank's tokens, as one warp walks over its stretch of them.
class RouteStretch {
 public:
  __device__ RouteStretch(const LatencyDispatchParameters& p, int dest, int warps) : p_(p) {
    const Placement& placement = p.view.placement;
    first_ = placement.first_expert(dest);
    experts_ = placement.local_experts(dest);
    const int all = p.tokens * p.view.topk, chunks = (all + 31) / 32;
    const int each = (chunks + warps - 1) / warps;
    const int warp = static_cast<int>(threadIdx.x / 32);
    begin_ = warp < warps ? min(warp * each, chunks) * 32 : 0;
    end_ = warp < warps ? min(min((warp + 1) * each, chunks) * 32, all) : 0;
  }

  /// visit(entry, local expert or −1, ordinal) for each slot, `counts` [experts] counting on.
  template <class Visit>
  __device__ void walk(std::uint32_t* counts, const Visit& visit) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    for (int base = begin_; base < end_; base += 32) {
      const int entry = base + lane;
      const std::int64_t id =
          entry < end_ ? route_id(p_, entry / p_.view.topk, entry % p_.view.topk) - first_ : -1;
      const int expert = id >= 0 && id < experts_ ? static_cast<int>(id) : -1;
      const std::uint32_t same = __match_any_sync(kAllLanes, expert);
      const std::uint32_t before = same & ((1u << lane) - 1);
      const std::uint32_t start = expert >= 0 ? counts[expert] : 0;
      __syncwarp();
      if (expert >= 0 && before == 0)
        counts[expert] = start + static_cast<std::uint32_t>(__popc(same));
      __syncwarp();
      if (entry < end_) visit(entry, expert, start + static_cast<std::uint32_t>(__popc(before)));
    }
  }

 private:
  const LatencyDispatchParameters& p_;
  std::int64_t first_ = 0;
  std::int64_t experts_ = 0;
  int begin_ = 0;
  int end_ = 0;
};

/// Whole block: whether more slots than the capacity name one expert. Slow, and asked only when a
/// route names an expert twice: else there cannot be too many.
__device__ inline bool is_crowded(const LatencyDispatchParameters& p) {
  bool crowded = false;
  const auto experts = static_cast<int>(p.view.placement.experts);
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += kLatencyThreads) {
    std::int64_t slots = 0;
    for (int i = 0; i < p.tokens * p.topk; ++i) slots += route_id(p, i / p.topk, i % p.topk) == e;
    crowded |= slots > p.view.capacity;
  }
  return __syncthreads_or(crowded) != 0;
}

/// Whole block: 0 when all routes are valid. Else token * 64 + slot + 1 of the first id that is no
/// expert, or kNoPlace: too many slots name one expert. Every header of a call says the same.
__device__ inline std::uint32_t judge_routes(const LatencyDispatchParameters& p) {
  __shared__ std::uint32_t worst;
  if (threadIdx.x == 0) worst = kNoPlace;
  __syncthreads();
  bool twice = false;
  for (int i = static_cast<int>(threadIdx.x); i < p.tokens * p.topk; i += kLatencyThreads) {
    const int token = i / p.topk, slot = i % p.topk;
    const std::int64_t id = route_id(p, token, slot);
    if (id < -1 || id >= p.view.placement.experts) {
      atomicMin(&worst, static_cast<std::uint32_t>(token * 64 + slot + 1));
    }
    for (int earlier = 0; id >= 0 && earlier < slot; ++earlier) {
      twice |= route_id(p, token, earlier) == id;
    }
  }
  const bool any_twice = __syncthreads_or(twice) != 0;
  if (worst != kNoPlace) return worst;
  return any_twice && is_crowded(p) ? kNoPlace : 0;
}

/// Whole block: writes the header of `dest` and raises its flag. `counts`: dynamic shared memory,
/// [warps, experts of dest].
__device__ inline void send_header(const LatencyDispatchParameters& p, const LatencyPlaces& at,
                                   int dest, std::uint32_t* counts, int warps) {
  const LatencyView& v = p.view;
  std::byte* header = at.header(v.peers[dest], v.group.rank);
  const auto experts = static_cast<int>(v.placement.local_experts(dest));
  const int warp = static_cast<int>(threadIdx.x / 32), thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  for (int i = thread; i < warps * experts; i += threads) counts[i] = 0;
  const std::uint32_t refused = judge_routes(p);  // holds barriers
  const RouteStretch stretch(p, dest, warps);
  std::uint32_t* mine = counts + (warp < warps ? warp * experts : 0);
  stretch.walk(mine, [](int, int, std::uint32_t) {});
  __syncthreads();
  auto* numbers = reinterpret_cast<std::int32_t*>(header + sizeof(LatencyHeader));
  for (int e = thread; e < experts; e += threads) {
    std::uint32_t sum = 0;
    for (int w = 0; w < warps; ++w) {
      const std::uint32_t own = counts[w * experts + e];
      counts[w * experts + e] = sum;
      sum += own;
    }
    numbers[e] = static_cast<std::int32_t>(sum);
  }
  __syncthreads();
  std::uint32_t* places = at.places(v.peers[dest], v.group.rank);
  auto* weights = reinterpret_cast<float*>(header + v.layout.weights_at);
  stretch.walk(mine, [&](int entry, int expert, std::uint32_t ordinal) {
    places[entry] = expert < 0 ? kNoPlace : make_place(static_cast<std::uint32_t>(expert), ordinal);
    if (p.weights == nullptr) return;
    const int token = entry / v.topk, slot = entry % v.topk;
    weights[entry] = slot < p.topk ? p.weights[token * p.topk + slot] : 0.0f;
  });
  if (thread == 0) {
    auto* head = reinterpret_cast<LatencyHeader*>(header);
    head->generation = at.generation;
    head->tokens = refused != 0 ? 0 : p.tokens;
    head->format = static_cast<std::uint32_t>(p.format);
    head->refused = refused;
    head->weights = p.weights != nullptr ? 1 : 0;
  }
  __syncthreads();
  if (thread == 0) store_release(at.header_flag(v.peers[dest], v.group.rank), at.generation);
}

}  // namespace ferry::cuda::device

// Latency dispatch: from the routes to the header of one destination: rows for each of its experts,
// and every slot's ordinal among this rank's rows for its expert. Work of one whole block.
//
// Each warp but warp 0, which opens the call meanwhile, counts a stretch of the tokens; prefix sums
// over the warps; each counts its stretch again, now from where the warps before it end. Slots of
// one expert keep their order.
#pragma once
#include "cuda/kernels/latency/kernels.hpp"
#include "cuda/kernels/latency/shares.cuh"
#include "cuda/kernels/latency/wait.cuh"

namespace ferry::cuda::device {

inline constexpr int kBadRoute = -2;

/// A slot's global expert id; −1: none; kBadRoute: the id is no expert.
__device__ __forceinline__ int route_id(const LatencyDispatchParameters& p, int token, int slot) {
  if (slot >= p.topk) return -1;
  const std::int64_t at = token * p.token_stride + slot * p.slot_stride;
  const std::int64_t id =
      p.wide ? __ldg(static_cast<const long long*>(p.topk_idx) + at)
             : static_cast<std::int64_t>(__ldg(static_cast<const int*>(p.topk_idx) + at));
  return id >= -1 && id < p.view.placement.experts ? static_cast<int>(id) : kBadRoute;
}

/// This warp's number among those that count; −1: it does not.
__device__ __forceinline__ int header_warp() {
  return static_cast<int>(threadIdx.x / 32) - 1;
}

/// The routes of a warp's stretch of tokens: whole tokens in each batch of 32 slots.
class RouteStretch {
 public:
  /// Loads what it keeps.
  __device__ RouteStretch(const LatencyDispatchParameters& p, int warps)
      : p_(p), topk_(p.view.topk), each_(32 / p.view.topk) {
    const int lane = static_cast<int>(threadIdx.x % 32), warp = header_warp();
    const bool counts = warp >= 0 && warp < warps;
    token_ = lane / topk_;
    slot_ = lane - token_ * topk_;
    if (token_ >= each_) slot_ = topk_;  // none
    const int batches = (p.tokens + each_ - 1) / each_, share = (batches + warps - 1) / warps;
    used_ = (batches + share - 1) / max(share, 1);
    begin_ = min(counts ? warp * share : batches, batches);
    end_ = min(counts ? begin_ + share : batches, batches);
#pragma unroll
    for (int i = 0; i < kKept; ++i) kept_[i] = begin_ + i < end_ ? load(begin_ + i) : -1;
  }

  /// Warps whose stretch is not empty.
  __device__ int used() const { return used_; }

  /// visit(token, slot, global id) by whole warps; the slot is topk for a lane that has none.
  template <class Visit>
  __device__ __forceinline__ void walk(const Visit& visit) const {
    int next[kKept];
#pragma unroll
    for (int i = 0; i < kKept; ++i) next[i] = kept_[i];
#pragma unroll 1
    for (int batch = begin_; batch < end_; ++batch) {
      const int token = batch * each_ + token_;
      visit(token, token < p_.tokens ? slot_ : topk_, next[0]);
#pragma unroll
      for (int i = 0; i + 1 < kKept; ++i) next[i] = next[i + 1];
      if (batch + kKept < end_) next[kKept - 1] = load(batch + kKept);
    }
  }

 private:
  static constexpr int kKept = 3;

  __device__ int load(int batch) const {
    const int token = batch * each_ + token_;
    return slot_ < topk_ && token < p_.tokens ? route_id(p_, token, slot_) : -1;
  }

  const LatencyDispatchParameters& p_;
  int topk_, each_, token_, slot_, used_, begin_, end_;
  int kept_[kKept];
};

/// Whole warp: this lane's ordinal among the slots of its expert (a local one; −1: of another
/// rank), `counts` [experts] counting on.
__device__ __forceinline__ std::uint32_t count_on(std::uint32_t* counts, int expert) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::uint32_t same = __match_any_sync(kAllLanes, expert);
  const auto before = static_cast<std::uint32_t>(__popc(same & ((1u << lane) - 1)));
  const std::uint32_t start = expert >= 0 ? counts[expert] : 0;
  __syncwarp();
  if (expert >= 0 && before == 0) counts[expert] = start + static_cast<std::uint32_t>(__popc(same));
  __syncwarp();
  return start + before;
}

/// Whole block: whether more slots than the capacity name one expert. Slow, and asked only when a
/// route names an expert twice: else there cannot be too many.
__device__ __noinline__ inline bool is_crowded(const LatencyDispatchParameters& p) {
  bool crowded = false;
  const auto experts = static_cast<int>(p.view.placement.experts);
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += kLatencyThreads) {
    std::int64_t slots = 0;
    for (int i = 0; i < p.tokens * p.topk; ++i) slots += route_id(p, i / p.topk, i % p.topk) == e;
    crowded |= slots > p.view.capacity;
  }
  return __syncthreads_or(crowded) != 0;
}

/// Makes headers, one after the other.
class HeaderMaker {
 public:
  /// What its warps tell each other; in shared memory.
  struct Words {
    std::uint32_t worst[kMostHeaderWarps];  ///< kNoPlace, or the first route that is none
    bool twice[kMostHeaderWarps];           ///< a token names an expert twice
  };

  /// Loads the first routes. `counts`: dynamic shared memory, [warps, experts of a destination].
  __device__ HeaderMaker(const LatencyDispatchParameters& p, const RankFinder& ranks,
                         std::uint32_t* counts, int warps, Words& words)
      : p_(p), ranks_(ranks), counts_(counts), warps_(warps), words_(words), stretch_(p, warps) {}

  /// Each warp for itself, warp 0 idle: counts its stretch for `dest`. A barrier must follow.
  __device__ void count(int dest) {
    const int warp = header_warp(), lane = static_cast<int>(threadIdx.x % 32);
    if (warp < 0 || warp >= warps_) return;
    const int experts = ranks_.local_experts(dest);
#pragma unroll 1
    for (int e = lane; e < experts; e += 32) own_counts(dest)[e] = 0;
    __syncwarp();
    std::uint32_t worst = kNoPlace;
    bool twice = false;
    stretch_.walk([&](int token, int slot, int id) {
      if (slot < p_.view.topk && id == kBadRoute) {
        worst = min(worst, static_cast<std::uint32_t>(token * 64 + slot + 1));
      }
      // Tokens of a batch are told apart by their number in it.
      const int key = id >= 0 && slot < p_.view.topk ? (lane - slot) << 24 | id : -1 - lane;
      twice |= __popc(__match_any_sync(kAllLanes, key)) > 1;
      count_on(own_counts(dest), slot < p_.view.topk ? local(dest, id) : -1);
    });
    worst = __reduce_min_sync(kAllLanes, worst);
    twice = __any_sync(kAllLanes, twice) != 0;
    if (lane != 0) return;
    words_.worst[warp] = worst;
    words_.twice[warp] = twice;
  }

  /// Whole block: `dest` takes no part. Within the domain nothing says so; beyond it the proxy must
  /// know that there is nothing to carry.
  __device__ void leave_out(const LatencyPlaces& at, int dest) const {
    const LatencyView& v = p_.view;
    if (threadIdx.x != 0 || v.line[dest] == v.group.rank) return;
    std::uint64_t* head = at.header(v.peers[dest], v.line[dest]);
    store_word(head, make_head(0, agreed_format(p_)), at.tag());
    store_word(head + 1, kLeftOut, at.tag());
  }

  /// Whole block: writes the header of `dest`, which has been counted.
  __device__ void write(const LatencyPlaces& at, int dest) {
    const LatencyView& v = p_.view;
    std::byte* base = v.peers[dest];
    const int line = v.line[dest];
    const std::uint32_t tag = at.tag(), refused = find_refusal();
    const int experts = ranks_.local_experts(dest), thread = static_cast<int>(threadIdx.x);
    std::uint64_t* numbers = at.numbers(base, line);
#pragma unroll 1
    for (int e = thread; e < experts; e += kLatencyThreads) {
      std::uint32_t own[kMostHeaderWarps], sum = 0;
#pragma unroll
      for (int w = 0; w < kMostHeaderWarps; ++w) {
        own[w] = w < stretch_.used() ? counts_[w * experts + e] : 0;
      }
#pragma unroll
      for (int w = 0; w < kMostHeaderWarps; ++w) {
        if (w < stretch_.used()) counts_[w * experts + e] = sum;
        sum += own[w];
      }
      store_word(numbers + e, sum, tag);
    }
    if (thread == kLatencyThreads - 1) {
      std::uint64_t* head = at.header(base, line);
      const int tokens = refused != 0 ? 0 : p_.tokens;
      store_word(head, make_head(tokens, agreed_format(p_)), tag);
      store_word(head + 1, refused, tag);
    }
    __syncthreads();
    std::uint64_t* places = at.places(base, line);
    std::uint64_t* weights = at.header_weights(base, line);
    stretch_.walk([&](int token, int slot, int id) {
      const int expert = slot < v.topk ? local(dest, id) : -1;
      const std::uint32_t ordinal = count_on(own_counts(dest), expert);
      if (slot >= v.topk) return;
      const int entry = token * v.topk + slot;
      store_word(places + entry,
                 expert < 0 ? kNoPlace : make_place(static_cast<std::uint32_t>(expert), ordinal),
                 tag);
      if (p_.weights == nullptr) return;
      const float weight = slot < p_.topk ? p_.weights[token * p_.topk + slot] : 0.0f;
      store_word(weights + entry, __float_as_uint(weight), tag);
    });
  }

 private:
  __device__ int local(int dest, int id) const {
    const int expert = id - ranks_.first_expert(dest);
    return expert >= 0 && expert < ranks_.local_experts(dest) ? expert : -1;
  }
  __device__ std::uint32_t* own_counts(int dest) const {
    const int warp = header_warp();
    return counts_ + (warp >= 0 && warp < warps_ ? warp * ranks_.local_experts(dest) : 0);
  }
  /// Whole block: 0, or as in the header.
  __device__ std::uint32_t find_refusal() const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const bool counted = lane < stretch_.used();
    const std::uint32_t worst =
        __reduce_min_sync(kAllLanes, counted ? words_.worst[lane] : kNoPlace);
    const bool twice = __any_sync(kAllLanes, counted && words_.twice[lane]) != 0;
    if (worst != kNoPlace) return worst;
    return twice && is_crowded(p_) ? kNoPlace : 0;
  }

  const LatencyDispatchParameters& p_;
  const RankFinder& ranks_;
  std::uint32_t* counts_;
  int warps_;
  Words& words_;
  RouteStretch stretch_;
};

}  // namespace ferry::cuda::device

// Latency combine: what the warps of all formats share. How they walk over the rows that they send,
// what they find of weights, and how they wait for rows.
#pragma once
#include "cuda/kernels/latency/kernels.hpp"
#include "cuda/kernels/latency/shares.cuh"
#include "cuda/kernels/latency/wait.cuh"

namespace ferry::cuda::device {

/// Polls for weights that have not come, a millisecond or some, before rows of other ranks go
/// first.
inline constexpr int kPollsForFirst = 2048;

/// The id of one of this rank's slots; whatever is no expert is none to the RankFinder.
__device__ __forceinline__ int combine_route(const LatencyCombineParameters& p, int slot) {
  if (!p.wide) return __ldg(static_cast<const int*>(p.topk_idx) + slot);
  const long long id = __ldg(static_cast<const long long*>(p.topk_idx) + slot);
  return id >= 0 && id < p.view.placement.experts ? static_cast<int>(id) : -1;
}

__device__ __forceinline__ int load_tokens(const LatencyHandle& handle, int source) {
  return load_relaxed(&handle.tokens[source]);
}

/// Some parts of one row that this rank sends.
struct SentRow {
  int source, token;
  int first, last;  ///< parts
};

/// The rows that one warp sends, part by part. All ranks send to others first, in turn.
struct SendWalk {
  int step;   ///< from one of the warp's units to its next
  int group;  ///< parts of a unit
  int units;  ///< of a row
  int end;    ///< of all units
  int first;  ///< of the warp's

  __device__ __forceinline__ SendWalk(const LatencyView& v, const LatencyCall& call) {
    const int ranks = v.group.ranks;
    int most = 0;
#pragma unroll 1
    for (int s = 0; s < ranks; ++s) most = max(most, call.tokens[s]);
    const UnitWalk walk(static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
    step = walk.step;
    first = walk.first;
    group = parts_at_once(most * ranks, v.parts, walk.step);
    units = (v.parts + group - 1) / group;
    end = most * ranks * units;
  }
  /// False: the unit is none.
  __device__ __forceinline__ bool find(const LatencyView& v, const LatencyCall& call, int unit,
                                       SentRow& sent) const {
    const int row = unit / units, part = (unit - row * units) * group;
    sent.token = row / v.group.ranks;
    sent.source = (row + v.group.rank + sent.token) % v.group.ranks;
    if (sent.token >= call.tokens[sent.source] || !call.open[sent.source]) return false;
    sent.first = part;
    sent.last = min(part + group, v.parts) - 1;
    return true;
  }
};

/// Where the tables [R, capacity, topk] of a dispatch speak of this lane's slot.
__device__ __forceinline__ std::size_t slot_entry(const LatencyView& v, int source, int token) {
  return (static_cast<std::size_t>(source) * static_cast<std::size_t>(v.capacity) +
          static_cast<std::size_t>(token)) *
             static_cast<std::size_t>(v.topk) +
         static_cast<std::size_t>(threadIdx.x % 32);
}

/// Whole warp: the weights of the slots whose row is here (`row` >= 0), which their owner pushes.
/// Sums need the registers, so there is no clock. False: they have not come so far.
__device__ __forceinline__ bool poll_weights(const LatencyPlaces& at, int source, int token,
                                             int row, int most, float& weight) {
  const LatencyView& v = at.v;
  const std::uint64_t* word =
      at.weights(v.sources[source], source) + token * v.topk + static_cast<int>(threadIdx.x % 32);
  bool here = row < 0;
#pragma unroll 1
  for (int polls = 0; !here && polls < most; ++polls) {
    const std::uint64_t seen = load_relaxed(word);
    weight = __uint_as_float(static_cast<std::uint32_t>(seen));
    here = is_word_of(seen, at.tag());
  }
  return __all_sync(kAllLanes, here) != 0;
}

/// Not computed ahead, where it would take a register from the loops before.
__device__ __forceinline__ int here_and_now(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

/// The receiving half's waits on one warp. kTimed: somebody asks how long; kOdd: by what the tags
/// of its rows differ from those of rows by ranks, as they are.
template <bool kPerSlot, bool kTimed, std::uint32_t kOdd>
class CombineWaits {
 public:
  __device__ CombineWaits(const LatencyCombineParameters& p, const RankFinder& ranks,
                          const LatencyPlaces& at, LatencyCall& call)
      : p_(p), ranks_(ranks), at_(at), call_(call), parts_(p.view) {}

 protected:
  /// Of bits, one for each slot or rank.
  static constexpr int kMaskWords = kPerSlot ? 1 : (kMaxDomain + 31) / 32;

  __device__ std::uint32_t sum_tag() const { return at_.tag() ^ kOdd; }

  /// The blocks that receive, and which of them this is.
  __device__ int blocks() const { return call_.again ? 1 : static_cast<int>(gridDim.x); }
  __device__ int block() const { return call_.again ? 0 : static_cast<int>(blockIdx.x); }

  /// Whole warp: bits of the token's slots whose rows come from beyond the domain.
  __device__ __forceinline__ std::uint32_t slots_beyond(int token) const {
    const LatencyView& v = p_.view;
    if (!kPerSlot || v.inbox == nullptr) return 0;
    const int rank = owner(token, static_cast<int>(threadIdx.x % 32));
    return __ballot_sync(kAllLanes, rank >= 0 && v.sources[rank] == v.inbox);
  }
  /// Where the row of a slot or a rank lies, if bits of `beyond` say so.
  __device__ __forceinline__ std::byte* memory_of(int bit, std::uint32_t beyond) const {
    return (beyond >> bit & 1) != 0 ? p_.view.inbox : own_memory(p_.view);
  }

  __device__ int owner(int token, int slot) const {
    return slot < p_.topk ? ranks_.rank_of(combine_route(p_, token * p_.topk + slot)) : -1;
  }

  /// Whole warp: which rows of the token are here: bits of slots or of ranks. Without kWaits: which
  /// are to come.
  template <bool kWaits = true>
  __device__ bool await_part(int token, int part, std::uint32_t* here) {
    const LatencyView& v = p_.view;
    const int lane = static_cast<int>(threadIdx.x % 32);
    // Where the dispatch refused this rank's routes nothing comes back.
    const int rank = call_.tokens[v.group.rank] > 0 ? owner(token, lane) : -1;
    bool stopped = false;
    constexpr int kAtOnce = kWaits ? 1 : kMaskWords;
#pragma unroll kAtOnce
    for (int w = 0; w < kMaskWords; ++w) {
      if (!kPerSlot && w * 32 >= v.group.ranks) {
        here[w] = 0;
        continue;
      }
      int peer = kPerSlot ? rank : w * 32 + lane;
      if constexpr (!kPerSlot) {
        const int local = rank - w * 32;
        const std::uint32_t bit = local >= 0 && local < 32 ? 1u << local : 0;
        if ((__reduce_or_sync(kAllLanes, bit) >> lane & 1) == 0) peer = -1;
      }
      bool came = false;
      const bool masked = peer >= 0 && (!call_.open[peer] ||
                                        (call_.again && load_relaxed(&v.words->masked[peer]) != 0));
      if (!kWaits) came = peer >= 0 && !masked;
      if (kWaits && peer >= 0 && !masked) {
        const std::uint32_t* tag =
            at_.sum_tags(v.sources[peer], kPerSlot ? lane : peer, token) + part;
        const WaitStatus what = await_tag<kTimed, !kPerSlot, false>(v, call_, tag, sum_tag(), peer,
                                                                    Stage::latency_sums);
        came = what == WaitStatus::here;
        stopped |= what == WaitStatus::stop;
        if (what == WaitStatus::missing) call_.lost = true;
      }
      here[w] = __ballot_sync(kAllLanes, came);
    }
    __syncwarp();  // all lanes read what some have waited for
    return __any_sync(kAllLanes, stopped) == 0;
  }

  const LatencyCombineParameters& p_;
  const RankFinder& ranks_;
  const LatencyPlaces& at_;
  LatencyCall& call_;
  PartShape parts_;
};

}  // namespace ferry::cuda::device

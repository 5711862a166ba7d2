// Latency combine on one warp: some parts of one row in each half.
#pragma once
#include "cuda/kernels/latency_few.cuh"
#include "cuda/kernels/latency_send.cuh"

namespace ferry::cuda::device {

/// Vectors of a row that a lane sums at once.
inline constexpr int kAtOnce = 2;
/// Rows of a sum that are loaded at once: as many as the registers hold.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ == 1000)
inline constexpr int kRows = 3;
#else
inline constexpr int kRows = 4;
#endif

/// The same of rows that carry their generation.
inline constexpr int kFewRows = 4;

/// The id of one of this rank's slots; whatever is no expert is none to the RankFinder.
__device__ __forceinline__ int combine_route(const LatencyCombineParameters& p, int slot) {
  if (!p.wide) return __ldg(static_cast<const int*>(p.topk_idx) + slot);
  const long long id = __ldg(static_cast<const long long*>(p.topk_idx) + slot);
  return id >= 0 && id < p.view.placement.experts ? static_cast<int>(id) : -1;
}

__device__ __forceinline__ int load_tokens(const LatencyHandle& handle, int source) {
  return load_relaxed(&handle.tokens[source]);
}

/// The weights of `source` have not come in time. False: the group has failed.
__device__ __noinline__ inline bool give_up_weights(const LatencyView& v, const LatencyCall& call,
                                                    int source, std::uint32_t tag) {
  if (has_failed(v.group)) return false;
  if (load_relaxed(&v.words->masked[source]) != 0) return true;
  const bool aborted = load_relaxed(v.group.abort) != 0;
  if (v.alarm == nullptr || aborted) {
    return fail_latency(v, call, aborted ? Reason::aborted : Reason::deadline,
                        Stage::latency_weights, source, {tag, 0, 0});
  }
  mask_late(v, call, source);
  return true;
}

/// One call on one warp. kTimed: somebody asks how long it waits; kFew: this rank's own tokens are
/// few. Both would take registers from the others.
template <class T, bool kPerSlot, bool kTimed, bool kFew>
class Combiner {
 public:
  __device__ Combiner(const LatencyCombineParameters& p, const RankFinder& ranks,
                      const LatencyPlaces& at, const LatencyCall& call)
      : p_(p),
        ranks_(ranks),
        at_(at),
        call_(call),
        parts_(p.view),
        given_(call.tokens[p.view.group.rank] > 0) {}

  /// False: the group has failed.
  __device__ bool send() {
    const LatencyView& v = p_.view;
    const int ranks = v.group.ranks;
    int most = 0;
    for (int s = 0; s < ranks; ++s) most = max(most, call_.tokens[s]);
    const UnitWalk walk(static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
    const int group = parts_at_once(most * ranks, v.parts, walk.step);
    const int units = (v.parts + group - 1) / group;
    for (int unit = walk.first; unit < most * ranks * units; unit += walk.step) {
      const int row = unit / units, first = (unit - row * units) * group;
      const int token = row / ranks, source = (row + v.group.rank + token) % ranks;
      if (token >= call_.tokens[source] || !call_.open[source]) continue;
      if (!send_parts(source, token, first, min(first + group, v.parts) - 1)) return false;
    }
    return true;
  }

  /// The receiving half, of `blocks` blocks of which this is one. `again`: all that comes has come,
  /// and masked ranks are left out. False: the group has failed.
  __device__ bool receive(int block, int blocks, bool again) {
    const LatencyView& v = p_.view;
    if constexpr (kFew) return receive_few(block, blocks, again);
    // Some warps for each part, where there are enough.
    const int warps = blocks * kLatencyWarps, most = max(1, parts_.channels / kEach / kPiece);
    const int shares = max(1, min(most, warps / max(1, p_.tokens * v.parts)));
    // The other end of the block than the senders'.
    const int warp = kLatencyWarps - 1 - static_cast<int>(threadIdx.x / 32);
    for (int unit = warp * blocks + block; unit < p_.tokens * v.parts * shares; unit += warps) {
      const int whole = unit / shares, share = unit - whole * shares;
      const int token = whole / v.parts, part = whole - token * v.parts;
      std::uint32_t here[kMaskWords];
      if (!await_part(token, part, again, here)) return false;
      const int begin = parts_.begin(part) / kEach, end = parts_.end(v, part) / kEach;
      const int pieces = (end - begin + kPiece - 1) / kPiece;
      const int each = (pieces + shares - 1) / shares * kPiece;
      sum_vectors(token, begin + share * each, min(end, begin + (share + 1) * each), here);
    }
    return true;
  }

  bool lost = false;  ///< something of a masked rank did not come

 private:
  static constexpr int kEach = kPerVector<T>;
  static constexpr int kPiece = 32 * kAtOnce;  ///< vectors that a warp sums at once
  /// Of bits, one for each slot or rank.
  static constexpr int kMaskWords = kPerSlot ? 1 : (kMaxDomain + 31) / 32;

  __device__ std::size_t row_bytes() const {
    return static_cast<std::size_t>(p_.view.hidden) * sizeof(T);
  }

  /// False: the group has failed.
  __device__ bool send_parts(int source, int token, int first, int last) {
    const LatencyView& v = p_.view;
    const int lane = static_cast<int>(threadIdx.x % 32);
    const std::size_t entry =
        (static_cast<std::size_t>(source) * static_cast<std::size_t>(v.capacity) +
         static_cast<std::size_t>(token)) *
            static_cast<std::size_t>(v.topk) +
        static_cast<std::size_t>(lane);
    const std::int32_t row = lane < v.topk ? __ldg(p_.slots + entry) : -1;
    const std::uint32_t lanes = __ballot_sync(kAllLanes, row >= 0);
    if (lanes == 0) return true;
    std::byte* base = v.peers[source];
    const int begin = parts_.begin(first) / kEach, end = parts_.end(v, last) / kEach;
    bool tells;
    if constexpr (kPerSlot) {
      copy_slots(source, token, begin, end, row, lanes);
      tells = row >= 0;
    } else {
      float weight = row >= 0 && p_.slot_weights != nullptr ? __ldg(p_.slot_weights + entry) : 0;
      if (!sum_slots(source, token, begin, end, row, weight, lanes)) {
        return give_up_weights(v, call_, source, at_.tag());
      }
      tells = lane == 0 && !is_few<T>(v, call_.tokens[source]);
    }
    __syncwarp();
    if (tells) {
      std::uint32_t* tags = at_.sum_tags(base, kPerSlot ? lane : v.group.rank, token);
      fence_system();
      for (int part = first; part <= last; ++part)
        store_relaxed(tags + part, at_.sum_tag(kPerSlot));
    }
    return true;
  }

  /// Whole warp: the weights of the slots whose row is here, which their owner pushes. False: they
  /// do not come. Here sums need the registers: what then is to be done waits until they are free.
  __device__ bool await_weights(int source, int token, int row, float& weight) {
    const LatencyView& v = p_.view;
    const int lane = static_cast<int>(threadIdx.x % 32);
    const std::uint64_t* word = at_.weights(own_memory(v), source) + token * v.topk + lane;
    Patience patience;
    bool over = false;
    while (row >= 0 && !over) {
      const std::uint64_t seen = load_relaxed(word);
      weight = __uint_as_float(static_cast<std::uint32_t>(seen));
      if (is_word_of(seen, at_.tag())) break;
      Reason reason;
      over = patience.over(v.group, reason);
      // Warps that wait for its sums find out whether it is gone.
      if (patience.looks % Patience::kLooksPerCheck == 0) {
        over |= load_relaxed(&v.words->masked[source]) != 0;
      }
    }
    return __any_sync(kAllLanes, over) == 0;
  }

  __device__ const uint4* input(int row) const {
    return reinterpret_cast<const uint4*>(p_.rows + static_cast<std::size_t>(row) * row_bytes());
  }

  __device__ void copy_slots(int source, int token, int begin, int end, int row,
                             std::uint32_t lanes) {
    const LatencyView& v = p_.view;
    const int lane = static_cast<int>(threadIdx.x % 32);
    for (int base = begin + lane; base - lane < end; base += 2 * kPiece) {
      for (std::uint32_t left = lanes; left != 0; left &= left - 1) {
        const int k = __ffs(static_cast<int>(left)) - 1;
        const uint4* from = input(__shfl_sync(kAllLanes, row, k));
        auto* to = reinterpret_cast<uint4*>(at_.sum(v.peers[source], k, token, row_bytes()));
        uint4 data[2 * kAtOnce];
#pragma unroll
        for (int i = 0; i < 2 * kAtOnce; ++i) {
          if (base + 32 * i < end) data[i] = __ldg(from + base + 32 * i);
        }
#pragma unroll
        for (int i = 0; i < 2 * kAtOnce; ++i) {
          if (base + 32 * i < end) to[base + 32 * i] = data[i];
        }
      }
    }
  }

  /// The slots of one row on this rank, in ascending k, rounded once. The weights are waited for
  /// while the first rows are loaded. False: they do not come.
  __device__ bool sum_slots(int source, int token, int begin, int end, int row, float weight,
                            std::uint32_t lanes) {
    const LatencyView& v = p_.view;
    const int lane = static_cast<int>(threadIdx.x % 32);
    const bool few = is_few<T>(v, call_.tokens[source]);
    std::byte* to = few ? few_sum(at_, v.peers[source], v.group.rank, token)
                        : at_.sum(v.peers[source], v.group.rank, token, row_bytes());
    bool weighed = p_.slot_weights != nullptr;
    for (int base = begin + lane; base - lane < end; base += kPiece) {
      float acc[kAtOnce][kEach] = {};
      std::uint32_t left = lanes;
      while (left != 0) {
        const int one = __ffs(static_cast<int>(left)) - 1;
        left &= left - 1;
        const bool pair = left != 0;
        const int two = pair ? __ffs(static_cast<int>(left)) - 1 : one;
        left &= left - 1;
        const uint4* from[2] = {input(__shfl_sync(kAllLanes, row, one)),
                                input(__shfl_sync(kAllLanes, row, two))};
        uint4 data[2][kAtOnce] = {};
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            if (base + 32 * i < end && (n == 0 || pair)) {
              data[n][i] = __ldg(from[n] + base + 32 * i);
            }
          }
        }
        if (!weighed) {
          if (!await_weights(source, token, row, weight)) return false;
          weighed = true;
        }
        const float factors[2] = {__shfl_sync(kAllLanes, weight, one),
                                  __shfl_sync(kAllLanes, weight, two)};
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          if (n == 1 && !pair) break;
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) add_vector<T, true>(acc[i], data[n][i], factors[n]);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (base + 32 * i >= end) continue;
        const auto byte = static_cast<std::size_t>(base + 32 * i) * 16;
        const uint4 sum = round_vector<T>(acc[i]);
        if (few) {
          store_few(to, byte, sum, at_.tag());
        } else {
          *reinterpret_cast<uint4*>(to + byte) = sum;
        }
      }
    }
    return true;
  }

  /// The receiving half of rows that carry their generation; as `receive`. A warp takes every other
  /// 8 bytes of a slice, so that rows of several ranks fit into its registers with their tags.
  __device__ bool receive_few(int block, int blocks, bool again) {
    const int slices = (static_cast<int>(row_bytes()) + kSliceBytes - 1) / kSliceBytes;
    const int warp = kLatencyWarps - 1 - static_cast<int>(threadIdx.x / 32);
    for (int unit = warp * blocks + block; unit < p_.tokens * slices * 2;
         unit += blocks * kLatencyWarps) {
      const int token = unit / (2 * slices), rest = unit - token * 2 * slices;
      std::uint32_t expected[kMaskWords];
      if (!await_part<false>(token, 0, again, expected)) return false;
      if (!sum_half_slice(token, rest / 2, rest % 2, expected[0])) return false;
    }
    return true;
  }

  /// Whole warp: the sum of what the expected ranks (bits) say, in ascending order, rounded once.
  __device__ bool sum_half_slice(int token, int slice, int half, std::uint32_t expected) {
    const int byte = slice * kSliceBytes + static_cast<int>(threadIdx.x % 32) * 16;
    float acc[4] = {};
    while (expected != 0) {
      std::uint32_t some = 0;  // of whom rows are loaded at once
#pragma unroll
      for (int n = 0; n < kFewRows; ++n) {
        some |= expected & (~expected + 1);
        expected &= expected - 1;
      }
      uint2 data[kFewRows];
      if (!await_slices(token, byte, half, some, data)) return false;
#pragma unroll
      for (int n = 0; n < kFewRows; ++n) {
        acc[0] = __fadd_rn(acc[0], Pair<T>::low(data[n].x));
        acc[1] = __fadd_rn(acc[1], Pair<T>::high(data[n].x));
        acc[2] = __fadd_rn(acc[2], Pair<T>::low(data[n].y));
        acc[3] = __fadd_rn(acc[3], Pair<T>::high(data[n].y));
      }
    }
    if (byte >= static_cast<int>(row_bytes())) return true;
    std::byte* to = p_.out + static_cast<std::size_t>(token) * row_bytes() + byte + half * 8;
    *reinterpret_cast<uint2*>(to) =
        uint2{Pair<T>::round(acc[0], acc[1]), Pair<T>::round(acc[2], acc[3])};
    return true;
  }

  /// Whole warp: this lane's share of the rows of `some` ranks (bits) in ascending order, then −0,
  /// which changes no sum. Of a rank that is masked on the way it may be anything: then all sums
  /// are made again. False: the group has failed.
  __device__ bool await_slices(int token, int byte, int half, std::uint32_t some, uint2* data) {
    const LatencyView& v = p_.view;
    constexpr std::uint32_t kMinusZeros = 0x80008000;
#pragma unroll
    for (int n = 0; n < kFewRows; ++n) data[n] = uint2{kMinusZeros, kMinusZeros};
    const std::byte* rows =
        few_sum(at_, own_memory(v), 0, token) + few_offset(static_cast<std::size_t>(byte), half);
    const auto step = static_cast<std::uint32_t>(kFewTokens * v.layout.few_scale_at);
    Patience patience;
    std::uint32_t pending = some;
    std::uint64_t late = 0;
    while (pending != 0) {
      std::uint32_t ranks = some, missing = 0;
#pragma unroll
      for (int n = 0; n < kFewRows; ++n) {
        const std::uint32_t bit = ranks & (~ranks + 1);
        ranks &= ranks - 1;
        if ((pending & bit) == 0 || byte >= static_cast<int>(row_bytes())) continue;
        const auto peer = static_cast<std::uint32_t>(__ffs(static_cast<int>(bit)) - 1);
        if (!load_half(rows + std::size_t{peer} * step, at_.tag(), data[n])) missing |= bit;
      }
      missing = __reduce_or_sync(kAllLanes, missing);
      if constexpr (kTimed) {
        for (std::uint32_t came = pending & ~missing; came != 0; came &= came - 1) {
          note_wait(call_, __ffs(static_cast<int>(came)) - 1, late);
        }
      }
      pending = missing;
      if (pending == 0) break;
      const int peer = __ffs(static_cast<int>(pending)) - 1;
      std::uint32_t seen = at_.tag();
// Elsewhere there are no registers left for it.
#if !defined(__CUDA_ARCH__) || (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200)
      if (patience.is_next_check()) seen = slot_tag(token, peer);
#endif
      const Came came =
          between_looks(v, call_, patience, peer, Stage::latency_sums, at_.tag(), seen);
      if constexpr (kTimed) late = look_time(call_);
      if (__any_sync(kAllLanes, came == Came::stop)) return false;
      if (!__any_sync(kAllLanes, came != Came::here)) continue;
      lost = true;
      pending &= pending - 1;
    }
    return true;
  }

  /// Whole warp: the tag by which `peer` tells that it sends slots, if it does; else the right one.
  __device__ std::uint32_t slot_tag(int token, int peer) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const std::uint32_t odd = at_.sum_tag(true);
    const bool sends_slots = owner(token, lane) == peer &&
                             load_relaxed(at_.sum_tags(own_memory(p_.view), lane, token)) == odd;
    return __any_sync(kAllLanes, sends_slots) != 0 ? odd : at_.tag();
  }

  __device__ int owner(int token, int slot) const {
    return slot < p_.topk ? ranks_.rank_of(combine_route(p_, token * p_.topk + slot)) : -1;
  }

  /// Whole warp: which rows of the token are here: bits of slots or of ranks. Without kWaits: which
  /// are to come.
  template <bool kWaits = true>
  __device__ bool await_part(int token, int part, bool again, std::uint32_t* here) {
    const LatencyView& v = p_.view;
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int rank = given_ ? owner(token, lane) : -1;
    bool stopped = false;
#pragma unroll
    for (int w = 0; w < kMaskWords; ++w) {
      here[w] = 0;
      if (!kPerSlot && w * 32 >= v.group.ranks) continue;
      int peer = kPerSlot ? rank : w * 32 + lane;
      if constexpr (!kPerSlot) {
        const int local = rank - w * 32;
        const std::uint32_t bit = local >= 0 && local < 32 ? 1u << local : 0;
        if ((__reduce_or_sync(kAllLanes, bit) >> lane & 1) == 0) peer = -1;
      }
      bool came = false;
      const bool masked =
          peer >= 0 && (!call_.open[peer] || (again && load_relaxed(&v.words->masked[peer]) != 0));
      if (!kWaits) came = peer >= 0 && !masked;
      if (kWaits && peer >= 0 && !masked) {
        const std::uint32_t* tag =
            at_.sum_tags(own_memory(v), kPerSlot ? lane : peer, token) + part;
        const Came what =
            await_tag<kTimed>(v, call_, tag, at_.sum_tag(kPerSlot), peer, Stage::latency_sums);
        came = what == Came::here;
        stopped |= what == Came::stop;
        lost |= what == Came::missing;
      }
      here[w] = __ballot_sync(kAllLanes, came);
    }
    __syncwarp();  // all lanes read what some have waited for
    return __any_sync(kAllLanes, stopped) == 0;
  }

  /// The sum of what is here, in ascending order, rounded once.
  __device__ void sum_vectors(int token, int begin, int end, const std::uint32_t* here) {
    const LatencyView& v = p_.view;
    const int lane = static_cast<int>(threadIdx.x % 32);
    const float weight =
        kPerSlot && lane < p_.topk ? __ldg(p_.weights + token * p_.topk + lane) : 0.0f;
    auto* to = reinterpret_cast<uint4*>(p_.out + static_cast<std::size_t>(token) * row_bytes());
    for (int base = begin + lane; base - lane < end; base += kPiece) {
      float acc[kAtOnce][kEach] = {};
#pragma unroll
      for (int w = 0; w < kMaskWords; ++w) {
        std::uint32_t left = here[w];
        while (left != 0) {
          uint4 data[kRows][kAtOnce];
          std::uint32_t loaded = left;
          int count = 0;
#pragma unroll
          for (int n = 0; n < kRows; ++n) {
            if (left == 0) continue;
            const int bit = __ffs(static_cast<int>(left)) - 1;
            left &= left - 1;
            count = n + 1;
            const auto* from = reinterpret_cast<const uint4*>(
                at_.sum(own_memory(v), w * 32 + bit, token, row_bytes()));
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
              if (base + 32 * i < end) data[n][i] = from[base + 32 * i];
            }
          }
#pragma unroll
          for (int n = 0; n < kRows; ++n) {
            if (n >= count) continue;
            float factor = 0;
            if constexpr (kPerSlot) {
              factor = __shfl_sync(kAllLanes, weight, __ffs(static_cast<int>(loaded)) - 1);
              loaded &= loaded - 1;
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) add_vector<T, kPerSlot>(acc[i], data[n][i], factor);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (base + 32 * i < end) to[base + 32 * i] = round_vector<T>(acc[i]);
      }
    }
  }

  const LatencyCombineParameters& p_;
  const RankFinder& ranks_;
  const LatencyPlaces& at_;
  const LatencyCall& call_;
  PartShape parts_;
  bool given_;  ///< false: the dispatch refused this rank's routes, and nothing comes back
};

}  // namespace ferry::cuda::device

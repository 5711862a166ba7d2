// Latency combine of rows as they are, on one warp: some parts of one row in each half.
#pragma once
#include "cuda/kernels/latency/combine_wait.cuh"
#include "cuda/kernels/latency/late_weights.cuh"
#include "cuda/kernels/latency/row_ll.cuh"

namespace ferry::cuda::device {

/// Vectors of a row that a lane sums at once.
inline constexpr int kAtOnce = 2;
/// Rows of a sum that are loaded at once: as many as the registers hold.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1000)
inline constexpr int kRows = 3;
#else
inline constexpr int kRows = 4;
#endif

/// The same of rows that carry their generation.
inline constexpr int kLLRows = 4;

/// One call on one warp. kTimed: somebody asks how long it waits; kLL: this rank's own tokens are
/// few. Both would take registers from the others.
template <class T, bool kPerSlot, bool kTimed, bool kLL>
class Combiner : public CombineWaits<kPerSlot, kTimed, kPerSlot ? kPerSlotTag : 0> {
  using Waits = CombineWaits<kPerSlot, kTimed, kPerSlot ? kPerSlotTag : 0>;
  using Waits::at_, Waits::call_, Waits::p_, Waits::parts_, Waits::ranks_;
  using Waits::kMaskWords;

 public:
  using Waits::Waits;

  /// False: the group has failed.
  __device__ bool send() {
    const LatencyView& v = p_.view;
    const SendWalk walk(v, call_);
#pragma unroll 1
    for (int unit = walk.first; unit < walk.end; unit += walk.step) {
      SentRow sent;
      if (!walk.find(v, call_, unit, sent) || send_parts(sent)) continue;
      return send_rest<PlainRow<T>>(p_, call_, unit);
    }
    return true;
  }

  /// The receiving half. False: the group has failed.
  __device__ bool receive() {
    const LatencyView& v = p_.view;
    if constexpr (kLL) return receive_ll();
    // Some warps for each part, where there are enough; the other end of the block than the
    // senders'.
    const int warps = this->blocks() * kLatencyWarps, parts = here_and_now(p_.tokens) * v.parts;
    const int most = max(1, here_and_now(parts_.channels) / kEach / kPiece);
    const int shares = max(1, min(most, warps / max(1, parts)));
    const int warp = kLatencyWarps - 1 - static_cast<int>(threadIdx.x / 32);
#pragma unroll 1
    for (int unit = warp * this->blocks() + this->block();
         unit < here_and_now(p_.tokens) * v.parts * shares;
         unit += this->blocks() * kLatencyWarps) {
      const int whole = unit / shares, share = unit - whole * shares;
      const int token = whole / v.parts, part = whole - token * v.parts;
      std::uint32_t* here = call_.here[threadIdx.x / 32];
      if (!this->await_part(token, part, here)) return false;
      const int begin = parts_.begin(part) / kEach, end = parts_.end(v, part) / kEach;
      const int pieces = (end - begin + kPiece - 1) / kPiece;
      const int each = (pieces + here_and_now(shares) - 1) / shares * kPiece;
      sum_vectors(token, begin + share * each, min(end, begin + (share + 1) * each), here);
    }
    return true;
  }

 private:
  static constexpr int kEach = kPerVector<T>;
  static constexpr int kPiece = 32 * kAtOnce;  ///< vectors that a warp sums at once

  __device__ std::size_t row_bytes() const {
    return static_cast<std::size_t>(p_.view.hidden) * sizeof(T);
  }

  /// False: the weights have not come so far.
  __device__ bool send_parts(const SentRow& sent) {
    const LatencyView& v = p_.view;
    const int lane = static_cast<int>(threadIdx.x % 32);
    const std::size_t entry = slot_entry(v, sent.source, sent.token);
    const std::int32_t row = lane < v.topk ? __ldg(p_.slots + entry) : -1;
    const std::uint32_t lanes = __ballot_sync(kAllLanes, row >= 0);
    if (lanes == 0) return true;
    const int begin = parts_.begin(sent.first) / kEach, end = parts_.end(v, sent.last) / kEach;
    bool tells;
    if constexpr (kPerSlot) {
      copy_slots(sent.source, sent.token, begin, end, row, lanes);
      tells = row >= 0;
    } else {
      float weight = row >= 0 && p_.slot_weights != nullptr ? __ldg(p_.slot_weights + entry) : 0;
      if (!sum_slots(sent.source, sent.token, begin, end, row, weight, lanes)) return false;
      tells = lane == 0 && !is_ll<T>(v, call_.tokens[sent.source]);
    }
    const int place = kPerSlot ? v.slots[sent.source] + lane : v.line[sent.source];
    tell_parts(at_, sent, place, tells, at_.sum_tag(kPerSlot));
    return true;
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
        auto* to = reinterpret_cast<uint4*>(
            at_.sum(v.peers[source], v.slots[source] + k, token, row_bytes()));
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
  /// while the first rows are loaded. False: they have not come so far.
  __device__ bool sum_slots(int source, int token, int begin, int end, int row, float weight,
                            std::uint32_t lanes) {
    const LatencyView& v = p_.view;
    const int lane = static_cast<int>(threadIdx.x % 32);
    const bool ll = is_ll<T>(v, call_.tokens[source]);
    std::byte* to = ll ? ll_sum(at_, v.peers[source], v.line[source], token)
                       : at_.sum(v.peers[source], v.line[source], token, row_bytes());
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
          if (!poll_weights(at_, source, token, row, kPollsForFirst, weight)) return false;
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
        if (ll) {
          store_ll(to, byte, sum, at_.tag());
        } else {
          *reinterpret_cast<uint4*>(to + byte) = sum;
        }
      }
    }
    return true;
  }

  /// The receiving half of rows that carry their generation; as `receive`. A warp takes every other
  /// 8 bytes of a stretch, so that rows of several ranks fit into its registers with their tags.
  __device__ bool receive_ll() {
    const int stretches = (static_cast<int>(row_bytes()) + kWarpBytes - 1) / kWarpBytes;
    const int warp = kLatencyWarps - 1 - static_cast<int>(threadIdx.x / 32);
#pragma unroll 1
    for (int unit = warp * this->blocks() + this->block(); unit < p_.tokens * stretches * 2;
         unit += this->blocks() * kLatencyWarps) {
      const int token = unit / (2 * stretches), rest = unit - token * 2 * stretches;
      std::uint32_t expected[kMaskWords];
      if (!this->template await_part<false>(token, 0, expected)) return false;
      if (!sum_pair(token, rest / 2, rest % 2, expected[0])) return false;
    }
    return true;
  }

  /// Whole warp: the sum of what the expected ranks (bits) say, in ascending order, rounded once.
  __device__ bool sum_pair(int token, int stretch, int pair, std::uint32_t expected) {
    const int byte = stretch * kWarpBytes + static_cast<int>(threadIdx.x % 32) * 16;
    float acc[4] = {};
    while (expected != 0) {
      std::uint32_t some = 0;  // of whom rows are loaded at once
#pragma unroll
      for (int n = 0; n < kLLRows; ++n) {
        some |= expected & (~expected + 1);
        expected &= expected - 1;
      }
      uint2 data[kLLRows];
      if (!await_stretches(token, byte, pair, some, data)) return false;
#pragma unroll
      for (int n = 0; n < kLLRows; ++n) {
        acc[0] = __fadd_rn(acc[0], Pair<T>::low(data[n].x));
        acc[1] = __fadd_rn(acc[1], Pair<T>::high(data[n].x));
        acc[2] = __fadd_rn(acc[2], Pair<T>::low(data[n].y));
        acc[3] = __fadd_rn(acc[3], Pair<T>::high(data[n].y));
      }
    }
    if (byte >= static_cast<int>(row_bytes())) return true;
    std::byte* to = p_.out + static_cast<std::size_t>(token) * row_bytes() + byte + pair * 8;
    *reinterpret_cast<uint2*>(to) =
        uint2{Pair<T>::round(acc[0], acc[1]), Pair<T>::round(acc[2], acc[3])};
    return true;
  }

  /// Whole warp: this lane's share of the rows of `some` ranks (bits) in ascending order, then −0,
  /// which changes no sum. Of a rank that is masked on the way it may be anything: then all sums
  /// are made again. False: the group has failed.
  __device__ bool await_stretches(int token, int byte, int pair, std::uint32_t some, uint2* data) {
    const LatencyView& v = p_.view;
    constexpr std::uint32_t kMinusZeros = 0x80008000;
#pragma unroll
    for (int n = 0; n < kLLRows; ++n) data[n] = uint2{kMinusZeros, kMinusZeros};
    const std::byte* rows =
        ll_sum(at_, own_memory(v), 0, token) + ll_offset(static_cast<std::size_t>(byte), pair);
    const auto step = static_cast<std::uint32_t>(kLLTokens * v.layout.ll_scale_at);
    SpinDeadline spin_deadline;
    std::uint32_t pending = some;
    std::uint64_t late = 0;
    while (pending != 0) {
      std::uint32_t ranks = some, missing = 0;
#pragma unroll
      for (int n = 0; n < kLLRows; ++n) {
        const std::uint32_t bit = ranks & (~ranks + 1);
        ranks &= ranks - 1;
        if ((pending & bit) == 0 || byte >= static_cast<int>(row_bytes())) continue;
        const auto peer = static_cast<std::uint32_t>(__ffs(static_cast<int>(bit)) - 1);
        if (!load_pair(rows + std::size_t{peer} * step, at_.tag(), data[n])) missing |= bit;
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
      if (spin_deadline.is_next_check()) seen = slot_tag(token, peer);
      const WaitStatus came = between_polls<true, false>(v, call_, spin_deadline, peer,
                                                         Stage::latency_sums, at_.tag(), seen);
      if constexpr (kTimed) late = poll_time(call_);
      if (__any_sync(kAllLanes, came == WaitStatus::stop)) return false;
      if (!__any_sync(kAllLanes, came != WaitStatus::here)) continue;
      if constexpr (kTimed) note_wait(call_, peer, late);
      call_.lost = true;
      pending &= pending - 1;
    }
    return true;
  }

  /// Whole warp: the tag by which `peer` tells that it sends slots, if it does; else the right one.
  __device__ std::uint32_t slot_tag(int token, int peer) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const std::uint32_t odd = at_.sum_tag(true);
    const bool sends_slots = this->owner(token, lane) == peer &&
                             load_relaxed(at_.sum_tags(own_memory(p_.view), lane, token)) == odd;
    return __any_sync(kAllLanes, sends_slots) != 0 ? odd : at_.tag();
  }

  /// The sum of what is here, in ascending order, rounded once.
  __device__ void sum_vectors(int token, int begin, int end, const std::uint32_t* here) {
    const LatencyView& v = p_.view;
    const int lane = static_cast<int>(threadIdx.x % 32);
    const float weight =
        kPerSlot && lane < p_.topk ? __ldg(p_.weights + token * p_.topk + lane) : 0.0f;
    const std::uint32_t slots = this->slots_beyond(token);
    for (int base = begin + lane; base - lane < end; base += kPiece) {
      float acc[kAtOnce][kEach] = {};
#pragma unroll 1
      for (int w = 0; w < kMaskWords; ++w) {
        std::uint32_t left = here[w];
        const std::uint32_t beyond = kPerSlot ? slots : left != 0 ? v.beyond[w] : 0;
#pragma unroll 1
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
                at_.sum(this->memory_of(bit, beyond), w * 32 + bit, token, row_bytes()));
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
      auto* to = reinterpret_cast<uint4*>(p_.out + static_cast<std::size_t>(token) * row_bytes());
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (base + 32 * i < end) to[base + 32 * i] = round_vector<T>(acc[i]);
      }
    }
  }
};

}  // namespace ferry::cuda::device

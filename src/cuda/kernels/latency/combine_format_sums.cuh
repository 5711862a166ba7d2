// Latency combine of rows that are not as they are, on one warp: who sends a row encodes it, its
// owner sums what the codes mean. 16 channels a lane.
#pragma once
#include "cuda/kernels/latency/combine_format.cuh"
#include "cuda/kernels/latency/combine_wait.cuh"
#include "cuda/kernels/latency/late_weights.cuh"

namespace ferry::cuda::device {

/// Vectors of T that hold a lane's channels.
template <class T>
inline constexpr int kHeldVectors = kLaneChannels / kPerVector<T>;

/// By what the tags of such rows differ from others.
template <class Codes, bool kPerSlot>
inline constexpr std::uint32_t kOddTag =
    (kPerSlot ? kPerSlotTag : 0) | static_cast<std::uint32_t>(Codes::kFormat) << kFormatShift;

/// This lane's channels of a row from `channel` on; zeros past the end of the row.
template <class T>
__device__ __forceinline__ void load_channels(const std::byte* row, int channel, int hidden,
                                              uint4* vectors) {
#pragma unroll
  for (int i = 0; i < kHeldVectors<T>; ++i) {
    const int first = channel + i * kPerVector<T>;
    vectors[i] = uint4{0, 0, 0, 0};
    if (first < hidden) {
      vectors[i] =
          __ldg(reinterpret_cast<const uint4*>(row + static_cast<std::size_t>(first) * sizeof(T)));
    }
  }
}

/// The sending half, whole warp: some parts of one row.
template <class T, class Codes, bool kPerSlot>
struct EncodedRow {
  /// `row`: that of the lane's slot, −1: it is not here. `lanes`: of slots that are.
  __device__ static void send(const LatencyCombineParameters& p, const LatencyPlaces& at,
                              const LatencyCall&, const SentRow& sent, int row, float weight,
                              std::uint32_t lanes) {
    const LatencyView& v = p.view;
    const PartShape parts(v);
    const int lane = static_cast<int>(threadIdx.x % 32), end = parts.end(v, sent.last);
    // Whether the pointer or what it is made of is kept: what the registers hold.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
    std::byte* const row_of_sum =
        at.encoded_sum(v.peers[sent.source], v.line[sent.source], sent.token);
    const auto to = [&] { return row_of_sum; };
#else
    const auto to = [&] {
      return at.encoded_sum(v.peers[sent.source], v.line[sent.source], sent.token);
    };
#endif
    for (int step = parts.begin(sent.first); step < end; step += kStepChannels) {
      const int channel = step + lane * kLaneChannels;
      if constexpr (kPerSlot) {
#pragma unroll 1
        for (std::uint32_t left = lanes; left != 0; left &= left - 1) {
          const int k = __ffs(static_cast<int>(left)) - 1;
          uint4 vectors[kHeldVectors<T>];
          load_channels<T>(input(p, __shfl_sync(kAllLanes, row, k)), channel,
                           static_cast<int>(v.hidden), vectors);
          const auto to_slot = [&] {
            return at.encoded_sum(v.peers[sent.source], v.slots[sent.source] + k, sent.token);
          };
          put(v, to_slot, channel, vectors);
        }
      } else {
        float acc[kLaneChannels] = {};
#pragma unroll 1
        for (std::uint32_t left = lanes; left != 0; left &= left - 1) {
          const int k = __ffs(static_cast<int>(left)) - 1;
          const float factor = __shfl_sync(kAllLanes, weight, k);
          uint4 vectors[kHeldVectors<T>];
          load_channels<T>(input(p, __shfl_sync(kAllLanes, row, k)), channel,
                           static_cast<int>(v.hidden), vectors);
#pragma unroll
          for (int i = 0; i < kHeldVectors<T>; ++i) {
            add_vector<T, true>(acc + i * kPerVector<T>, vectors[i], factor);
          }
        }
        uint4 vectors[kHeldVectors<T>];
#pragma unroll
        for (int i = 0; i < kHeldVectors<T>; ++i) {
          vectors[i] = channel + i * kPerVector<T> < static_cast<int>(v.hidden)
                           ? round_vector<T>(acc + i * kPerVector<T>)
                           : uint4{0, 0, 0, 0};
        }
        put(v, to, channel, vectors);
      }
    }
    const int place = kPerSlot ? v.slots[sent.source] + lane : v.line[sent.source];
    tell_parts(at, sent, place, kPerSlot ? row >= 0 : lane == 0,
               at.tag() ^ kOddTag<Codes, kPerSlot>);
  }

 private:
  __device__ __forceinline__ static const std::byte* input(const LatencyCombineParameters& p,
                                                           int row) {
    return p.rows +
           static_cast<std::size_t>(row) * static_cast<std::size_t>(p.view.hidden) * sizeof(T);
  }
  /// Whole warp: to the row at to().
  template <class To>
  __device__ __forceinline__ static void put(const LatencyView& v, const To& to, int channel,
                                             const uint4* vectors) {
    Codes codes;
    codes.template encode<T>(vectors);
    if (channel >= static_cast<int>(v.hidden)) return;
    codes.store(to(), v.layout.encoded, channel);
  }
};

/// One call on one warp; somebody may ask how long it waits.
template <class T, class Codes, bool kPerSlot>
class EncodedCombiner : public CombineWaits<kPerSlot, true, kOddTag<Codes, kPerSlot>> {
  using Waits = CombineWaits<kPerSlot, true, kOddTag<Codes, kPerSlot>>;
  using Waits::at_, Waits::call_, Waits::p_, Waits::parts_;
  using Waits::kMaskWords;
  using Row = EncodedRow<T, Codes, kPerSlot>;

 public:
  using Waits::Waits;

  /// False: the group has failed.
  __device__ bool send() {
    const LatencyView& v = p_.view;
    const SendWalk walk(v, call_);
    for (int unit = walk.first; unit < walk.end; unit += walk.step) {
      SentRow sent;
      if (!walk.find(v, call_, unit, sent)) continue;
      const std::size_t entry = slot_entry(v, sent.source, sent.token);
      const bool slot = static_cast<int>(threadIdx.x % 32) < v.topk;
      const std::int32_t row = slot ? __ldg(p_.slots + entry) : -1;
      const std::uint32_t lanes = __ballot_sync(kAllLanes, row >= 0);
      if (lanes == 0) continue;
      float weight = 0;
      if constexpr (!kPerSlot) {
        if (p_.slot_weights != nullptr) {
          if (row >= 0) weight = __ldg(p_.slot_weights + entry);
        } else if (!poll_weights(at_, sent.source, sent.token, row, kPollsForFirst, weight)) {
          return send_rest<Row>(p_, call_, unit);
        }
      }
      Row::send(p_, at_, call_, sent, row, weight, lanes);
    }
    return true;
  }

  /// As Combiner::receive.
  __device__ bool receive() {
    const LatencyView& v = p_.view;
    const int warps = this->blocks() * kLatencyWarps,
              most = max(1, here_and_now(parts_.channels) / kStepChannels);
    const int shares = max(1, min(most, warps / max(1, p_.tokens * v.parts)));
    const int warp = kLatencyWarps - 1 - static_cast<int>(threadIdx.x / 32);
    for (int unit = warp * this->blocks() + this->block(); unit < p_.tokens * v.parts * shares;
         unit += warps) {
      const int whole = unit / shares, share = unit - whole * shares;
      const int token = whole / v.parts, part = whole - token * v.parts;
      std::uint32_t* here = call_.here[threadIdx.x / 32];
      if (!this->await_part(token, part, here)) return false;
      const int begin = parts_.begin(part), end = parts_.end(v, part);
      const int steps = (end - begin + kStepChannels - 1) / kStepChannels;
      const int each = (steps + here_and_now(shares) - 1) / shares * kStepChannels;
      const int last = min(end, begin + (share + 1) * each);
      for (int step = begin + share * each; step < last; step += kStepChannels) {
        sum_channels(token, step + static_cast<int>(threadIdx.x % 32) * kLaneChannels, here);
      }
    }
    return true;
  }

 private:
  /// Rows that are loaded at once: as many as the registers hold.
  static constexpr int kAtOnce = kPerSlot && Codes::kFormat == CombineFormat::e4m3 ? 2 : 1;

  /// Whole warp: the sum of what is here, in ascending order, rounded once.
  __device__ void sum_channels(int token, int channel, const std::uint32_t* here) {
    const LatencyView& v = p_.view;
    const int lane = static_cast<int>(threadIdx.x % 32), hidden = static_cast<int>(v.hidden);
    const float weight =
        kPerSlot && lane < p_.topk ? __ldg(p_.weights + token * p_.topk + lane) : 0.0f;
    const std::uint32_t beyond = this->slots_beyond(token);
    float acc[kLaneChannels] = {};
#pragma unroll
    for (int w = 0; w < kMaskWords; ++w) {
      std::uint32_t left = here[w];
#pragma unroll 1
      while (left != 0) {
        Codes codes[kAtOnce];
        float factors[kAtOnce] = {};
        int count = 0;
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
          if (left == 0) continue;
          const int bit = __ffs(static_cast<int>(left)) - 1;
          left &= left - 1;
          count = n + 1;
          if constexpr (kPerSlot) factors[n] = __shfl_sync(kAllLanes, weight, bit);
          if (channel >= hidden) continue;
          const int row = w * 32 + bit;
          std::byte* memory = kPerSlot ? this->memory_of(bit, beyond) : v.sources[row];
          codes[n].load(at_.encoded_sum(memory, row, token), v.layout.encoded, channel);
        }
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
          if (n >= count || channel >= hidden) continue;
          codes[n].decode([&](int i, float value) {
            acc[i] = accumulate<kPerSlot>(acc[i], value, factors[n]);
          });
        }
      }
    }
    std::byte* to =
        p_.out + static_cast<std::size_t>(token) * static_cast<std::size_t>(hidden) * sizeof(T);
#pragma unroll
    for (int i = 0; i < kHeldVectors<T>; ++i) {
      const int first = channel + i * kPerVector<T>;
      if (first >= hidden) continue;
      *reinterpret_cast<uint4*>(to + static_cast<std::size_t>(first) * sizeof(T)) =
          round_vector<T>(acc + i * kPerVector<T>);
    }
  }
};

}  // namespace ferry::cuda::device

// Latency dispatch, the receiving half of rows that carry their generation: one warp takes 512
// bytes of a row, which are what its lanes hold at once.
#pragma once
#include "cuda/kernels/latency_receive.cuh"

namespace ferry::cuda::device {

template <class T, bool kQuantized, bool kRanked>
struct FewReceiver {
  const LatencyDispatchParameters& p;
  const LatencyPlaces& at;
  LatencyCall& call;
  const Arrivals& arrivals;
  static constexpr int kScales = kQuantized ? kSliceBytes / 128 : 0;  ///< of a slice

  /// `most`: tokens of a source. False: the group has failed.
  __device__ bool receive(int most) {
    const LatencyView& v = p.view;
    const int ranks = v.group.ranks, blocks = static_cast<int>(gridDim.x);
    const int slices = (row_bytes() + kSliceBytes - 1) / kSliceBytes;
    const int warp = kLatencyWarps - 1 - static_cast<int>(threadIdx.x / 32);
#pragma unroll 1
    for (int unit = warp * blocks + static_cast<int>(blockIdx.x); unit < most * ranks * slices;
         unit += blocks * kLatencyWarps) {
      const int row = unit / slices, slice = unit - row * slices;
      const int token = row / ranks, source = row - token * ranks;
      const int tokens = arrivals.words.tokens(v, source);
      if (token >= tokens || !is_few<T>(v, tokens)) continue;
      if constexpr (kRanked) {
        if (!receive_ranked(source, token, slice)) return false;
      } else {
        if (!receive_slice(source, token, slice)) return false;
      }
    }
    return true;
  }

 private:
  __device__ int row_bytes() const {
    return static_cast<int>(p.view.hidden) * (kQuantized ? 1 : static_cast<int>(sizeof(T)));
  }
  __device__ int scales() const { return static_cast<int>((p.view.hidden + 127) / 128); }

  /// What one lane gets of a slice.
  struct Share {
    uint4 data;
    std::uint32_t scale;
  };
  /// False: not all of it is here.
  __device__ bool look(std::byte* row, int slice, Share& share) const {
    const int lane = static_cast<int>(threadIdx.x % 32), byte = slice * kSliceBytes + lane * 16;
    bool here = true;
    if (byte < row_bytes()) {
      here = load_few(row, static_cast<std::size_t>(byte), at.tag(), share.data);
    }
    if (lane < kScales && slice * kScales + lane < scales()) {
      const std::uint64_t word = load_relaxed(few_scales(at, row) + slice * kScales + lane);
      here = here && is_word_of(word, at.tag());
      share.scale = static_cast<std::uint32_t>(word);
    }
    return here;
  }

  __device__ bool receive_slice(int source, int token, int slice) {
    const LatencyView& v = p.view;
    const int lane = static_cast<int>(threadIdx.x % 32);
    std::byte* own = own_memory(v);
    std::byte* row = few_row(at, own, source, token);
    Share share{};
    bool here = look(row, slice, share);  // early: often it is there
    std::uint32_t word = kNoPlace, weight = 0;
    Came came = Came::here;
    if (lane < v.topk) {
      const std::size_t entry = static_cast<std::size_t>(token * v.topk + lane);
      came = await_word(v, call, at.places(own, source) + entry, at.tag(), source,
                        Stage::latency_rows, word);
      if (came == Came::here && slice == 0 && p.slot_weights != nullptr) {
        came = await_word(v, call, at.header_weights(own, source) + entry, at.tag(), source,
                          Stage::latency_rows, weight);
      }
    }
    if (__any_sync(kAllLanes, came == Came::stop)) return false;
    const bool missing = __any_sync(kAllLanes, came != Came::here) != 0;
    LandingSlot slot;
    const bool good = missing || find_landing(p, at, arrivals, source, word, slot);
    if (!__all_sync(kAllLanes, good)) {
      return fail_latency(v, call, Reason::distrust, Stage::latency_rows, source, {0, 0, token});
    }
    if (slice == 0) note_landing(p, source, token, slot, weight);
    if (missing) call.lost = true;
    const std::uint32_t lanes = __ballot_sync(kAllLanes, slot.row >= 0);
    if (lanes == 0) return true;
    came = await_share(source, row, slice, here, share);
    if (came == Came::stop) return false;
    if (came == Came::missing) call.lost = true;
    if (came == Came::here) store(slice, share, slot, lanes);
    return true;
  }

  __device__ bool receive_ranked(int source, int token, int slice) {
    const int place = land_row(p, call, at.generation, source, token, slice == 0);
    if (place == kLostRow) call.lost = true;
    if (place < 0) return place != kStopped;
    std::byte* row = few_row(at, own_memory(p.view), source, token);
    Share share{};
    const bool here = look(row, slice, share);
    const Came came = await_share(source, row, slice, here, share);
    if (came == Came::stop) return false;
    if (came == Came::missing) call.lost = true;
    if (came == Came::here) store(slice, share, ranked_slot(p.view, source, place), 1);
    return true;
  }

  /// Whole warp; all lanes alike.
  __device__ Came await_share(int source, std::byte* row, int slice, bool here,
                              Share& share) const {
    Patience patience;
    std::uint64_t late = 0;
    Came came = Came::here;
    while (!__all_sync(kAllLanes, here)) {
      came = between_looks(p.view, call, patience, source, Stage::latency_rows, at.tag(), 0);
      late = look_time(call);
      if (__any_sync(kAllLanes, came == Came::stop)) return Came::stop;
      if (__any_sync(kAllLanes, came != Came::here)) {
        came = Came::missing;
        break;
      }
      here = look(row, slice, share);
    }
    if (threadIdx.x % 32 == 0) note_wait(call, source, late);
    return came;
  }

  __device__ void store(int slice, const Share& share, const LandingSlot& slot,
                        std::uint32_t lanes) const {
    const LatencyView& v = p.view;
    const int lane = static_cast<int>(threadIdx.x % 32), byte = slice * kSliceBytes + lane * 16;
    const bool packed = p.format == LatencyFormat::e4m3_packed;
    const std::size_t rows = block_rows<kRanked>(v);
    std::uint32_t scale = share.scale;
    int columns = scales(), column = slice * kScales + lane;
    bool scaled = lane < kScales && column < columns;
    if (kQuantized && packed) {  // a slice has one word
      std::uint32_t all = 0;
#pragma unroll
      for (int i = 0; i < kScales; ++i) {
        const float one = __uint_as_float(__shfl_sync(kAllLanes, share.scale, i));
        if (slice * kScales + i < columns) {
          all |= static_cast<std::uint32_t>(ue8m0_from_scale(one)) << (8 * i);
        }
      }
      scale = all;
      columns = (columns + 3) / 4;
      column = slice;
      scaled = lane == 0;
    }
#pragma unroll 1
    for (std::uint32_t left = lanes; left != 0; left &= left - 1) {
      const int k = __ffs(static_cast<int>(left)) - 1;
      const auto to = static_cast<std::size_t>(__shfl_sync(kAllLanes, slot.row, k));
      const auto expert = static_cast<std::size_t>(__shfl_sync(kAllLanes, slot.expert, k));
      const auto place = static_cast<std::size_t>(__shfl_sync(kAllLanes, slot.place, k));
      if (byte < row_bytes()) {
        std::byte* out = p.out + to * static_cast<std::size_t>(row_bytes());
        *reinterpret_cast<uint4*>(out + byte) = share.data;
      }
      if (scaled) {
        const std::size_t index =
            expert * static_cast<std::size_t>(columns) + static_cast<std::size_t>(column);
        static_cast<std::uint32_t*>(p.scales)[index * rows + place] = scale;
      }
    }
  }
};

}  // namespace ferry::cuda::device

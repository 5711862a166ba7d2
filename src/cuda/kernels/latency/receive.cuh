// Latency dispatch, the receiving half: the headers tell where every row goes while the rows are in
// flight; then one warp takes one part, or one piece, of one row to each of its experts. Simple
// rows come in parts, each behind a tag (PartReceiver); LL and LL128 rows in pieces that carry
// their generation (PieceReceiver). The formats are in row_*.cuh.
#pragma once
#include "core/number/ue8m0.hpp"
#include "cuda/kernels/latency/expert_major.cuh"
#include "cuda/kernels/latency/rank_major.cuh"
#include "cuda/kernels/latency/row_ll.cuh"
#include "cuda/kernels/latency/row_ll128.cuh"
#include "cuda/kernels/latency/row_simple.cuh"
#include "cuda/kernels/latency/sending_blocks.hpp"
#include "cuda/kernels/latency/shares.cuh"

namespace ferry::cuda::device {

/// What a lane was told of its slot of a row, or why it was not.
struct ToldSlot {
  WaitStatus came;
  std::uint32_t word;    ///< kNoPlace: the slot is not of this rank
  std::uint32_t weight;  ///< its bits
};

/// What receivers of rows have in common, however the rows cross.
struct Receiver {
  const LatencyDispatchParameters& p;
  const LatencyPlaces& at;
  LatencyCall& call;
  const Arrivals& arrivals;

  /// Whole warp: where a row goes. `notes`: it is remembered. False: the group has failed.
  __device__ __forceinline__ bool land(int source, int token, const ToldSlot& told, bool notes,
                                       LandingSlot& slot) const {
    if (__any_sync(kAllLanes, told.came == WaitStatus::stop)) return false;
    const bool missing = __any_sync(kAllLanes, told.came != WaitStatus::here) != 0;
    const bool good = missing || find_landing(p, at, arrivals, source, told.word, slot);
    if (!__all_sync(kAllLanes, good)) {
      return fail_latency(p.view, call, Reason::violation, Stage::latency_rows, source,
                          {0, 0, token});
    }
    if (notes) note_landing(p, source, token, slot, told.weight);
    if (missing) call.lost = true;
    return true;
  }
};

/// The receiving half on one warp, of Simple rows: part by part.
template <class T, bool kQuantized, bool kRanked>
struct PartReceiver : Receiver {
  /// `most`: tokens of a source. False: the group has failed.
  __device__ bool receive(int most) {
    const LatencyView& v = p.view;
    const int ranks = v.group.ranks, blocks = static_cast<int>(gridDim.x);
    const int group = parts_at_once(most * ranks, v.parts, blocks * kLatencyWarps);
    const int units = (v.parts + group - 1) / group;
    // The other end of the block than the senders': who has not sent receives first.
    const int warp = kLatencyWarps - 1 - static_cast<int>(threadIdx.x / 32);
#pragma unroll 1
    for (int unit = warp * blocks + static_cast<int>(blockIdx.x); unit < most * ranks * units;
         unit += blocks * kLatencyWarps) {
      const int row = unit / units, first = (unit - row * units) * group;
      const int token = row / ranks, source = row - token * ranks;
      const int tokens = arrivals.words.tokens(v, source);
      if (token >= tokens || is_ll<T>(v, tokens)) continue;
      const int last = min(first + group, v.parts) - 1;
      if constexpr (kRanked) {
        if (!receive_ranked(source, token, first, last)) return false;
      } else {
        if (!receive_parts(source, token, first, last)) return false;
      }
    }
    return true;
  }

 private:
  __device__ bool receive_parts(int source, int token, int first, int last) {
    const LatencyView& v = p.view;
    const int lane = static_cast<int>(threadIdx.x % 32);
    std::byte* own = v.sources[source];
    // Asked for early: usually the place is there, and often the tag.
    const std::uint32_t* tag = at.row_tags(own, source, token) + first + lane;
    bool here = first + lane > last;
    std::uint32_t word = kNoPlace, weight = 0;
    WaitStatus came = WaitStatus::here;
    if (lane < v.topk) {
      const std::uint64_t* place = at.places(own, source) + token * v.topk + lane;
      const std::uint64_t now = load_relaxed(place);
      if (!here) here = load_acquire(tag) == at.tag();
      word = static_cast<std::uint32_t>(now);
      if (!is_word_of(now, at.tag())) {
        came = await_word(v, call, place, at.tag(), source, Stage::latency_rows, word);
      }
      if (came == WaitStatus::here && first == 0 && p.slot_weights != nullptr) {
        came = await_word(v, call, at.header_weights(own, source) + token * v.topk + lane, at.tag(),
                          source, Stage::latency_rows, weight);
      }
    }
    LandingSlot slot;
    if (!land(source, token, {came, word, weight}, first == 0, slot)) return false;
    const std::uint32_t lanes = slot.lanes();
    if (lanes == 0) return true;
    if (!here) came = await_tag<true>(v, call, tag, at.tag(), source, Stage::latency_rows);
    if (__any_sync(kAllLanes, came == WaitStatus::stop)) return false;
    if (__any_sync(kAllLanes, came != WaitStatus::here)) {
      call.lost = true;
      return true;
    }
    __syncwarp();  // all lanes read what some have waited for
    Simple<T, kQuantized>::template copy<kRanked>(p, at.row(v.sources[source], source, token),
                                                  first, last, slot, lanes);
    return true;
  }

  __device__ bool receive_ranked(int source, int token, int first, int last) {
    const LatencyView& v = p.view;
    const int row = land_row(p, call, at.generation, source, token, first == 0);
    if (row == kLostRow) call.lost = true;
    if (row < 0) return row != kStopped;
    const int part = first + static_cast<int>(threadIdx.x % 32);
    WaitStatus came = WaitStatus::here;
    if (part <= last) {
      const std::uint32_t* tag = at.row_tags(v.sources[source], source, token) + part;
      came = await_tag<true>(v, call, tag, at.tag(), source, Stage::latency_rows);
    }
    if (__any_sync(kAllLanes, came == WaitStatus::stop)) return false;
    if (__any_sync(kAllLanes, came != WaitStatus::here)) {
      call.lost = true;
      return true;
    }
    __syncwarp();  // all lanes read what some have waited for
    Simple<T, kQuantized>::template copy<kRanked>(p, at.row(v.sources[source], source, token),
                                                  first, last, ranked_slot(source, row), 1);
    return true;
  }
};

/// The same of rows that carry their generation (LL, LL128): by pieces, each of which the lanes of
/// a warp hold at once.
template <class Format, bool kRanked>
struct PieceReceiver : Receiver {
  const SendingBlocks& only;  ///< the other blocks receive
  using Piece = typename Format::Piece;
  static constexpr int kScales = Format::kQuantized ? Format::kBytes / 128 : 0;  ///< of a piece

  /// `most`: tokens of a source. False: the group has failed.
  __device__ bool receive(int most) {
    const LatencyView& v = p.view;
    const int ranks = v.group.ranks;
    const int pieces = (row_bytes() + Format::kBytes - 1) / Format::kBytes;
    const BlockShare share = only.receiver(static_cast<int>(blockIdx.x));
    const int warp = kLatencyWarps - 1 - static_cast<int>(threadIdx.x / 32);
#pragma unroll 1
    for (int unit = warp * share.blocks + share.index; unit < most * ranks * pieces;
         unit += only.receiving() * kLatencyWarps) {
      const int row = unit / pieces, number = unit - row * pieces;
      const int token = row / ranks, source = row - token * ranks;
      const int tokens = arrivals.words.tokens(v, source);
      if (token >= tokens || !Format::serves(v, tokens)) continue;
      if constexpr (kRanked) {
        if (!receive_ranked(source, token, number)) return false;
      } else {
        if (!receive_piece(source, token, number)) return false;
      }
    }
    return true;
  }

 private:
  __device__ int row_bytes() const {
    return static_cast<int>(p.view.hidden) * Format::kChannelBytes;
  }
  __device__ int scales() const { return static_cast<int>((p.view.hidden + 127) / 128); }
  /// Of the row, from a piece on.
  __device__ int bytes_from(int piece) const { return row_bytes() - piece * Format::kBytes; }

  __device__ bool receive_piece(int source, int token, int number) {
    const LatencyView& v = p.view;
    const int lane = static_cast<int>(threadIdx.x % 32);
    std::byte* own = own_memory(v);
    std::byte* row = Format::row(at, own, source, token);
    Piece piece;
    // All is asked for at once: usually it is there.
    const std::size_t entry = static_cast<std::size_t>(token * v.topk + lane);
    const bool weighs = lane < v.topk && number == 0 && p.slot_weights != nullptr;
    std::uint64_t place = 0, told = 0;
    if (lane < v.topk) place = load_relaxed(at.places(own, source) + entry);
    if (weighs) told = load_relaxed(at.header_weights(own, source) + entry);
    constexpr bool kPolled = Format::kPollsEarly;
    const bool here = kPolled && piece.poll(at, row, number, bytes_from(number));
    auto word = lane < v.topk ? static_cast<std::uint32_t>(place) : kNoPlace;
    auto weight = static_cast<std::uint32_t>(told);
    WaitStatus came = WaitStatus::here;
    if (lane < v.topk && !is_word_of(place, at.tag())) {
      came = await_word(v, call, at.places(own, source) + entry, at.tag(), source,
                        Stage::latency_rows, word);
    }
    if (weighs && came == WaitStatus::here && !is_word_of(told, at.tag())) {
      came = await_word(v, call, at.header_weights(own, source) + entry, at.tag(), source,
                        Stage::latency_rows, weight);
    }
    if (came != WaitStatus::here) weight = 0;
    LandingSlot slot;
    if (!land(source, token, {came, word, weight}, number == 0, slot)) return false;
    const std::uint32_t lanes = slot.lanes();
    return lanes == 0 || finish(source, row, number, kPolled, here, piece, slot, lanes);
  }

  __device__ bool receive_ranked(int source, int token, int number) {
    const int place = land_row(p, call, at.generation, source, token, number == 0);
    if (place == kLostRow) call.lost = true;
    if (place < 0) return place != kStopped;
    std::byte* row = Format::row(at, own_memory(p.view), source, token);
    Piece piece;
    return finish(source, row, number, false, false, piece, ranked_slot(source, place), 1);
  }

  /// Waits for the piece and stores it. `polled`: once, and this lane's share was `here`.
  __device__ __forceinline__ bool finish(int source, std::byte* row, int number, bool polled,
                                         bool here, Piece& piece, const LandingSlot& slot,
                                         std::uint32_t lanes) {
    const WaitStatus came = await_piece(source, row, number, polled, here, piece);
    if (came == WaitStatus::stop) return false;
    if (came == WaitStatus::missing) call.lost = true;
    if (came != WaitStatus::here) return true;
    piece.open();
    store(number, piece, slot, lanes);
    return true;
  }

  /// Whole warp; all lanes alike.
  __device__ __forceinline__ WaitStatus await_piece(int source, std::byte* row, int number,
                                                    bool polled, bool here, Piece& piece) const {
    SpinDeadline spin_deadline;
    std::uint64_t late = 0;
    WaitStatus came = WaitStatus::here;
#pragma unroll 1
    for (;; polled = false) {
      if (!polled) here = piece.poll(at, row, number, bytes_from(number));
      if (__all_sync(kAllLanes, here)) break;
      came = between_polls(p.view, call, spin_deadline, source, Stage::latency_rows, at.tag(), 0);
      late = poll_time(call);
      if (__any_sync(kAllLanes, came == WaitStatus::stop)) return WaitStatus::stop;
      if (__any_sync(kAllLanes, came != WaitStatus::here)) {
        came = WaitStatus::missing;
        break;
      }
    }
    if (threadIdx.x % 32 == 0) note_wait(call, source, late);
    return came;
  }

  __device__ void store(int number, const Piece& piece, const LandingSlot& slot,
                        std::uint32_t lanes) const {
    const LatencyView& v = p.view;
    const int lane = static_cast<int>(threadIdx.x % 32), byte = number * Format::kBytes + lane * 16;
    const bool packed = p.format == LatencyFormat::e4m3_packed;
    const int rows = block_rows<kRanked>(v);
    std::uint32_t scale = piece.scale;
    int columns = scales(), column = number * kScales + lane;
    bool scaled = lane < kScales && column < columns;
    if (Format::kQuantized && packed) {
      constexpr int kWords = Format::kQuantized ? kScales / 4 : 1;
      const int own = lane % kWords;
      std::uint32_t all = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float one = __uint_as_float(__shfl_sync(kAllLanes, piece.scale, own * 4 + i));
        if (number * kScales + own * 4 + i < columns) {
          all |= static_cast<std::uint32_t>(ue8m0_from_scale(one)) << (8 * i);
        }
      }
      scale = all;
      columns = (columns + 3) / 4;
      column = number * kWords + lane;
      scaled = lane < kWords && column < columns;
    }
#pragma unroll 1
    for (std::uint32_t left = lanes; left != 0; left &= left - 1) {
      const int k = __ffs(static_cast<int>(left)) - 1;
      const int block = __shfl_sync(kAllLanes, slot.block, k);
      const int place = __shfl_sync(kAllLanes, slot.place, k);
      std::byte* out = p.out + static_cast<std::size_t>(block * rows + place) *
                                   static_cast<std::size_t>(row_bytes());
#pragma unroll
      for (int i = 0; i < Format::kVectors; ++i) {
        const int at_byte = byte + i * kWarpBytes;
        if (at_byte < row_bytes()) *reinterpret_cast<uint4*>(out + at_byte) = piece.vectors[i];
      }
      if constexpr (Format::kQuantized) {
        if (scaled) {
          const auto index = static_cast<std::size_t>(block * columns + column);
          static_cast<std::uint32_t*>(
              p.scales)[index * static_cast<std::size_t>(rows) + static_cast<std::size_t>(place)] =
              scale;
        }
      }
    }
  }
};

}  // namespace ferry::cuda::device

// Latency dispatch, the receiving half of rows that carry their generation, as LL or LL128:
// one warp takes pieces of a row, each of which its lanes hold at once.
#pragma once
#include "cuda/kernels/latency/receive.cuh"
#include "cuda/kernels/latency/row_ll128.cuh"

namespace ferry::cuda::device {

/// LL, of few tokens: pieces of 512 bytes.
template <class T, bool kWithScales>
struct LL {
  static constexpr bool kQuantized = kWithScales;
  static constexpr int kChannelBytes = kQuantized ? 1 : static_cast<int>(sizeof(T));
  static constexpr int kVectors = 1, kBytes = kSliceBytes;
  static constexpr bool kPollsEarly = true;

  __device__ static bool serves(const LatencyView& v, int tokens) { return is_ll<T>(v, tokens); }
  __device__ static std::byte* row(const LatencyPlaces& at, std::byte* own, int source, int token) {
    return ll_row(at, own, source, token);
  }

  /// What one lane gets of a piece.
  struct Piece {
    uint4 vectors[kVectors];
    std::uint32_t scale;

    /// `bytes`: of the row from here on. False: not all of it is here.
    __device__ bool poll(const LatencyPlaces& at, std::byte* row, int number, int bytes) {
      constexpr int kScales = kQuantized ? kBytes / 128 : 0;
      const int lane = static_cast<int>(threadIdx.x % 32);
      bool here = true;
      if (lane * 16 < bytes) {
        here = load_ll(row, static_cast<std::size_t>(number * kBytes + lane * 16), at.tag(),
                       vectors[0]);
      }
      if (lane < kScales && lane * 128 < bytes) {
        const std::uint64_t word = load_relaxed(ll_scales(at, row) + number * kScales + lane);
        here = here && is_word_of(word, at.tag());
        scale = static_cast<std::uint32_t>(word);
      }
      return here;
    }
    __device__ void open() {}
  };
};

/// LL128, of more tokens: pieces of kPartChannels channels.
template <class T, bool kWithScales>
struct LL128 {
  static constexpr bool kQuantized = kWithScales;
  static constexpr int kChannelBytes = kQuantized ? 1 : static_cast<int>(sizeof(T));
  static constexpr int kVectors = kWireVectors<T, kQuantized>, kBytes = kVectors * kSliceBytes;
  static constexpr bool kPollsEarly = kQuantized;  // else there are no registers for it

  __device__ static bool serves(const LatencyView& v, int tokens) { return !is_ll<T>(v, tokens); }
  __device__ static std::byte* row(const LatencyPlaces& at, std::byte* own, int source, int token) {
    return at.row(own, source, token);
  }

  struct Piece {
    uint4 vectors[kVectors];
    uint4 behind;
    std::uint32_t scale;

    __device__ bool poll(const LatencyPlaces& at, std::byte* row, int number, int bytes) {
      return load_ll128<kVectors>(row + number * ll128_piece_bytes(kVectors), bytes, at.tag(),
                                  vectors, behind);
    }
    /// When all of it is here.
    __device__ void open() { scale = __float_as_uint(unpack_ll128<kVectors>(vectors, behind)); }
  };
};

template <class Format, bool kRanked>
struct LLReceiver : Receiver {
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
        const int at_byte = byte + i * kSliceBytes;
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

// Latency dispatch, the sending half: one warp takes one part of one token, quantises it if asked
// to, stores it into the slot of every destination, and announces it there if it is Simple.
#pragma once
#include "cuda/kernels/latency/header.cuh"
#include "cuda/kernels/latency/quantize.cuh"
#include "cuda/kernels/latency/row_ll.cuh"
#include "cuda/kernels/latency/row_ll128.cuh"
#include "cuda/kernels/latency/shares.cuh"

namespace ferry::cuda::device {

/// The destination of this lane's slot; −1: none.
__device__ __forceinline__ int lane_destination(const LatencyDispatchParameters& p,
                                                const RankFinder& ranks, int token) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  return ranks.rank_of(route_id(p, token, lane));
}
/// The lane of the first slot of each destination keeps it.
__device__ __forceinline__ int keep_first(int destination) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::uint32_t same = __match_any_sync(kAllLanes, destination);
  return (same & ((1u << lane) - 1)) == 0 ? destination : -1;
}

/// Vectors that a lane holds at once: those of kPartChannels channels.
template <class T>
inline constexpr int kLaneVectors = 2 * static_cast<int>(sizeof(T));

/// What a lane loads of kPartChannels channels from `begin` on; zeros past the end of the row.
template <class T, bool kQuantized>
__device__ __forceinline__ void load_piece(const std::byte* row, int begin, int end,
                                           uint4* vectors) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  constexpr int kEach = 16 / static_cast<int>(sizeof(T));  // channels of a vector
#pragma unroll
  for (int i = 0; i < kLaneVectors<T>; ++i) {
    constexpr int kStep = static_cast<int>(sizeof(T));  // vectors of a lane in one step
    const int channel =
        kQuantized ? begin + i / kStep * kStepChannels + lane * kLaneChannels + i % kStep * kEach
                   : begin + (i * 32 + lane) * kEach;
    vectors[i] = uint4{0, 0, 0, 0};
    if (channel < end) {
      vectors[i] = __ldg(
          reinterpret_cast<const uint4*>(row + static_cast<std::size_t>(channel) * sizeof(T)));
    }
  }
}

/// Vectors of a lane's share of a piece, as it crosses.
template <class T, bool kQuantized>
inline constexpr int kWireVectors = kQuantized ? 2 : kLaneVectors<T>;

/// The byte of a row at which vector `i` of this lane's share of a piece lies, which begins at
/// channel `begin`; of codes or of elements.
template <class T, bool kQuantized>
__device__ __forceinline__ std::size_t wire_byte(int begin, int i) {
  const auto channels = static_cast<std::size_t>(begin);
  const auto vector = static_cast<std::size_t>(i * 32) + threadIdx.x % 32;
  return channels * (kQuantized ? 1 : sizeof(T)) + vector * 16;
}

/// A lane's share of a piece, as it crosses.
template <class T, bool kQuantized>
struct WirePiece {
  static constexpr int kCount = kWireVectors<T, kQuantized>;
  uint4 vectors[kCount];
  float scale = 0;  ///< of the piece's block number `lane`

  __device__ __forceinline__ explicit WirePiece(const uint4* loaded, bool round_scale) {
    if constexpr (kQuantized) {
      float scales[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        vectors[i] =
            quantize_lane<T>(loaded + i * static_cast<int>(sizeof(T)), round_scale, scales[i]);
        scales[i] = __shfl_sync(kAllLanes, scales[i], static_cast<int>(threadIdx.x % 4) * 8);
      }
      scale = threadIdx.x % 8 < 4 ? scales[0] : scales[1];
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) vectors[i] = loaded[i];
    }
  }

  __device__ __forceinline__ void store(std::byte* slot, std::size_t scale_at, int begin,
                                        int end) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    if constexpr (kQuantized) {
      const int block = begin / 128 + lane;
      if (lane < 8 && block * 128 < end) {
        reinterpret_cast<float*>(slot + scale_at)[block] = scale;
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (kQuantized) {
        const int channel = begin + i * kStepChannels + lane * kLaneChannels;
        if (channel < end) *reinterpret_cast<uint4*>(slot + channel) = vectors[i];
      } else {
        constexpr int kEach = 16 / static_cast<int>(sizeof(T));
        const int channel = begin + (i * 32 + lane) * kEach;
        if (channel < end) {
          *reinterpret_cast<uint4*>(slot + static_cast<std::size_t>(channel) * sizeof(T)) =
              vectors[i];
        }
      }
    }
  }

  /// The same as LL128, which this piece is packed into.
  __device__ __forceinline__ uint4 pack_ll128(std::uint32_t tag) {
    return device::pack_ll128<kCount>(vectors, scale, tag);
  }
  __device__ __forceinline__ void store_ll128(std::byte* row, const uint4& behind, int begin,
                                              int end) const {
    constexpr int kBytes = kQuantized ? 1 : static_cast<int>(sizeof(T));
    device::store_ll128<kCount>(row + begin / kPartChannels * ll128_piece_bytes(kCount),
                                (end - begin) * kBytes, vectors, behind);
  }

  /// The same with the generation beside the data.
  __device__ __forceinline__ void store_ll(const LatencyPlaces& at, std::byte* row, int begin,
                                           int end) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    if constexpr (kQuantized) {
      const int block = begin / 128 + lane;
      if (lane < 8 && block * 128 < end) {
        store_word(ll_scales(at, row) + block, __float_as_uint(scale), at.tag());
      }
    }
    const std::size_t last = static_cast<std::size_t>(end) * (kQuantized ? 1 : sizeof(T));
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const std::size_t byte = wire_byte<T, kQuantized>(begin, i);
      if (byte < last) device::store_ll(row, byte, vectors[i], at.tag());
    }
  }
};

/// The sending half, and what it has loaded before the call's number is known.
template <class T, bool kQuantized, bool kLL128>
class RowSender {
 public:
  __device__ RowSender(const LatencyDispatchParameters& p, const RankFinder& ranks,
                       const SendShape& shape, int block)
      : p_(p),
        ranks_(ranks),
        shape_(shape),
        walk_(shape.number_of(block), shape.blocks, shape.warps),
        unit_(walk_.first) {
    const bool sends =
        shape.number_of(block) < shape.blocks && static_cast<int>(threadIdx.x / 32) < shape.warps;
    if (!sends) unit_ = shape.all;
    load();
  }

  /// `open` [R]: the receivers that take part.
  __device__ void send(const LatencyPlaces& at, const bool* open) {
    const LatencyView& v = p_.view;
    const bool ll = is_ll<T>(v, p_.tokens);
#pragma unroll 1
    while (unit_ < shape_.all) {
      const int token = unit_ / shape_.units, first = (unit_ - token * shape_.units) * shape_.group;
      const int last = min(first + shape_.group, v.parts) - 1;
      const int dest = keep_first(destination_ >= 0 && open[destination_] ? destination_ : -1);
      const std::uint32_t lanes = __ballot_sync(kAllLanes, dest >= 0);
      const int begin = shape_.parts.begin(first), end = shape_.parts.end(v, last);
#pragma unroll 1
      for (int piece = begin; piece < end; piece += kPartChannels) {
        if (piece != begin) load_piece<T, kQuantized>(row(token), piece, end, loaded_);
        WirePiece<T, kQuantized> wire(loaded_, p_.format != LatencyFormat::e4m3);
        uint4 behind;
        if constexpr (kLL128) {
          if (!ll) behind = wire.pack_ll128(at.tag());
        }
        // Tokens begin with different destinations, so that no link waits for another.
        std::uint32_t left = lanes;
#pragma unroll 1
        while (left != 0) {
          const std::uint32_t high = left & (kAllLanes << (token % 8));
          const int from = __ffs(static_cast<int>(high != 0 ? high : left)) - 1;
          left &= ~(1u << from);
          const int peer = __shfl_sync(kAllLanes, dest, from);
          if (ll) {
            wire.store_ll(at, ll_row(at, v.peers[peer], v.line[peer], token), piece, end);
          } else {
            std::byte* row = v.rows[peer] + at.slot(0, token) * v.layout.row_slot;
            if constexpr (kLL128) {
              wire.store_ll128(row, behind, piece, end);
            } else {
              wire.store(row, v.layout.scale_at, piece, end);
            }
          }
        }
      }
      __syncwarp();
      if (!kLL128 && dest >= 0 && !ll) {
        std::uint32_t* tags = at.row_tags(v.peers[dest], v.line[dest], token);
        fence_system();
#pragma unroll 1
        for (int part = first; part <= last; ++part) store_relaxed(tags + part, at.tag());
      }
      unit_ += walk_.step;
      load();
    }
  }

 private:
  __device__ const std::byte* row(int token) const {
    return p_.x +
           static_cast<std::size_t>(token) * static_cast<std::size_t>(p_.view.hidden) * sizeof(T);
  }
  __device__ void load() {
    if (unit_ >= shape_.all) return;
    const int token = unit_ / shape_.units, first = (unit_ - token * shape_.units) * shape_.group;
    const int last = min(first + shape_.group, p_.view.parts) - 1;
    destination_ = lane_destination(p_, ranks_, token);
    load_piece<T, kQuantized>(row(token), shape_.parts.begin(first),
                              shape_.parts.end(p_.view, last), loaded_);
  }

  const LatencyDispatchParameters& p_;
  const RankFinder& ranks_;
  const SendShape& shape_;
  UnitWalk walk_;
  int unit_;
  int destination_ = -1;
  uint4 loaded_[kLaneVectors<T>];
};

}  // namespace ferry::cuda::device

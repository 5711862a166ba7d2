// Latency dispatch, the sending half: one warp takes one part of one token, quantises it if asked
// to, and stores it into the slot of every destination, in the row format of the call (row.cuh).
#pragma once
#include "cuda/kernels/latency/header.cuh"
#include "cuda/kernels/latency/kernels.hpp"
#include "cuda/kernels/latency/row_ll.cuh"
#include "cuda/kernels/latency/row_ll128.cuh"
#include "cuda/kernels/latency/row_simple.cuh"
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
          if (!ll) behind = LL128<T, kQuantized>::pack(wire, at.tag());
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
            LL<T, kQuantized>::store(at, wire, ll_row(at, v.peers[peer], v.line[peer], token),
                                     piece, end);
          } else {
            std::byte* row = v.rows[peer] + at.slot(0, token) * v.layout.row_slot;
            if constexpr (kLL128) {
              LL128<T, kQuantized>::store(wire, behind, row, piece, end);
            } else {
              Simple<T, kQuantized>::store(wire, row, v.layout.scale_at, piece, end);
            }
          }
        }
      }
      __syncwarp();
      if (!kLL128 && dest >= 0 && !ll) {
        Simple<T, kQuantized>::announce(at, dest, token, first, last);
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

// How the rows of a call are shared out: experts among ranks, parts of rows among blocks and warps.
#pragma once
#include "cuda/kernels/latency/launch_sizes.hpp"
#include "cuda/kernels/latency/sending_blocks.hpp"
#include "cuda/kernels/latency/view.hpp"

namespace ferry::cuda::device {

/// Placement without divisions of 64 bits. A kernel's parameter, for registers are few.
struct RankFinder {
  std::uint32_t block, extra, large, experts;
  explicit RankFinder(const Placement& placement)
      : experts(static_cast<std::uint32_t>(placement.experts)) {
    const auto ranks = static_cast<std::uint32_t>(placement.ranks);
    block = experts / ranks;
    extra = experts - block * ranks;
    large = (block + 1) * extra;
  }
  /// −1 for an id that is no expert.
  __device__ int rank_of(int id) const {
    const auto expert = static_cast<std::uint32_t>(id);
    if (expert >= experts) return -1;
    return static_cast<int>(expert < large ? expert / (block + 1)
                                           : extra + (expert - large) / block);
  }
  __device__ int first_expert(int rank) const {
    return static_cast<int>(block) * rank + min(rank, static_cast<int>(extra));
  }
  __device__ int local_experts(int rank) const {
    return first_expert(rank + 1) - first_expert(rank);
  }
};

/// Of a part: whole kPartChannels but for the row's end.
struct PartShape {
  int channels = 0;  ///< of a part
  __host__ __device__ explicit PartShape(const LatencyView& v) {
    const auto pieces = static_cast<int>((v.hidden + kPartChannels - 1) / kPartChannels);
    channels = (pieces + v.parts - 1) / v.parts * kPartChannels;
  }
  __device__ int begin(int part) const { return part * channels; }
  __device__ int end(const LatencyView& v, int part) const {
    const auto hidden = static_cast<int>(v.hidden);
    return min(hidden, (part + 1) * channels);
  }
};

/// Parts that one warp takes together, so that all warps have something and none much more.
FERRY_FN constexpr int parts_at_once(int rows, int parts, int warps) {
  const int even = (rows * parts + warps - 1) / warps, most = even < parts ? even : parts;
  return most > 1 ? most : 1;
}

/// How the rows of a call are sent. A kernel's parameter, for registers are few.
struct SendShape {
  PartShape parts;
  SendingBlocks only;
  bool apart;  ///< there are blocks enough for those that make headers to send no rows
  int blocks;  ///< that send rows
  int warps;   ///< of a block, at most, from the first on
  int group;   ///< parts that a warp takes together
  int units;   ///< of a token
  int all;     ///< units of the call
  SendShape(const LatencyView& v, int tokens, SendingBlocks sending, int send_warps)
      : parts(v),
        only(sending),
        apart(sending.all > 4 * v.group.ranks),
        blocks(only.of_row > 0 ? only.sending()
               : apart         ? only.all - v.group.ranks
                               : only.all),
        warps(send_warps),
        group(parts_at_once(tokens, v.parts, blocks * warps)),
        units((v.parts + group - 1) / group),
        all(tokens * units) {}

  /// The number of a block among those that send rows; not below `blocks`: it does not.
  __device__ int number_of(int block) const {
    if (only.of_row == 0) return block;
    return only.sends_only(block) ? only.sender(block).index : blocks;
  }
  /// Of a block: the warps that have a unit.
  __device__ int warps_of(int block) const {
    const int number = number_of(block);
    if (number >= blocks) return 0;
    return min(warps, max(0, (all - number + blocks - 1) / blocks));
  }
};

/// Where this warp stands among the units of a call: unit `first`, then every `step`-th. Units of
/// one token lie on different SMs.
struct UnitWalk {
  int first = 0;
  int step = 1;
  __device__ UnitWalk(int block, int blocks, int warps = kLatencyWarps) {
    const int warp = static_cast<int>(threadIdx.x / 32);
    first = warp * blocks + block;
    step = blocks * warps;
  }
};

}  // namespace ferry::cuda::device

// How a dispatch shares its work out: decided on the host, the same for all blocks.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/device.hpp"
#include "core/layout.hpp"

namespace ferry::cuda {

struct PushShape {
  int row_warps = 1;             ///< push rows
  int side_warps = 0;            ///< push routes, weights and scales that do not ride with the rows
  int stages = 2;                ///< of a row warp, in shared memory (bulk copies)
  int pieces = 1;                ///< of a row
  std::int64_t x_row_bytes = 0;  ///< before it is quantised, if it is
  std::uint32_t piece = 0;       ///< bytes of one, a multiple of 16
  std::uint32_t scale_bytes = 0;  ///< of a row's scales that ride with its first piece
  std::uint32_t stage_bytes = 0;
  bool side_scales = false;  ///< scales are pushed by the side warps
  int width = 1;             ///< side warps: lanes that share a row, a power of two
  std::int32_t block = 0;    ///< experts of a rank, at least
  std::int32_t larger = 0;   ///< the first ranks, which hold one more
  std::size_t shared_bytes = 0;

  FERRY_FN std::int32_t first_expert(int rank) const {
    return rank * block + (rank < larger ? rank : larger);
  }
  FERRY_FN std::int32_t local_experts(int rank) const { return block + (rank < larger ? 1 : 0); }
};

/// LocalWords::arrived: tokens that row warps have asked for; 0 between calls.
inline constexpr int kTokenCounter = 1;

/// Where this rank's rows go at one peer: its first row there.
struct PushTarget {
  std::byte* rows;
  float* scales;
  std::int32_t* source_token;
  std::int32_t* ids;
  std::int64_t* wide_ids;
  float* weights;
  std::int32_t first_expert;
  std::int32_t local_experts;
  std::int32_t blocks;  ///< of the peer's dispatch
};

/// Places in dynamic shared memory.
struct PushShared {
  std::size_t targets = 0;   ///< PushTarget [R]
  std::size_t barriers = 0;  ///< u64 [row_warps, stages]
  std::size_t stages = 0;    ///< [row_warps, stages, stage_bytes]
  std::size_t bytes = 0;
};

FERRY_FN constexpr PushShared make_push_shared(int ranks, int row_warps, int stages,
                                               std::uint32_t stage_bytes) {
  const auto count = static_cast<std::size_t>(row_warps) * static_cast<std::size_t>(stages);
  PushShared shared{};
  Carver carver{};
  shared.targets = carver.take(static_cast<std::size_t>(ranks) * sizeof(PushTarget), 16);
  shared.barriers = carver.take(count * 8, 16);
  shared.stages = carver.take(count * stage_bytes);
  shared.bytes = carver.end;
  return shared;
}

}  // namespace ferry::cuda

// How the kernels that sum or fan out rows are cut into pieces, warps and stages. Every
// choice gives the same bits; benchmarks sweep them.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/kernels/throughput/kernels.hpp"

namespace ferry::cuda {

/// Zeros: as fits the row and the device.
struct SumTuning {
  int vectors = 0;     ///< a piece is so many times 512 bytes: one of kPieceVectors
  int warps = 0;       ///< that sum, in a block
  int stages = 0;      ///< pieces in flight for each warp
  bool spread = true;  ///< neighbouring pieces go to different SMs, else to the same one
  int pulls = 0;       ///< that an SM may have in flight
};

/// What is summed, and where.
struct SumTask {
  std::int64_t row_bytes = 0;
  std::int64_t rows = 0;  ///< sums, at most
  int num_sms = 1;
  int beside = 0;  ///< warps of a block that do something else
  int pulls = 0;   ///< as in SumTuning, unless that says
};

/// What becomes of a tuning.
struct SumShape {
  int vectors = 1;
  int warps = 1;
  int stages = 1;
  bool spread = true;
  std::uint32_t pieces = 1;  ///< of a row
  std::uint32_t piece_bytes = 512;
  int shared_bytes = 0;  ///< of a block
};

/// Sizes of pieces that there are kernels for. 7 cuts the rows of 7168 two-byte elements evenly.
inline constexpr int kPieceVectors[] = {1, 2, 4, 7, 8};

/// Most warps of a block: as many as leave each thread the registers that its sums need.
constexpr int most_warps(int vectors) {
  return vectors == 8 ? 12 : 16;
}
/// Those of them that sum weights, where there are any.
inline constexpr int kWeightWarps = 2;

/// How the fan-out is cut; zeros as above.
struct FanOutTuning {
  int piece_bytes = 0;  ///< a multiple of 16
  int stages = 0;       ///< at least 3
  int group_bytes = 0;  ///< beside its dispatch: of rows that a warp takes at a time
};

/// Of a block's shared memory, left to the kernels' own variables.
inline constexpr int kOwnShared = 4096;

/// Pulls that an SM's copy engine may have in flight: with 64 and more, it loses up to two thirds
/// of its speed as soon as they miss the L2 cache (measured on an H200; their length matters
/// little).
inline constexpr int kMostPulls = 48;

/// Of a combine with so many SMs: together they fill the wires long before each has kMostPulls in
/// flight, and more only stand in line there (measured on 4 H200).
int combine_pulls(int num_sms);

cudaError_t make_sum_shape(const SumTuning& tuning, const SumTask& task, SumShape& shape);

/// As in kernels.hpp, cut as the caller says.
cudaError_t launch_combine(const CombineParameters& parameters, cudaStream_t stream,
                           const SumTuning& tuning);
cudaError_t launch_sum_slots(const SumSlotsParameters& parameters, cudaStream_t stream,
                             const SumTuning& tuning);
cudaError_t launch_fan_out(const FanOutParameters& parameters, cudaStream_t stream,
                           const FanOutTuning& tuning);
cudaError_t launch_fan_out_beside(const FanOutParameters& parameters, cudaStream_t stream,
                                  const FanOutTuning& tuning);

/// For load_expert_major_kernels.
cudaError_t load_sum_slots_kernels();

}  // namespace ferry::cuda

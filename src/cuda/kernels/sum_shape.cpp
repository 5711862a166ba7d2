#include "cuda/kernels/sum_shape.hpp"

#include <algorithm>

#include "cuda/kernels/load.hpp"

namespace ferry::cuda {
namespace {

/// The cut that costs a row least. A piece costs a warp as much as 7 vectors before its first
/// vector (measured on an H200), and a short last piece costs as much as a whole one.
int default_vectors(std::int64_t row_bytes, bool bulk_copies) {
  if (row_bytes <= 1024) return row_bytes > 512 ? 2 : 1;
  if (!bulk_copies) return 4;  // two rows in registers
  constexpr std::int64_t kPieceCost = 7;
  int best = 4;
  std::int64_t least = 0;
  for (const int vectors : {4, 7, 8}) {
    const std::int64_t piece_bytes = vectors * 512;
    const std::int64_t pieces = (row_bytes + piece_bytes - 1) / piece_bytes;
    const std::int64_t cost = 1000 * pieces * (vectors + kPieceCost) / most_warps(vectors);
    if (least == 0 || cost < least) {
      least = cost;
      best = vectors;
    }
  }
  return best;
}

}  // namespace

int combine_pulls(int sms) {
  constexpr int kOfAll = 768;  // what 16 SMs have
  return std::clamp(kOfAll / sms, 12, kMostPulls);
}

cudaError_t make_sum_shape(const SumTuning& tuning, std::int64_t row_bytes, int beside, int pulls,
                           SumShape& shape) {
  if (row_bytes <= 0 || row_bytes % 16 != 0) return cudaErrorInvalidValue;
  KernelLimits limits;
  if (const cudaError_t error = kernel_limits(limits); error != cudaSuccess) return error;
  shape.vectors =
      tuning.vectors > 0 ? tuning.vectors : default_vectors(row_bytes, limits.bulk_copies);
  shape.warps = most_warps(shape.vectors) - beside;
  if (tuning.pulls > 0) pulls = tuning.pulls;
  // A warp that has but one stage waits for the whole way of every piece.
  shape.warps = std::min(shape.warps, tuning.warps > 0 ? tuning.warps : std::max(1, pulls / 2));
  shape.spread = tuning.spread;
  shape.piece_bytes = static_cast<std::uint32_t>(shape.vectors) * 512;
  const std::int64_t pieces = (row_bytes + shape.piece_bytes - 1) / shape.piece_bytes;
  shape.pieces = static_cast<std::uint32_t>(pieces);
  if (!limits.bulk_copies) return cudaSuccess;
  const int stage = static_cast<int>(shape.piece_bytes) + 8;  // and its barrier
  const int room = limits.shared_bytes - kOwnShared;
  int most = room / (stage * shape.warps);
  while (most < 2 && shape.warps > 1) most = room / (stage * --shape.warps);
  if (most < 1) return cudaErrorInvalidConfiguration;
  const int wish = std::clamp(pulls / shape.warps, 1, 16);
  shape.stages = std::min(most, tuning.stages > 0 ? tuning.stages : wish);
  shape.shared_bytes = stage * shape.warps * shape.stages;
  return cudaSuccess;
}

}  // namespace ferry::cuda

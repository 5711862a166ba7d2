#include "cuda/kernels/throughput/sum_shape.hpp"

#include <algorithm>

#include "cuda/kernels/base/load.hpp"

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

std::int64_t pieces_of(std::int64_t row_bytes, int vectors) {
  const std::int64_t piece_bytes = vectors * 512;
  return (row_bytes + piece_bytes - 1) / piece_bytes;
}

/// Warps with fewer items than this mostly wait: for their first rows, then for each other.
constexpr std::int64_t kLeastItems = 4;
/// Then shorter pieces for fewer warps are faster, each warp with a whole item under way: the rows
/// of all peers (measured on 4 H200: 128 tokens on 24 SMs, 27.6 instead of 31.2 µs).
constexpr int kFewWarps = 8;
constexpr int kFewStages = 4;

bool has_items(const SumTask& task, int vectors, int warps) {
  return task.rows * pieces_of(task.row_bytes, vectors) >= kLeastItems * task.num_sms * warps;
}

int vectors_for_few(const SumTask& task, int vectors) {
  for (const int fewer : {vectors, 4, 2, 1}) {
    if (fewer <= vectors && has_items(task, fewer, kFewWarps)) return fewer;
  }
  return 1;
}

/// A few warps less, where so many can share the pulls evenly.
int sharing_warps(int warps, int pulls) {
  int best = warps;
  for (int fewer = warps - 1; fewer >= warps * 3 / 4 && fewer > 0; --fewer) {
    if (pulls / fewer * fewer > pulls / best * best) best = fewer;
  }
  return best;
}

}  // namespace

int combine_pulls(int num_sms) {
  if (num_sms < 24) return kMostPulls;
  return num_sms <= 32 ? 24 : std::max(768 / num_sms, 12);
}

cudaError_t make_sum_shape(const SumTuning& tuning, const SumTask& task, SumShape& shape) {
  if (task.row_bytes <= 0 || task.row_bytes % 16 != 0) return cudaErrorInvalidValue;
  KernelLimits limits;
  if (const cudaError_t error = kernel_limits(limits); error != cudaSuccess) return error;
  int pulls = tuning.pulls > 0 ? tuning.pulls : task.pulls;
  shape.vectors = default_vectors(task.row_bytes, limits.bulk_copies);
  const int most_warps_now = most_warps(shape.vectors) - task.beside;
  const bool few =
      limits.bulk_copies && tuning.pulls == 0 && !has_items(task, shape.vectors, most_warps_now);
  if (few) {
    shape.vectors = vectors_for_few(task, shape.vectors);
    pulls = kFewWarps * kFewStages;
  }
  if (tuning.vectors > 0) shape.vectors = tuning.vectors;
  shape.warps = most_warps(shape.vectors) - task.beside;
  if (tuning.warps > 0) {
    shape.warps = std::min(shape.warps, tuning.warps);
  } else {
    // A warp that has but one stage waits for the whole way of every piece.
    shape.warps = std::min(shape.warps, few ? kFewWarps : std::max(1, pulls / 2));
    shape.warps = sharing_warps(shape.warps, pulls);
  }
  shape.spread = tuning.spread;
  shape.piece_bytes = static_cast<std::uint32_t>(shape.vectors) * 512;
  shape.pieces = static_cast<std::uint32_t>(pieces_of(task.row_bytes, shape.vectors));
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

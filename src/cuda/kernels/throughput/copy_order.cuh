// In which order a fan-out beside its dispatch copies the received rows: as they come.
#pragma once
#include "cuda/kernels/throughput/fan_out_place.cuh"

namespace ferry::cuda::device {

/// Groups of rows in the order in which they are copied: each source's rows in slices, slice by
/// slice, for they come so. Shared memory.
struct CopyOrder {
  static constexpr int kMostRanges = 288, kMostSlices = 32;
  std::uint32_t begin[kMostRanges + 1];  ///< groups before a range
  int ranks, slices;
  std::uint32_t group_rows;
  const std::int64_t* offsets;  ///< of each source's rows
  std::int64_t capacity;

  __device__ int ranges() const { return ranks * slices; }
  __device__ std::int64_t first_of(int source) const { return min(offsets[source], capacity); }
  /// Rows of range i, counted from the source's first.
  __device__ RowRange rows_of(int i) const {
    const std::int64_t rows = first_of(i % ranks + 1) - first_of(i % ranks);
    const int slice = i / ranks;
    return {rows * slice / slices, rows * (slice + 1) / slices};
  }
};

struct CopyGroup {
  int source;
  RowRange rows;     ///< of all received rows
  std::int64_t end;  ///< the same end, counted from the source's first row
};

/// Whole block.
__device__ inline void make_copy_order(const FanOutLaunch& launch, CopyOrder& order) {
  const FanOutParameters& p = launch.p;
  if (threadIdx.x == 0) {
    order.ranks = p.group.ranks;
    order.slices = min(CopyOrder::kMostSlices, CopyOrder::kMostRanges / p.group.ranks);
    order.group_rows = launch.group_rows;
    order.offsets = reinterpret_cast<const std::int64_t*>(p.plan.data + p.plan.layout.recv_offset);
    order.capacity = p.capacity;
  }
  __syncthreads();
  std::int64_t before = 0;
  for (int first = 0; first < order.ranges(); first += kFanOutThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    std::int64_t groups = 0, sum;
    if (i < order.ranges()) {
      const RowRange rows = order.rows_of(i);
      groups = (rows.end - rows.begin + order.group_rows - 1) / order.group_rows;
    }
    const std::int64_t begin = before + block_prefix(groups, sum);
    before += sum;
    if (i < order.ranges()) order.begin[i] = static_cast<std::uint32_t>(begin);
  }
  if (threadIdx.x == 0) order.begin[order.ranges()] = static_cast<std::uint32_t>(before);
  __syncthreads();
}

__device__ inline CopyGroup group_at(const CopyOrder& order, std::uint32_t index) {
  int low = 0, high = order.ranges();  // begin[low] <= index < begin[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (order.begin[middle] <= index) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const RowRange rows = order.rows_of(low);
  const int source = low % order.ranks;
  const std::int64_t begin = rows.begin + std::int64_t{index - order.begin[low]} * order.group_rows;
  const std::int64_t end = min(begin + order.group_rows, rows.end), first = order.first_of(source);
  return {source, {first + begin, first + end}, end};
}

}  // namespace ferry::cuda::device

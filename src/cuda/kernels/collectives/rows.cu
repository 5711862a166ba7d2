// Rows that a table in GPU memory names: copies of experts, and their gradients. The rank that has
// a row moves it: it stores copies into the peers' slots, and reads what the slots hold of sums, in
// ascending rank and slot. Nobody but the GPUs knows the table.
#include "cuda/kernels/base/launch.hpp"
#include "cuda/kernels/base/load.hpp"
#include "cuda/kernels/collectives/direct.cuh"

namespace ferry::cuda {
namespace {

using namespace device;

constexpr int kThreads = 256;

/// In shared memory: the entries of the table that name a row of this rank, ascending.
struct OwnEntries {
  std::int32_t at[kMostTableEntries];
  int count;
};

__device__ __forceinline__ int own_row(const RowsParameters& p, int entry) {
  return p.table[entry] - p.base.group.rank * p.rows;
}

/// Whole block. What is no row of any rank is left out.
__device__ void find_entries(const RowsParameters& p, OwnEntries& own) {
  if (thread() < 32) {
    const int all = p.base.group.ranks * p.slots;
    int count = 0;
    for (int first = 0; first < all; first += 32) {
      const int entry = first + thread();
      const int row = entry < all ? own_row(p, entry) : -1;
      const bool mine = row >= 0 && row < p.rows;
      const unsigned mask = __ballot_sync(~0u, mine);
      if (mine) own.at[count + __popc(mask & ((1u << thread()) - 1))] = entry;
      count += __popc(mask);
    }
    if (thread() == 0) own.count = count;
  }
  __syncthreads();
}

__device__ __forceinline__ std::byte* slot_of(const RowsParameters& p, const CollectivePeers& peers,
                                              int entry) {
  const int holder = entry / p.slots;
  return peers.tensor[holder] + (entry - holder * p.slots) * p.row_bytes;
}

/// The ranks behind this one first, so that not all begin with the same.
__device__ void copy_out(const RowsParameters& p, const CollectivePeers& peers,
                         const OwnEntries& own) {
  int first = 0;
  while (first < own.count && own.at[first] / p.slots <= p.base.group.rank) ++first;
#pragma unroll 1
  for (int i = 0; i < own.count; ++i) {
    const int entry = own.at[first + i < own.count ? first + i : first + i - own.count];
    copy_vectors(grid_walk(), p.base.x + own_row(p, entry) * p.row_bytes, slot_of(p, peers, entry),
                 p.row_bytes);
  }
}

/// Adds what the slots of copies hold to a row, from +0 as the host engine. A thread has the same
/// elements in all of them.
__device__ void add_up(const RowsParameters& p, const CollectivePeers& peers, const OwnEntries& own,
                       int from, int row) {
  std::byte* sum = p.base.out + row * p.row_bytes;
  const bool aligned = is_aligned(sum) && p.row_bytes % kVectorBytes == 0;
  whole_then_rest(
      grid_walk(), p.row_bytes, aligned, [&](auto whole, std::int64_t begin, std::int64_t end) {
        constexpr bool kWhole = decltype(whole)::value;
        constexpr int kTogether = kWhole ? 6 : 1, kCount = Reducing<float>::kCount;
        const std::int64_t step = grid_walk().step;
#pragma unroll 1
        for (std::int64_t v = begin; v < end; v += kTogether * step) {
          float sums[kTogether][kCount];
#pragma unroll
          for (int u = 0; u < kTogether; ++u) {
            if (v + u * step < end) {
              Reducing<float>::unpack(load_as<kWhole>(sum, p.row_bytes, v + u * step), sums[u]);
#pragma unroll
              for (int k = 0; k < kCount; ++k) sums[u][k] = __fadd_rn(0.0f, sums[u][k]);
            }
          }
#pragma unroll 1
          for (int i = from; i < own.count; ++i) {
            if (own_row(p, own.at[i]) != row) continue;
            const std::byte* slot = slot_of(p, peers, own.at[i]);
            uint4 next[kTogether];
#pragma unroll
            for (int u = 0; u < kTogether; ++u) {
              next[u] = uint4{0, 0, 0, 0};
              if (v + u * step < end) next[u] = load_as<kWhole>(slot, p.row_bytes, v + u * step);
            }
#pragma unroll
            for (int u = 0; u < kTogether; ++u) {
              float added[kCount];
              Reducing<float>::unpack(next[u], added);
#pragma unroll
              for (int k = 0; k < kCount; ++k) sums[u][k] = __fadd_rn(sums[u][k], added[k]);
            }
          }
#pragma unroll
          for (int u = 0; u < kTogether; ++u) {
            if (v + u * step < end) {
              store_as<kWhole>(sum, p.row_bytes, v + u * step, round_vector<float>(sums[u]));
            }
          }
        }
      });
}

template <bool kAdds>
__global__ void __launch_bounds__(kThreads, 1)
    rows_kernel(const __grid_constant__ RowsParameters p) {
  __shared__ CollectivePeers peers;
  __shared__ OwnEntries own;
  std::uint64_t generation;
  bool direct;
  if (!enter(p.base, peers, generation, direct)) return;
  if (!direct) {  // each rank has looked whether its own tensor is registered
    if (thread() == 0) {
      fail(p.base.group, generation, Reason::violation, p.base.stage, -1, {0, 0, 0});
    }
    return;
  }
  find_entries(p, own);
  if constexpr (kAdds) {
#pragma unroll 1
    for (int i = 0; i < own.count; ++i) {
      const int row = own_row(p, own.at[i]);
      int before = 0;
      while (before < i && own_row(p, own.at[before]) != row) ++before;
      if (before == i) add_up(p, peers, own, i, row);
    }
  } else {
    copy_out(p, peers, own);
  }
  end_direct(p.base, generation);
}

const void* kernel_for(bool adds) {
  return adds ? reinterpret_cast<const void*>(&rows_kernel<true>)
              : reinterpret_cast<const void*>(&rows_kernel<false>);
}

}  // namespace

cudaError_t launch_rows(const RowsParameters& parameters, cudaStream_t stream) {
  const std::int64_t entries = std::int64_t{parameters.base.group.ranks} * parameters.slots;
  if (parameters.base.blocks < 1 || entries > kMostTableEntries) return cudaErrorInvalidValue;
  RowsParameters copy = parameters;
  void* arguments[] = {&copy};
  return launch(kernel_for(parameters.adds),
                {static_cast<unsigned>(parameters.base.blocks), kThreads, 0}, arguments, stream,
                false);
}

cudaError_t load_rows_kernels() {
  for (const bool adds : {false, true}) {
    if (const cudaError_t error = load_kernel(kernel_for(adds), 0); error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

}  // namespace ferry::cuda

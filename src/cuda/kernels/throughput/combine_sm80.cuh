// Sums of rows by 16-byte loads (Ampere, Ada): every warp on its own, two rows in flight.
#pragma once
#include "cuda/kernels/base/accumulate.cuh"
#include "cuda/kernels/throughput/sum_work.cuh"

namespace ferry::cuda::device {

/// One lane's vectors of one row's piece; zeros past its end. The first level of cache is passed
/// by: peers write the rows.
template <int kVectors>
__device__ __forceinline__ void load_piece(uint4 (&vectors)[kVectors], const std::byte* row,
                                           int count) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int at = static_cast<int>(threadIdx.x % 32) + 32 * v;
    vectors[v] = {0, 0, 0, 0};
    if (at < count) vectors[v] = __ldcg(reinterpret_cast<const uint4*>(row) + at);
  }
}

template <class T, int kVectors, bool kWeighted>
__device__ __forceinline__ void add_piece(float* acc, const uint4 (&vectors)[kVectors],
                                          float weight) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    add_vector<T, kWeighted>(acc + v * kPerVector<T>, vectors[v], weight);
  }
}

/// Adds the entries that 32 lanes hold, lowest lane first. Long pieces leave room for one row in
/// the registers only.
template <class T, int kVectors, bool kWeighted>
__device__ __forceinline__ void add_entries(float* acc, const Entry& entry, std::int64_t offset,
                                            int count) {
  constexpr bool kTwo = kVectors <= 4;
  const auto address = reinterpret_cast<unsigned long long>(entry.row);
  std::uint32_t left = __ballot_sync(0xffffffffu, entry.row != nullptr);
  while (left != 0) {
    uint4 first[kVectors], second[kTwo ? kVectors : 1];
    const int a = __ffs(left) - 1;
    left &= left - 1;
    const int b = kTwo && left != 0 ? __ffs(left) - 1 : a;
    const auto* row_a = reinterpret_cast<const std::byte*>(__shfl_sync(0xffffffffu, address, a));
    const auto* row_b = reinterpret_cast<const std::byte*>(__shfl_sync(0xffffffffu, address, b));
    load_piece(first, row_a + offset, count);
    if (kTwo && b != a) load_piece(second, row_b + offset, count);
    const float weight_a = kWeighted ? __shfl_sync(0xffffffffu, entry.weight, a) : 0.0f;
    const float weight_b = kWeighted ? __shfl_sync(0xffffffffu, entry.weight, b) : 0.0f;
    add_piece<T, kVectors, kWeighted>(acc, first, weight_a);
    if constexpr (kTwo) {
      if (b != a) {
        add_piece<T, kVectors, kWeighted>(acc, second, weight_b);
        left &= left - 1;
      }
    }
  }
}

/// All items of this warp. False: the group has failed.
template <class T, int kVectors, bool kWeighted, class Source, class Count>
__device__ bool sum_rows_by_loads(const Source& source, const SumWork& work, Count& done) {
  const int lane = static_cast<int>(threadIdx.x % 32), entries = source.entries();
  const Item stride = Item::at(work.stride, work.pieces);
  for (Item item = Item::at(work.first, work.pieces); item.token < work.rows;
       item.step(stride, work.pieces)) {
    done.reached(item.token);
    const std::int64_t offset = work.offset_of(item.piece);
    const int count = static_cast<int>(work.bytes_of(item.piece) / 16);
    float acc[kVectors * kPerVector<T>] = {};
    for (int base = 0; base < entries; base += 32) {
      Entry entry{nullptr, 0.0f};
      bool there = true;
      if (base + lane < entries) {
        const auto raw = source.load(item.token, base + lane);
        entry = source.resolve(raw, item.token, base + lane);
        if constexpr (Source::kWaits) {
          const std::uint32_t due = source.due(raw, base + lane);
          there = due == 0 || source.await(due);
        }
      }
      if (__all_sync(0xffffffffu, there) == 0) return false;
      __syncwarp();  // what one lane has seen is there for all that read the row
      add_entries<T, kVectors, kWeighted>(acc, entry, offset, count);
    }
    std::byte* out =
        work.out + static_cast<std::int64_t>(source.row_of(item.token)) * work.row_bytes + offset;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int at = lane + 32 * v;
      if (at < count) reinterpret_cast<uint4*>(out)[at] = round_vector<T>(acc + v * kPerVector<T>);
    }
  }
  done.reached(work.rows);
  return true;
}

}  // namespace ferry::cuda::device

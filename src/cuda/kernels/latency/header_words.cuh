// Latency dispatch: the words of headers as the receiving half has them, when they are here.
// verdict.cuh waits for them, arrivals.cuh judges and counts them.
#pragma once
#include "cuda/kernels/base/access.cuh"
#include "cuda/kernels/latency/launch_sizes.hpp"
#include "cuda/kernels/latency/view.hpp"

namespace ferry::cuda::device {

/// The words of headers that every block reads, in shared memory.
struct HeaderWords {
  std::uint32_t head[kMaxDomain];
  std::uint32_t refused[kMaxDomain];
  bool missing[kMaxDomain];  ///< the verdict

  /// That `source` sends; none if it is masked or missing. Who says that its routes were refused
  /// says so of no tokens.
  __device__ __forceinline__ int tokens(const LatencyView& v, int source) const {
    return min(head_tokens(head[source]), static_cast<int>(v.capacity));
  }
};

__device__ __forceinline__ std::int32_t load_number(const LatencyPlaces& at, int source,
                                                    int expert) {
  const std::uint64_t* words = at.numbers(at.v.sources[source], source);
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(load_relaxed(words + expert)));
}

/// What the receiving half finds of the headers.
struct Arrivals {
  const HeaderWords& words;
  /// [R, local experts] of rows, then where those of each source begin among those of the expert;
  /// null: there is no room for them.
  std::int32_t* numbers;
  int experts;  ///< local ones
};

/// The most tokens of sources whose rows carry their generation, and of the others.
struct MostTokens {
  int ll = 0, rows = 0;
};
/// Whole warp. `bytes`: of an element.
__device__ __forceinline__ MostTokens find_most_tokens(const LatencyView& v,
                                                       const HeaderWords& words,
                                                       std::size_t bytes) {
  MostTokens most;
#pragma unroll 1
  for (int s = static_cast<int>(threadIdx.x % 32); s < v.group.ranks; s += 32) {
    const int tokens = words.tokens(v, s);
    const bool ll = is_ll_of(v, tokens, bytes);
    most.ll = max(most.ll, ll ? tokens : 0);
    most.rows = max(most.rows, ll ? 0 : tokens);
  }
  most.ll = __reduce_max_sync(kAllLanes, most.ll);
  most.rows = __reduce_max_sync(kAllLanes, most.rows);
  return most;
}

}  // namespace ferry::cuda::device

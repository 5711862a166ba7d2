// How large the kernels of latency mode are: threads and warps of a block, blocks of an SM, shared
// memory. How many blocks a call gets says latency/engine.cpp; which of them only send,
// sending_blocks.hpp.
#pragma once
#include <algorithm>
#include <cstdint>

namespace ferry::cuda {

/// Of dispatch and combine.
inline constexpr int kLatencyThreads = 384;
inline constexpr int kLatencyWarps = kLatencyThreads / 32;
inline constexpr std::uint32_t kAllLanes = 0xffffffff;  ///< of a warp
/// Blocks of these kernels that one SM holds: all of a call must run at once.
inline constexpr int kLatencyBlocksPerSm = 2;

/// Warps of a block that send, at most, where the others receive at the same time.
inline constexpr int kMostSendWarps = 8;
/// Warps that can count routes for a header: warp 0 opens the call meanwhile.
inline constexpr int kMostHeaderWarps = kLatencyWarps - 1;
/// Dynamic shared memory of a dispatch, for their counters.
inline constexpr int kCounterBytes = 32 << 10;
/// As many as their counters fit.
inline int header_warps(std::int64_t local_experts) {
  const std::int64_t fit = kCounterBytes / 4 / std::max<std::int64_t>(local_experts, 1);
  return static_cast<int>(std::clamp<std::int64_t>(fit, 1, kMostHeaderWarps));
}

/// Of the kernels of one block: opening an exchange, masks, rejoin.
inline constexpr int kOneBlockThreads = 128;
/// Of the kernel behind a call that tells of its waits; it strides over the ranks.
inline constexpr int kWaitsThreads = 96;

}  // namespace ferry::cuda

// One segment of registered memory for each latency exchange on GPUs. Computed in every build.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

#include "cuda/kernels/latency/layout.hpp"
#include "ferry/latency.hpp"

namespace ferry::cuda {

/// One result and what its combine needs; offsets in the segment.
struct LatencyResultLayout {
  std::size_t handle = 0;        ///< LatencyHandle
  std::size_t slots = 0;         ///< i32 [R, capacity, topk]
  std::size_t slot_weights = 0;  ///< f32 [R, capacity, topk]: those that came with the dispatch
  std::size_t ones = 0;          ///< f32 [R, capacity, topk]: of rank-major rows
  std::size_t routes = 0;        ///< i32 [capacity, topk]: own
  std::size_t weights = 0;       ///< f32 [capacity, topk]: own, for a combine that has none
  // What the caller sees. With rank-major results R blocks of `capacity` rows take the place of
  // blocks of R · capacity rows for each local expert.
  std::size_t x = 0;             ///< [local experts, R · capacity, hidden]
  std::size_t scales = 0;        ///< f32 [local experts, C, R · capacity]
  std::size_t counts = 0;        ///< i32 [local experts]
  std::size_t source_token = 0;  ///< i32 [local experts, R · capacity]
  std::size_t ranges = 0;        ///< i64 [local experts, R]; of rank-major results there are none
  std::size_t topk_idx = 0;      ///< i32 [R, capacity, topk], rank-major alone
};

/// What crosses between domains; each with a flag of its own.
enum class CrossingKind : std::uint8_t { rows, weights, sums };
inline constexpr int kCrossingKinds = 3;
/// A flag says the generation, and below it what came.
inline constexpr int kCrossingShift = 16;

/// Pinned host memory of one rank whose group has several domains, for those beyond its own
/// (proxy/crossing.hpp); offsets. The same on all ranks.
struct CrossingMemory {
  std::size_t outbox = 0;        ///< DeviceLatencyLayout, by destination in place of source
  std::size_t inbox = 0;         ///< DeviceLatencyLayout
  std::size_t flags = 0;         ///< lines [kCrossingKinds, 2, R]: what has come
  std::size_t acknowledged = 0;  ///< lines [kCrossingKinds, 2, R]: what has landed there
  std::size_t masks = 0;         ///< lines [R]: whether the rank goes without this one
  std::size_t weights = 0;       ///< f32 [2, R, capacity, topk]: pushed, one behind the other
  std::size_t bytes = 0;         ///< 0: the group has one domain
};

/// The segment of one rank; all ranks have the same.
struct LatencyMemory {
  DeviceLatencyLayout wire{};
  std::size_t words = 0;  ///< LatencyWords
  std::array<LatencyResultLayout, 2> results{};
  std::size_t bytes = 0;
  CrossingMemory crossing{};
};
LatencyMemory make_latency_memory(const LatencyConfig& config, std::int64_t experts, int ranks,
                                  int domains);

}  // namespace ferry::cuda

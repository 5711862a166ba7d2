// Dispatch and combine of the CUDA engine, for its public calls and for a group that is larger than
// the engine.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "ferry/group.hpp"

namespace ferry::cuda {

class CudaEngine;

inline constexpr const char* kDispatch = "dispatch";

/// A dispatch made as two calls, each with a part of the tokens, of rows that lie in the whole
/// group's order; the same on all ranks but for the number.
struct SplitDispatch {
  std::int64_t first = 0;  ///< so many tokens go in the first call
  /// Launches what brings the rows of the others, behind the first call in the stream, or so that
  /// the stream waits for it.
  std::function<void()> between{};
};

Received dispatch(CudaEngine& engine, const ConstTensorView& x, const Plan& plan,
                  const DispatchOptions& options);
/// With a scattered plan. Arguments are checked, outputs are this engine's.
Received dispatch_split(CudaEngine& engine, const ConstTensorView& x, const Plan& plan,
                        const DispatchOptions& options, const SplitDispatch& split);
Received plan_and_dispatch(CudaEngine& engine, const ConstTensorView& x,
                           const ConstTensorView& topk_idx, const DispatchOptions& options);
/// [R]: the bytes of each rank of the epoch, nothing of the others.
std::vector<std::vector<std::byte>> gather(CudaEngine& engine, std::span<const std::byte> mine);

inline constexpr const char* kCombine = "combine";

/// A combine made as two calls, each of a part of the tokens, of a plan whose rows lie in the whole
/// group's order; the same on all ranks but for the number.
struct SplitCombine {
  std::int64_t last = 0;  ///< so many tokens, the plan's first ones, are summed by the second call
  /// Launches what uses the sums of the others, [V, H], behind the first call in the stream, or in
  /// another that waits for it.
  std::function<void(const Combined&)> between{};
};

Combined combine(CudaEngine& engine, const ConstTensorView& rows, const Plan& plan,
                 const CombineOptions& options);
/// With a scattered plan. Arguments are checked, outputs are this engine's.
Combined combine_split(CudaEngine& engine, const ConstTensorView& rows, const Plan& plan,
                       const CombineOptions& options, const SplitCombine& split);

}  // namespace ferry::cuda

// Combine of the CUDA engine, for its public call and for a group that is larger than the engine.
#pragma once
#include <cstdint>
#include <functional>

#include "ferry/group.hpp"

namespace ferry::cuda {

class CudaEngine;

inline constexpr const char* kCombine = "combine";

/// A combine made as two calls, each of a part of the tokens, of a plan whose rows lie in the whole
/// group's order; the same on all ranks but for the number.
struct CombineHalves {
  std::int64_t last = 0;  ///< so many tokens, the plan's first ones, are summed by the second call
  /// Launches what uses the sums of the others, [V, H], behind the first call in the stream, or in
  /// another that waits for it.
  std::function<void(const Combined&)> between{};
};

Combined combine(CudaEngine& engine, const ConstTensorView& rows, const Plan& plan,
                 const CombineOptions& options);
/// With a scattered plan. Arguments are checked, outputs are this engine's.
Combined combine_in_halves(CudaEngine& engine, const ConstTensorView& rows, const Plan& plan,
                           const CombineOptions& options, const CombineHalves& halves);

}  // namespace ferry::cuda

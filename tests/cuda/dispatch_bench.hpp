// Times of plan and dispatch, without the engine.
#pragma once
#include <cstdint>

namespace ferry::cuda::test {

/// Prints one JSON line for each shape, kind and number of SMs (`small`: of few tokens); one rank
/// for each GPU.
void run_dispatch_bench(std::uint64_t seed, bool small);

}  // namespace ferry::cuda::test

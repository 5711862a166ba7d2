// Copies of busy experts for the routes of a batch, planned and used on a GPU
// (core/experts/balance_state.hpp). Nothing here needs nvcc.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "core/experts/balance_state.hpp"

namespace ferry::cuda {

/// Ids of experts, i64 or i32, of which there are `count`.
struct BalanceRoutes {
  const void* ids = nullptr;
  std::int64_t count = 0;
  bool wide = true;  ///< i64
};

/// How many of the routes name each expert: out [experts], 0 before it.
cudaError_t launch_balance_counts(const BalanceRoutes& routes, std::int32_t experts,
                                  std::int32_t* out, cudaStream_t stream);
/// One batch: of `job` counts, stride, changed, again and state are set.
cudaError_t launch_balance_plan(const BatchPlanShape& shape, const BalanceJob& job,
                                cudaStream_t stream);
/// The weights of `fetches` are in their slots.
cudaError_t launch_balance_fetched(const BatchPlanShape& shape, std::byte* state,
                                   cudaStream_t stream);
/// Places of the routes of `rank`, [count]; kUnknownPlace for ids that are no expert and not −1,
/// and for all of a batch that is lost.
cudaError_t launch_balance_places(const BatchPlanShape& shape, std::byte* state,
                                  const BalanceRoutes& routes, int rank, std::int64_t* out,
                                  cudaStream_t stream);
inline constexpr std::int64_t kUnknownPlace = INT32_MAX;

/// Loads the kernels on the current device; cudaErrorInvalidValue: a block has too little shared
/// memory for so many experts and places.
cudaError_t load_balance_kernels(const BatchPlanShape& shape);
cudaError_t load_balance_plan(const BatchPlanShape& shape);
cudaError_t load_balance_routes(const BatchPlanShape& shape);

}  // namespace ferry::cuda

// The plan of a batch: one block, all of it in shared memory but what stays.
#include "cuda/kernels/collectives/balance_plan.cuh"

namespace ferry::cuda {
namespace {

using namespace device;

template <bool kShort>
__global__ void __launch_bounds__(kTeamThreads, 1)
    balance_kernel(const __grid_constant__ BalanceParameters p) {
  extern __shared__ __align__(16) std::byte shared[];
  __shared__ BlockWords words;
  plan_batch(p, BlockTeam<kShort>(words, p.shared.drafters), shared);
}
const void* balance_kernel_for(const BatchPlanShape& shape) {
  return has_short_loops(shape) ? reinterpret_cast<const void*>(&balance_kernel<true>)
                                : reinterpret_cast<const void*>(&balance_kernel<false>);
}

__global__ void fetched_kernel(const std::int32_t* fetches, std::int32_t* held, int places) {
  for (int i = static_cast<int>(threadIdx.x); i < places; i += static_cast<int>(blockDim.x)) {
    if (fetches[i] >= 0) held[i] = fetches[i];
  }
}

}  // namespace

cudaError_t launch_balance_plan(const BatchPlanShape& shape, const BalanceJob& job,
                                cudaStream_t stream) {
  BalanceParameters p;
  const cudaError_t error = parameters_for(shape, p);
  if (error != cudaSuccess) return error;
  p.job = job;
  void* arguments[] = {&p};
  return launch(balance_kernel_for(shape), {1, kTeamThreads, p.shared.bytes}, arguments, stream,
                false);
}

cudaError_t launch_balance_fetched(const BatchPlanShape& shape, std::byte* state,
                                   cudaStream_t stream) {
  const BalanceStateLayout at = make_balance_state_layout(shape);
  const auto* fetches = reinterpret_cast<const std::int32_t*>(state + at.fetches);
  auto* held = reinterpret_cast<std::int32_t*>(state + at.held);
  int places = shape.places();
  void* arguments[] = {&fetches, &held, &places};
  return launch(reinterpret_cast<const void*>(&fetched_kernel), {1, 256, 0}, arguments, stream,
                false);
}

cudaError_t load_balance_plan(const BatchPlanShape& shape) {
  BalanceParameters p;
  cudaError_t error = parameters_for(shape, p);
  if (error != cudaSuccess) return error;
  error = load_kernel(reinterpret_cast<const void*>(&fetched_kernel), 0);
  if (error != cudaSuccess) return error;
  KernelLimits limits;
  error = kernel_limits(limits);
  if (error != cudaSuccess) return error;
  // As much as any shape takes: shapes of several balancers differ.
  return load_kernel(balance_kernel_for(shape), limits.shared_bytes - (1 << 10));
}

cudaError_t load_balance_kernels(const BatchPlanShape& shape) {
  const cudaError_t error = load_balance_plan(shape);
  return error != cudaSuccess ? error : load_balance_routes(shape);
}

}  // namespace ferry::cuda

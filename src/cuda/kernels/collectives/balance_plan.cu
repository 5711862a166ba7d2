// The plan of a batch: one block, all of it in shared memory but what stays.
#include "cuda/kernels/base/launch.hpp"
#include "cuda/kernels/base/load.hpp"
#include "cuda/kernels/collectives/balance.hpp"
#include "cuda/kernels/collectives/block_team.cuh"

namespace ferry::cuda {
namespace {

using namespace device;

/// Behind the memory of the plan.
struct SharedPlaces {
  std::size_t held = 0;
  std::size_t table = 0;
  std::size_t load = 0;
  std::size_t quota = 0;  ///< kElsewhere: too large, in the entry
  std::size_t bytes = 0;
  int drafters = 0;
  static constexpr std::size_t kElsewhere = ~std::size_t{0};
};

struct BalanceParameters {
  BatchPlanShape shape{};
  BatchPlanLayout layout{};
  BalanceStateLayout at{};
  SharedPlaces shared{};
  BalanceJob job{};
};

__global__ void __launch_bounds__(BlockTeam::kThreads, 1)
    balance_kernel(const __grid_constant__ BalanceParameters p) {
  extern __shared__ __align__(16) std::byte shared[];
  __shared__ BlockWords words;
  const BlockTeam team(words, p.shared.drafters);
  BalanceJob job = p.job;
  job.plan.memory = shared;
  job.plan.table = reinterpret_cast<std::int32_t*>(shared + p.shared.table);
  job.plan.load = reinterpret_cast<Rows*>(shared + p.shared.load);
  job.plan.quota = p.shared.quota == SharedPlaces::kElsewhere
                       ? nullptr
                       : reinterpret_cast<std::int32_t*>(shared + p.shared.quota);
  auto* held = reinterpret_cast<std::int32_t*>(shared + p.shared.held);
  BalanceStep<BlockTeam>(team, p.shape, p.layout, p.at, job, held).run();
}

__global__ void fetched_kernel(const std::int32_t* fetches, std::int32_t* held, int places) {
  for (int i = static_cast<int>(threadIdx.x); i < places; i += static_cast<int>(blockDim.x)) {
    if (fetches[i] >= 0) held[i] = fetches[i];
  }
}

/// Fewer drafts at the same time where experts are many: the plan is the same.
bool fit(BalanceParameters& p, std::size_t most) {
  constexpr std::size_t kMostQuotas = 16 << 10;
  const auto places = static_cast<std::size_t>(p.shape.places());
  const auto ranks = static_cast<std::size_t>(p.shape.ranks);
  for (int drafters = CopySearch<BlockTeam>::tries_of(p.shape.ranks); drafters > 0; --drafters) {
    p.layout = make_batch_plan_layout(p.shape, BlockTeam::kWarps, drafters);
    Carver carver{p.layout.bytes};
    p.shared.held = carver.take(places * 4, 16);
    p.shared.table = carver.take(places * 4, 16);
    p.shared.load = carver.take(ranks * 4, 16);
    const bool here = places * ranks * 4 <= kMostQuotas;
    p.shared.quota = here ? carver.take(places * ranks * 4, 16) : SharedPlaces::kElsewhere;
    p.shared.bytes = carver.end;
    p.shared.drafters = drafters;
    if (p.shared.bytes <= most) return true;
  }
  return false;
}

cudaError_t parameters_for(const BatchPlanShape& shape, BalanceParameters& p) {
  KernelLimits limits;
  const cudaError_t error = kernel_limits(limits);
  if (error != cudaSuccess) return error;
  constexpr int kStatic = 1 << 10;  // of the block's shared memory
  p.shape = shape;
  p.at = make_balance_state_layout(shape);
  const bool fits = fit(p, static_cast<std::size_t>(limits.shared_bytes - kStatic));
  return fits && shape.ranks <= 64 ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_balance_plan(const BatchPlanShape& shape, const BalanceJob& job,
                                cudaStream_t stream) {
  BalanceParameters p;
  const cudaError_t error = parameters_for(shape, p);
  if (error != cudaSuccess) return error;
  p.job = job;
  void* arguments[] = {&p};
  return launch(reinterpret_cast<const void*>(&balance_kernel),
                {1, BlockTeam::kThreads, p.shared.bytes}, arguments, stream, false);
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
  return load_kernel(reinterpret_cast<const void*>(&balance_kernel),
                     limits.shared_bytes - (1 << 10));
}

cudaError_t load_balance_kernels(const BatchPlanShape& shape) {
  const cudaError_t error = load_balance_plan(shape);
  return error != cudaSuccess ? error : load_balance_routes(shape);
}

}  // namespace ferry::cuda

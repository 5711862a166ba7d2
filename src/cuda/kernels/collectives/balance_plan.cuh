// The kernel that plans a batch, for any team of a block (balance_plan.cu; tests/cuda/
// balance_stages.cu measures it).
#pragma once
#include "cuda/kernels/base/launch.hpp"
#include "cuda/kernels/base/load.hpp"
#include "cuda/kernels/collectives/balance.hpp"
#include "cuda/kernels/collectives/block_team.cuh"

namespace ferry::cuda {

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

/// One batch. All of it in shared memory but what stays.
template <class Team>
__device__ void plan_batch(const BalanceParameters& p, const Team& team, std::byte* shared) {
  BalanceJob job = p.job;
  job.plan.memory = shared;
  job.plan.table = reinterpret_cast<std::int32_t*>(shared + p.shared.table);
  job.plan.load = reinterpret_cast<Rows*>(shared + p.shared.load);
  job.plan.quota = p.shared.quota == SharedPlaces::kElsewhere
                       ? nullptr
                       : reinterpret_cast<std::int32_t*>(shared + p.shared.quota);
  auto* held = reinterpret_cast<std::int32_t*>(shared + p.shared.held);
  BalanceStep<Team>(team, p.shape, p.layout, p.at, job, held).run();
}

/// Fewer drafts at the same time where experts are many: the plan is the same.
inline bool fit(BalanceParameters& p, std::size_t most) {
  constexpr std::size_t kMostQuotas = 16 << 10;
  const auto places = static_cast<std::size_t>(p.shape.places());
  const auto ranks = static_cast<std::size_t>(p.shape.ranks);
  for (int drafters = CopySearch<device::BlockTeam<false>>::tries_of(p.shape.ranks); drafters > 0;
       --drafters) {
    p.layout = make_batch_plan_layout(p.shape, device::kTeamWarps, drafters);
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

inline cudaError_t parameters_for(const BatchPlanShape& shape, BalanceParameters& p) {
  KernelLimits limits;
  const cudaError_t error = kernel_limits(limits);
  if (error != cudaSuccess) return error;
  constexpr int kStatic = 1 << 10;  // of the block's shared memory
  p.shape = shape;
  p.at = make_balance_state_layout(shape);
  const bool fits = fit(p, static_cast<std::size_t>(limits.shared_bytes - kStatic));
  return fits && shape.ranks <= 64 ? cudaSuccess : cudaErrorInvalidValue;
}

/// Whether each loop of lanes is short.
inline bool has_short_loops(const BatchPlanShape& shape) {
  return shape.places() <= 32 && shape.local() <= 32;  // `slots` is 1 or more
}

}  // namespace ferry::cuda

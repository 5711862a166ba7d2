// Exchanges for tests of kernels: random routes, the plan that follows from them as the definition
// has it (naive, on the CPU), and rows of random numbers.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "conformance/reference.hpp"
#include "core/placement.hpp"
#include "cuda/kernels/throughput/kernels.hpp"
#include "ferry/dtype.hpp"
#include "kernel_group.hpp"

namespace ferry::cuda::test {

/// Bytes of poison behind every output, which must stay.
inline constexpr std::size_t kGuard = 256;

/// A received row: the copy of a source's token.
using conformance::Arrival;

struct ExchangeShape {
  int ranks = 1;
  std::int64_t experts = 1;
  int topk = 1;
  std::vector<std::int64_t> tokens;  ///< [ranks]
  int unused_percent = 0;            ///< of slots
};

struct Exchange {
  ExchangeShape shape;
  Placement placement{};
  std::vector<std::vector<std::int32_t>> ids;           ///< [ranks][T, K], global, −1 = unused
  std::vector<std::vector<Arrival>> arrivals;           ///< [ranks]: received rows in their order
  std::vector<std::vector<std::int32_t>> destinations;  ///< [ranks][T, L, 2]: rank, row
  std::vector<std::vector<std::int64_t>> rows_at;       ///< [ranks][T, R]: row at rank d, or −1

  std::int64_t tokens(int rank) const { return shape.tokens[static_cast<std::size_t>(rank)]; }
  std::int64_t received(int rank) const {
    return static_cast<std::int64_t>(arrivals[static_cast<std::size_t>(rank)].size());
  }
  /// Rows that `rank` gets back in a combine, from all and from others.
  std::int64_t sent(int rank, bool others_only) const;
  /// i32 [received, K]: local ids of rank's arrivals, −1 = elsewhere.
  std::vector<std::int32_t> local_ids(int rank) const;
  /// The same routes, for expectations.
  conformance::World world() const;
};

Exchange make_exchange(const ExchangeShape& shape, Random& random);

/// Puts the plan into rank's arena, as launch_plan would.
PlanView upload_plan(KernelGroup& group, const Exchange& exchange, int rank);

/// Expert-major places of local ids: [n, K] rows or −1, and [EL + 1] offsets.
struct ExpertMajor {
  std::vector<std::int64_t> slot_rows;
  std::vector<std::int64_t> offsets;
};
ExpertMajor place_expert_major(const std::vector<std::int32_t>& ids, std::int64_t local_experts,
                               std::int64_t alignment);

using conformance::Bytes;

/// Elements of a dtype: mostly of ordinary size, some with any bits at all: NaNs, infinities,
/// subnormals.
Bytes random_elements(Random& random, Dtype dtype, std::int64_t count);
std::vector<float> random_floats(Random& random, std::int64_t count);

/// First element where two buffers differ, −1: nowhere. All NaNs of f32 are equal.
std::int64_t first_difference(const std::byte* got, const std::byte* expected, Dtype dtype,
                              std::int64_t count);

/// Several ranks' kernels must all be resident: how many blocks each may have, at most.
int fair_sms(int ranks);

}  // namespace ferry::cuda::test

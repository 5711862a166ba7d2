// Latency combine: where the rows to be summed lie in the memory of their tokens' owner.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "core/placement.hpp"

namespace ferry {

/// The place of the first row of each rank, [R]. Its other rows follow in the order in which it
/// sends them, by token, then slot: at most one for each slot of `routes` ([T, K], expert ids,
/// −1 = unused) that it holds.
std::vector<std::uint64_t> first_sum_places(std::span<const std::int32_t> routes,
                                            const Placement& placement);
/// The same for all routes, with room for `capacity` rows of each rank: a rank that is masked may
/// write late, and must not touch what others send.
std::vector<std::uint64_t> fixed_sum_places(std::int64_t capacity, int ranks);

}  // namespace ferry

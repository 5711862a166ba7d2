// What all ranks tell each other of a plan: how many tokens and slots each sends where.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/domains.hpp"
#include "core/plan_state.hpp"
#include "engine/channel.hpp"

namespace ferry::engine {

/// Of one rank, [R + E + D]: tokens for each rank, slots for each expert, tokens for each domain.
std::vector<std::int32_t> counts_message(const RouteCounts& own, const Placement& placement,
                                         const Domains& domains, int rank);

/// After the swap of these messages: what the plan knows of them. Throws Error(mismatch), which
/// fails the group, if those of a rank contradict each other.
void take_counts(Channel& channel, const GroupConfig& config, const Placement& placement,
                 const Domains& domains, RouteCounts own, PlanState& state);

/// All of it: swaps in one step, or, in groups of more than kMatrixRanks, in those of
/// core/pair_counts.hpp.
void swap_counts(Channel& channel, const GroupConfig& config, const Placement& placement,
                 const Domains& domains, RouteCounts own, std::uint64_t placement_digest,
                 PlanState& state);
/// Of the largest message of `swap_counts`.
std::size_t counts_bytes(const Placement& placement, const Domains& domains);

}  // namespace ferry::engine

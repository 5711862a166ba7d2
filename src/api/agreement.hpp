// All ranks must have been given the same configuration.
#pragma once
#include "ferry/bootstrap.hpp"
#include "ferry/group.hpp"

namespace ferry {

/// Collective. Throws Error(mismatch) on every rank, naming the first rank and field that differ
/// from rank 0.
void agree_on(Bootstrap& bootstrap, const GroupConfig& config);

}  // namespace ferry

// All ranks must have been given the same configuration.
#pragma once
#include <optional>

#include "ferry/bootstrap.hpp"
#include "ferry/group.hpp"

namespace ferry {

/// Collective. Throws Error(mismatch) on every rank, naming the first rank and field that differ
/// from rank 0. `invalid`: why this rank's configuration cannot be; it takes part all the same and
/// throws this, so that the others need not wait for it: they get Error(mismatch) with its words.
void agree_on(Bootstrap& bootstrap, const GroupConfig& config,
              const std::optional<Error>& invalid = std::nullopt);

}  // namespace ferry

// All ranks must have been given the same configuration.
#pragma once
#include <optional>
#include <string>

#include "ferry/bootstrap.hpp"
#include "ferry/group.hpp"

namespace ferry {

/// Collective. Throws Error(mismatch) on every rank, naming the first rank and field that differ
/// from rank 0. `invalid`: why this rank's configuration cannot be; it takes part all the same and
/// throws this, so that the others need not wait for it: they get Error(mismatch) with its words.
void agree_on(Bootstrap& bootstrap, const GroupConfig& config,
              const std::optional<Error>& invalid = std::nullopt);

/// Checks a configuration, and adds what the environment says. Throws Error(invalid_argument).
void complete_config(GroupConfig& config);

/// What must be the same on all ranks, as text.
std::string config_text(const GroupConfig& config, int ranks);
/// Of a process that joins, against a rank of the group. Throws Error(mismatch).
void check_same(const std::string& mine, int rank, const std::string& theirs, int peer);

}  // namespace ferry

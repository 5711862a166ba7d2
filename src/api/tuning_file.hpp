// Where tuners of groups start: what a file of settings and the environment say. The library reads
// no other JSON, and depends on nothing that could.
#pragma once
#include <string>

#include "ferry/group.hpp"

namespace ferry {

/// FERRY_TUNING: "on", "off" or a file for load_tuning; only where `tune` is not given.
void apply_tuning_environment(GroupConfig& config);
/// What ranks must have in common, as text.
std::string tuning_text(const GroupConfig& config);

}  // namespace ferry

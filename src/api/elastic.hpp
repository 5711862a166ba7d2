// Groups whose lost ranks are replaced: by whom they are found.
#pragma once
#include <memory>

#include "api/wires.hpp"
#include "core/engine.hpp"

namespace ferry {

/// Of a rank, before the group's memory is made: opens the lobby of an elastic group. Throws
/// Error(unsupported) where there can be none.
void open_lobby(const Bootstrap& bootstrap, const GroupConfig& config, const Inside& inside,
                fabric::Fabric& fabric);

/// Of a process that begins alone: the other ranks are missing, and join it.
std::shared_ptr<Engine> begin_group(const Bootstrap& bootstrap, GroupConfig config);

/// Of a process that takes the place of a rank that is not there.
std::shared_ptr<Engine> join_group(const Bootstrap& bootstrap, GroupConfig config);

}  // namespace ferry

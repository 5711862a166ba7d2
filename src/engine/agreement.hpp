// What all ranks must agree on before anything moves in a call: that their arguments can be, and
// that each has room for what comes.
#pragma once
#include <functional>
#include <optional>

#include "core/call.hpp"
#include "engine/channel.hpp"
#include "ferry/error.hpp"

namespace ferry::engine {

/// Swaps `head`, and whether this rank's arguments can be: `invalid` says why not. Then this rank
/// throws it and the others Error(mismatch) with its words; likewise when the calls differ.
/// Nothing has moved and the group can go on.
void agree_on_validity(Channel& channel, const char* stage, StepMessage head,
                       const std::optional<Error>& invalid);

/// Where room is made.
struct Room {
  Memory& memory;
  const char* sized_by = "";          ///< the arguments that give the size of the regions
  std::function<void()> free_held{};  ///< before it grows: regions that were held back may be free
};

/// Swaps `head`, whose regions `prepare` has just allocated (false: no room), until all ranks
/// have room, growing the arenas together in between. Throws Error(mismatch) when ranks are in
/// different calls and Error(exhausted) when a rank cannot take what comes; nothing has moved
/// then and the group can go on.
void agree_on_room(Channel& channel, const char* stage, StepMessage& head,
                   const std::function<bool()>& prepare, const Room& room);

}  // namespace ferry::engine

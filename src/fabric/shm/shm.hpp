// The fabric between processes of one host: POSIX shared memory.
#pragma once
#include <array>
#include <chrono>
#include <cstdint>
#include <ferry/bootstrap.hpp>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "core/domains.hpp"
#include "fabric/fabric.hpp"
#include "fabric/lobby.hpp"
#include "platform/unique_descriptor.hpp"

namespace ferry::fabric {

/// Collective; the ranks are processes (or threads) of one user, one host and one /dev/shm: throws
/// Error(unsupported) naming a rank that is not, or what the bootstrap throws.
///
/// Segments are objects in /dev/shm, mode 0600, with unguessable names that are gone after `seal`.
/// What a killed rank left is removed by `forget` on a survivor, by a survivor's destructor, or, if
/// none survived, when the next group of this user is created. All memory is reserved when it is
/// registered: a full /dev/shm is Error(exhausted), never SIGBUS. In a forked child the destructor
/// removes nothing.
std::unique_ptr<Fabric> make_shm_fabric(Bootstrap& bootstrap, std::chrono::nanoseconds deadline,
                                        const OnWait& on_wait = {});

/// The same for ranks of several hosts, of which those of one domain share one: it reaches the
/// ranks of the own domain alone.
std::unique_ptr<Fabric> make_shm_fabric(Bootstrap& bootstrap, const Domains& domains,
                                        std::chrono::nanoseconds deadline,
                                        const OnWait& on_wait = {});

/// While a process has it, no other begins a group of that name: until others find its memory.
/// Throws Error(refused) where another one has it.
Socket turn_to_begin(int rank, const LobbyName& name);

/// Of a process that begins a group alone: as `join_shm_fabric`, with a group of its own. Throws
/// Error(refused) where one of that name runs.
std::unique_ptr<Fabric> begin_shm_fabric(int rank, int size, const LobbyName& name);

struct Met {
  std::unique_ptr<Fabric> fabric{};
  Visitor there{};  ///< a rank that was found; without its memory
};
/// A rank on another host, and the group's key.
struct FoundElsewhere {
  std::array<std::uint64_t, 2> group{};
  Visitor there{};
};
using LookElsewhere = std::function<std::optional<FoundElsewhere>()>;
/// Of a process that takes a lost rank's place: not collective. Waits for a rank that is found
/// under `name` (lobby.hpp) on this host, or else by `elsewhere`; no peer is attached yet, and all
/// count as ended: `seat` and `vacate` follow. Throws Error(deadline) where there is none.
Met join_shm_fabric(int rank, int size, const LobbyName& name, const LookElsewhere& elsewhere,
                    std::chrono::nanoseconds deadline, const OnWait& on_wait);

}  // namespace ferry::fabric

// Files in a directory that all hosts share, by which processes that join find a group of which no
// rank is left on their host: what a door says (shm/door.hpp), without memory.
#pragma once
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fabric/lobby.hpp"
#include "fabric/segment_handle.hpp"
#include "platform/locked_file.hpp"

namespace ferry::fabric {

/// What a file says.
struct SharedDoor {
  JobKey group{};
  Visitor there{};  ///< without pid and memory
};

/// Of a process that begins a group: no other one does while this lives. A file, which stays locked
/// and is removed at the end; one that a killed process has left is not locked.
class TurnToBegin {
 public:
  /// Throws Error(refused) when another process has the turn, Error(system) that names the file.
  TurnToBegin(std::string path, int rank);
  TurnToBegin(TurnToBegin&& other) noexcept = default;
  TurnToBegin& operator=(TurnToBegin&&) = delete;
  ~TurnToBegin();

 private:
  std::string path_;
  LockedFile file_;
};

/// Of one group's name. All functions may hang as long as the directory's server does. Files of
/// other users, or that others may read, are left out: they hold the job's key.
class SharedDoors {
 public:
  SharedDoors(std::string directory, const LobbyName& lobby, int rank, int ranks);

  TurnToBegin turn_to_begin() const { return {start_ + "begin", rank_}; }
  /// Those of earlier groups of that name go.
  void clear() const;
  /// Writes this rank's. Throws Error(system) that names the file.
  void show(const SharedDoor& own) const;
  /// Removes this rank's, and that of each rank in `lost`.
  void leave(std::span<const int> lost) const;
  /// All others that can be read; `own`: also this rank's, of whichever process.
  std::vector<SharedDoor> list(bool own = false) const;

 private:
  std::string path_of(int rank) const;
  std::optional<SharedDoor> read(int rank) const;

  std::string start_;
  int rank_;
  int ranks_;
};

}  // namespace ferry::fabric

// Ends a job's processes when its launcher is killed without a chance to do it.
#pragma once
#include <sys/types.h>

#include "posix/unique_fd.hpp"

namespace ferry::cli {

/// A small process beside the launcher that knows the process groups of the job. When the launcher
/// dies (SIGKILL, out of memory), it kills them all: the kernel's own parent-death signal reaches
/// only the ranks, not what they started.
class Keeper {
 public:
  /// Throws std::system_error. To be made before any thread and before the ranks.
  Keeper();
  /// Lets it go without killing anything.
  ~Keeper();
  Keeper(const Keeper&) = delete;
  Keeper& operator=(const Keeper&) = delete;

  void watch(pid_t group);

 private:
  UniqueFd pipe_;
  pid_t pid_ = -1;
};

}  // namespace ferry::cli

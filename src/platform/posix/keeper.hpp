// Ends process groups when their starter is killed without a chance to do it.
#pragma once
#include <cstdint>

#include "platform/unique_descriptor.hpp"

namespace ferry {

/// A small process beside the starter that knows its process groups. When the starter dies
/// (SIGKILL, out of memory), it kills them all: the kernel's own parent-death signal reaches only
/// the leaders, not what they started.
class Keeper {
 public:
  /// Throws std::system_error. To be made before any thread and before the groups.
  Keeper();
  /// Lets it go without killing anything.
  ~Keeper();
  Keeper(const Keeper&) = delete;
  Keeper& operator=(const Keeper&) = delete;

  void watch(std::int64_t group);

 private:
  UniqueDescriptor pipe_;
  std::int64_t pid_ = -1;
};

}  // namespace ferry

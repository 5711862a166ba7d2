// Registered memory that a lost rank may still write to: what it was granted in calls that did not
// end well. It is handed out again when that rank's process has ended.
#pragma once
#include <mutex>
#include <vector>

#include "cuda/runtime/gpu_memory.hpp"

namespace ferry::cuda {

/// Thread-safe.
class Quarantine {
 public:
  void add(const std::vector<engine::Region>& granted);
  bool empty() const;
  /// True: the piece overlaps with such memory, and stays here until `end`.
  bool keeps(const Held& held);
  /// Nobody writes there any more.
  void end();

 private:
  mutable std::mutex mutex_;
  std::vector<engine::Region> granted_{};
  std::vector<Held> kept_{};
};

}  // namespace ferry::cuda

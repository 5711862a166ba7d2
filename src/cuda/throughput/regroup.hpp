// A change of the membership, in place (engine/membership/regroup.hpp): the calls of the epoch end,
// the ranks that are left agree, then this GPU's words are those of the next epoch. Its memory, and
// graphs that were captured, stay.
#pragma once
#include <mutex>

#include "engine/membership/regroup.hpp"
#include "ferry/group.hpp"

namespace ferry::cuda {

class CudaEngine;

class EpochChange {
 public:
  explicit EpochChange(CudaEngine& engine) : engine_(engine) {}
  ferry::GroupView run();

 private:
  void check_possible() const;
  std::unique_lock<std::timed_mutex> take_turn();
  void end_calls();
  void end_flights();
  engine::Regroup& membership();
  void begin_epoch(const engine::Epoch& next);

  CudaEngine& engine_;
};

}  // namespace ferry::cuda

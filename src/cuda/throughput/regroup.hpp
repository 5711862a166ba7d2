// A change of the membership, in place (engine/membership/regroup.hpp): the calls of the epoch end,
// the ranks that are left agree, then this GPU's words are those of the next epoch. Its memory, and
// graphs that were captured, stay. Of processes that have taken places the memory is mapped.
// Latency exchanges go on among the ranks that are left of theirs.
#pragma once
#include "engine/membership/regroup.hpp"
#include "ferry/group.hpp"

namespace ferry::cuda {

class CudaEngine;

class EpochChange {
 public:
  explicit EpochChange(CudaEngine& engine) : engine_(engine) {}
  ferry::GroupView run();
  /// Of a process that takes the place of a lost rank: its first epoch.
  void join(std::uint64_t ticket);

 private:
  void end_calls();
  void end_flights();
  engine::Regroup& membership(std::uint64_t ticket = 0);
  void find_ranks();
  void go_on(const engine::Epoch& next);
  void begin_epoch(const engine::Epoch& next);
  void map_member(int peer);
  void count_sharers();

  CudaEngine& engine_;
};

}  // namespace ferry::cuda

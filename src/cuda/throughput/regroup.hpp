// A change of the membership, in place (engine/membership/regroup.hpp): the calls of the epoch end,
// the ranks that are left agree, then this GPU's words are those of the next epoch. Its memory, and
// graphs that were captured, stay. Of processes that have taken places the memory is mapped.
// Latency exchanges go on among the ranks that are left of theirs.
#pragma once
#include <chrono>
#include <functional>
#include <optional>

#include "engine/membership/regroup.hpp"
#include "ferry/group.hpp"

namespace ferry::cuda {

class CudaEngine;

/// A process that is being ended has given up its descriptors before anything shows that it ends.
inline constexpr std::chrono::nanoseconds kUntilAnEndShows = std::chrono::seconds(1);
inline constexpr const char* kRegroup = "regroup";

class EpochChange {
 public:
  explicit EpochChange(CudaEngine& engine) : engine_(engine) {}
  ferry::GroupView run();
  /// Of the engine inside a larger group, which decides alone who is there: `agree` is called when
  /// no kernel of this engine runs any more, with the newest generation that was used, and returns
  /// the epoch in this engine's ranks, whose generations are beyond that of each.
  using Agree = std::function<engine::Epoch(engine::Generation used)>;
  void run_inside(const Agree& agree);
  /// Of a process that takes the place of a lost rank, or begins alone (ticket 0): its first epoch.
  void enter(std::uint64_t ticket);

 private:
  template <class AgreeOnNext>
  ferry::GroupView change(const AgreeOnNext& agree);
  void end_calls();
  void end_flights();
  engine::Regroup& membership(std::uint64_t ticket = 0);
  void find_ranks();
  void leave_behind(const engine::Epoch& next);
  void go_on(const engine::Epoch& next);
  void begin_epoch(const engine::Epoch& next);
  std::optional<Error> map_all(engine::Seating& there);
  bool try_map(int peer);
  void map_member(int peer);
  void count_sharers();

  CudaEngine& engine_;
};

}  // namespace ferry::cuda

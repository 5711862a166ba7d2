// A change of the membership in a group of several domains. All ranks agree by their CPUs
// (engine/membership/regroup.hpp); the engine inside takes what they have decided and asks nobody,
// so that there are no two views. Generations are counted for both: the group's next ones are
// beyond all that any engine inside has used.
#pragma once
#include <mutex>
#include <optional>

#include "engine/membership/regroup.hpp"
#include "ferry/group.hpp"

namespace ferry::cuda {

class DomainEngine;

class DomainEpochChange {
 public:
  explicit DomainEpochChange(DomainEngine& engine) : engine_(engine) {}
  ferry::GroupView run();

 private:
  std::unique_lock<std::timed_mutex> take_turn();
  void await_streams();
  engine::Regroup& membership();
  engine::Epoch agree(engine::Generation used);
  void begin_epoch();
  engine::Epoch within() const;
  void fail(const Error& error);

  DomainEngine& engine_;
  std::optional<engine::Epoch> next_{};  // once all have agreed
  bool inside_speaks_ = true;            // errors come from the engine inside
};

}  // namespace ferry::cuda

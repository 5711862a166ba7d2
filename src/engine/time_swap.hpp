// How the times of calls come to all ranks: by swaps in which nobody waits. Whoever has something
// to tell posts; whoever sees that, posts too; and when all have, all have the same.
#pragma once
#include <cstddef>

#include "engine/channel.hpp"
#include "engine/late_tuner.hpp"
#include "engine/reach.hpp"
#include "protocol/swap.hpp"

namespace ferry::engine {

class TimeSwap {
 public:
  /// What it needs of each rank's control segment, from the same offset on.
  static std::size_t bytes(int ranks);
  TimeSwap(const Channel& channel, fabric::Fabric& fabric, const fabric::Segment& control,
           std::size_t offset);

  /// As far as it gets now, by the thread whose turn it is.
  void go_on(LateTuner& tuner);
  /// Nothing of the epoch before counts.
  void begin_epoch(std::uint64_t number);

 private:
  bool advance(LateTuner& tuner);
  bool has_posted(int peer) const;

  const Channel& channel_;
  FabricReach reach_;
  protocol::FlagArray posted_;
  protocol::Swap<> swap_;
  protocol::Generation round_ = 1;  // that is not complete yet
  bool told_ = false;               // by this rank, in that round
};

}  // namespace ferry::engine

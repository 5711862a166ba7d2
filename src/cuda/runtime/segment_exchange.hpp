// How a rank's memory grows while others compute: it offers its new segment, and a thread of each
// peer maps it, whatever that peer is doing. So a rank that lacks room makes some before it enters
// the call; the peers' kernels only wait for it a little longer.
//
// One swap slot and one flag for each source, as in protocol/swap.hpp, but each source counts its
// offers by itself, anew in each epoch: it makes the next one after everybody has taken the last.
// So what a lost rank has offered is not taken for an offer of the process that has its place.
#pragma once
#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "core/layout.hpp"
#include "engine/channel.hpp"
#include "protocol/delivery.hpp"
#include "protocol/swap.hpp"

namespace ferry::cuda {

class SegmentExchange {
 public:
  /// `control`: this rank's control segment of the host's fabric, of this layout; the mailbox,
  /// swap_flags and delivered of which nobody else uses.
  SegmentExchange(engine::Channel& channel, const fabric::Segment& control,
                  const ControlLayout& layout);

  /// One thread at a time. Returns when all peers have mapped the segment, or throws what the
  /// group's watch says.
  void offer(const char* stage, const fabric::Segment& segment);

  /// What a peer offers.
  struct Offer {
    int peer = -1;
    protocol::Generation number = 0;
    fabric::SegmentId segment = 0;
    std::size_t bytes = 0;
    std::span<const std::byte> handle{};
  };
  /// While nobody offers or takes: what was offered in earlier epochs is over.
  void begin_epoch(std::uint64_t epoch);

  // For the one thread that takes offers.
  /// Of the next peer beyond `after` that offers one.
  std::optional<Offer> next(int after = -1);
  void taken(const Offer& offer);

 private:
  engine::Channel& channel_;
  protocol::FlagArray offered_;
  protocol::FlagArray taken_;
  protocol::Swap<> swap_;
  protocol::Delivery<> delivery_;
  std::vector<std::byte> outgoing_;
  protocol::Generation offers_ = 0;
  std::vector<protocol::Generation> served_;  // [ranks]
};

}  // namespace ferry::cuda

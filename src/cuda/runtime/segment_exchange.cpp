#include "cuda/runtime/segment_exchange.hpp"

#include <algorithm>
#include <cstring>
#include <string>

namespace ferry::cuda {
namespace {

using engine::Awaited;
using engine::Channel;
using engine::GroupWatch;
using protocol::FlagLayout;
using protocol::Place;

FlagLayout flags_at(int ranks, std::size_t offset) {
  return {ranks, Place{Channel::kControl, offset}, kLineBytes};
}

}  // namespace

SegmentExchange::SegmentExchange(Channel& channel, const fabric::Segment& control,
                                 const ControlLayout& layout)
    : channel_(channel),
      offered_{control.data + layout.swap_flags, kLineBytes, channel.size()},
      taken_{control.data + layout.delivered, kLineBytes, channel.size(), channel.live()},
      swap_({layout.message_bytes, Place{Channel::kControl, layout.mailbox}, layout.message_bytes,
             flags_at(channel.size(), layout.swap_flags)},
            channel.rank(), control.data + layout.mailbox, control.data + layout.swap_flags,
            channel.live()),
      delivery_(flags_at(channel.size(), layout.delivered), channel.rank(),
                control.data + layout.delivered, channel.live()),
      outgoing_(layout.message_bytes),
      served_(static_cast<std::size_t>(channel.size())) {}

void SegmentExchange::offer(const char* stage, const fabric::Segment& segment) {
  StepMessage head;
  head.call.kind = CallKind::grow;
  head.segment = segment.id;
  head.need_bytes = segment.bytes;
  head.handle_bytes = static_cast<std::uint32_t>(segment.handle.size());
  std::memcpy(outgoing_.data(), &head, sizeof(head));
  std::memcpy(outgoing_.data() + sizeof(head), segment.handle.data(), segment.handle.size());
  const protocol::Generation number = ++offers_;
  swap_.post_all(channel_.reach(), number, outgoing_.data(), 0);
  delivery_.deliver(channel_.reach(), channel_.rank(), number, 0);  // the own rank has it
  channel_.await(stage, Awaited{taken_, number},
                 [&](GroupWatch& watch) { return delivery_.await(number, watch); });
}

void SegmentExchange::begin_epoch(std::uint64_t epoch) {
  constexpr int kOfOneEpoch = 32;  // bits
  offers_ = epoch << kOfOneEpoch;
  std::fill(served_.begin(), served_.end(), offers_);
}

std::optional<SegmentExchange::Offer> SegmentExchange::next(int after) {
  for (int peer = after + 1; peer < channel_.size(); ++peer) {
    if (peer == channel_.rank() || !channel_.has(peer)) continue;
    const protocol::Generation seen = offered_[peer].load(protocol::order::acquire);
    protocol::Generation& served = served_[static_cast<std::size_t>(peer)];
    if (seen <= served) continue;  // of an earlier epoch, or taken
    if (seen != served + 1) {
      channel_.throw_violation("grow", peer,
                               "offered segment number " + std::to_string(seen) + " after number " +
                                   std::to_string(served));
    }
    const std::byte* message = swap_.message(peer, seen);
    StepMessage head;
    std::memcpy(&head, message, sizeof(head));
    if (head.call.kind != CallKind::grow || head.handle_bytes > fabric::kMaxHandleBytes) {
      channel_.throw_violation(
          "grow", peer,
          "sent a segment's handle of " + std::to_string(head.handle_bytes) + " bytes");
    }
    return Offer{peer,
                 seen,
                 head.segment,
                 static_cast<std::size_t>(head.need_bytes),
                 {message + sizeof(head), head.handle_bytes}};
  }
  return std::nullopt;
}

void SegmentExchange::taken(const Offer& offer) {
  served_[static_cast<std::size_t>(offer.peer)] = offer.number;
  delivery_.deliver(channel_.reach(), offer.peer, offer.number, 0);
}

}  // namespace ferry::cuda

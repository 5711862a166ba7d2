#include "engine/time_swap.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

namespace ferry::engine {
namespace {

static_assert(sizeof(CallTimes) == kLineBytes);

protocol::SwapLayout layout_at(int ranks, std::size_t offset) {
  const std::size_t flags = static_cast<std::size_t>(ranks) * kLineBytes;
  return {sizeof(CallTimes), protocol::Place{Channel::kControl, offset + flags}, kLineBytes,
          protocol::FlagLayout{ranks, protocol::Place{Channel::kControl, offset}, kLineBytes}};
}

/// Of the tags on a fabric, beside those of the group and of its latency exchanges.
constexpr std::uint64_t kTagSpace = 0xffff;

}  // namespace

std::size_t TimeSwap::bytes(int ranks) {
  return round_up(3 * static_cast<std::size_t>(ranks) * kLineBytes, 4096);
}

TimeSwap::TimeSwap(const Channel& channel, fabric::Fabric& fabric, const fabric::Segment& control,
                   std::size_t offset)
    : channel_(channel),
      reach_(fabric, kTagSpace),
      posted_{control.data + offset, kLineBytes, channel.size(), channel.live()},
      swap_(layout_at(channel.size(), offset), channel.rank(),
            control.data + offset + static_cast<std::size_t>(channel.size()) * kLineBytes,
            control.data + offset, channel.live()) {}

bool TimeSwap::has_posted(int peer) const {
  return posted_[peer].load(protocol::order::acquire) >= round_;
}

void TimeSwap::go_on(LateTuner& tuner) {
  while (advance(tuner)) {
  }
}

/// False: nothing more can be done now.
bool TimeSwap::advance(LateTuner& tuner) {
  const std::vector<int>& ranks = channel_.ranks();
  const auto has = [&](int peer) { return has_posted(peer); };
  if (!told_) {
    if (!tuner.has_news() && std::none_of(ranks.begin(), ranks.end(), has)) return false;
    const CallTimes times = tuner.tell();
    swap_.post_all(reach_, round_, &times, 0);
    told_ = true;
  }
  if (!std::all_of(ranks.begin(), ranks.end(), has)) return false;
  std::vector<CallTimes> all(ranks.size());
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    std::memcpy(&all[i], swap_.message(ranks[i], round_), sizeof(CallTimes));
  }
  ++round_;
  told_ = false;
  tuner.heard(all);
  return true;
}

void TimeSwap::begin_epoch(std::uint64_t number) {
  round_ = (number << 32) + 1;
  told_ = false;
}

}  // namespace ferry::engine

#include "host/latency/heartbeat.hpp"

#include <algorithm>
#include <utility>

namespace ferry::host {
namespace {

/// Parts of a deadline: a call has long begun after one, and waits are told over a network once in
/// one, so that a call which is not held up sends nothing.
constexpr int kLongBegun = 4, kTold = 16;

}  // namespace

LatencyHeartbeat::LatencyHeartbeat(const protocol::FlagLayout& layout, int rank, std::byte* mine,
                                   std::vector<std::byte*> near, std::chrono::nanoseconds deadline)
    : layout_(layout),
      rank_(rank),
      flags_{mine, layout.stride, layout.ranks},
      near_(std::move(near)),
      deadline_(deadline) {
  for (int peer = 0; peer < layout.ranks; ++peer) {
    if (!reads(peer)) far_.push_back(peer);
  }
  then_.resize(far_.size());
}

std::byte* LatencyHeartbeat::silence() {
  static std::uint64_t word = 0;
  return reinterpret_cast<std::byte*>(&word);
}

std::uint64_t LatencyHeartbeat::word(int peer) const {
  std::byte* near = near_[static_cast<std::size_t>(peer)];
  // relaxed: a sign of life; nothing is read on the strength of it.
  if (near == nullptr) return flags_[peer].load(protocol::order::relaxed);
  return protocol::Flag{reinterpret_cast<std::uint64_t*>(near)}.load(protocol::order::relaxed);
}

void LatencyHeartbeat::begin_window(Clock::time_point start) {
  start_ = told_ = start;
  long_begun_ = false;
}

void LatencyHeartbeat::poll(Clock::time_point now) {
  if (long_begun_ || now - start_ < deadline_ / kLongBegun) return;
  long_begun_ = true;
  for (std::size_t i = 0; i < far_.size(); ++i) then_[i] = word(far_[i]);
}

void LatencyHeartbeat::beat(FabricReach& reach, const std::function<bool(int)>& left_out) {
  const auto now = Clock::now();
  // relaxed: as in `word`.
  flags_[rank_].store(static_cast<std::uint64_t>(now.time_since_epoch().count()),
                      protocol::order::relaxed);
  if (far_.empty() || now - told_ < deadline_ / kTold) return;
  told_ = now;
  ++count_;
  for (const int peer : far_) {
    if (!left_out(peer)) reach.notify(peer, layout_.place(rank_), count_);
  }
}

bool LatencyHeartbeat::held_up(int peer) const {
  if (!reads(peer)) {
    const auto at = std::find(far_.begin(), far_.end(), peer) - far_.begin();
    return long_begun_ && word(peer) != then_[static_cast<std::size_t>(at)];
  }
  // Clocks of one host agree; those of two do not, so what they say is only counted.
  const auto long_begun = start_ + deadline_ / kLongBegun;
  return word(peer) > static_cast<std::uint64_t>(
                          std::chrono::nanoseconds(long_begun.time_since_epoch()).count());
}

}  // namespace ferry::host

// Tells a rank that is held up from one that stopped: who was in a call lately. Whether a process
// is dead: platform/process.hpp. docs/design/failures.md, "Masks".
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "engine/reach.hpp"
#include "protocol/flags.hpp"

namespace ferry::host {

using engine::FabricReach;

class LatencyHeartbeat {
 public:
  using Clock = std::chrono::steady_clock;

  /// `layout`: each rank's array of words. `mine`: the own one; its own word says when this rank
  /// was last in a call, the others are counted up by the ranks outside the domain. `near`: [R],
  /// each rank's own word; null outside the domain.
  LatencyHeartbeat(const protocol::FlagLayout& layout, int rank, std::byte* mine,
                   std::vector<std::byte*> near, std::chrono::nanoseconds deadline);

  /// The word of a rank that is not there.
  static std::byte* silence();
  /// The memory of that rank may go.
  void forget(int peer) {
    std::byte*& word = near_[static_cast<std::size_t>(peer)];
    if (word != nullptr) word = silence();
  }
  /// Whether the words of a peer can be read here.
  bool reads(int peer) const { return near_[static_cast<std::size_t>(peer)] != nullptr; }
  /// The call, or a further deadline of it, begins.
  void begin_window(Clock::time_point start);
  /// Each poll of a wait: once the window has long begun, remembers what far ranks had said then.
  void poll(Clock::time_point now);
  /// This rank is in a call; said again and again while it waits. Who is `left_out` is not told.
  void beat(FabricReach& reach, const std::function<bool(int)>& left_out);
  /// Whether the peer was in a call when the window here had long begun: so in an earlier call, and
  /// computes since. A rank that stopped did so about when this call began.
  bool held_up(int peer) const;

 private:
  std::uint64_t word(int peer) const;

  protocol::FlagLayout layout_;
  int rank_;
  protocol::FlagArray flags_;
  std::vector<std::byte*> near_;
  std::vector<int> far_{};  // ranks outside the domain
  std::chrono::nanoseconds deadline_;
  // Of the thread whose turn it is.
  Clock::time_point start_{}, told_{};
  std::uint64_t count_ = 0;
  bool long_begun_ = false;
  std::vector<std::uint64_t> then_{};  // of each of far_, its word when the call had long begun
};

}  // namespace ferry::host

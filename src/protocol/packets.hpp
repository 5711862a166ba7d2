// Packets: small messages from one rank to another, without asking, through a ring of slots in the
// receiver's memory for each sender.
//
// Packet n is written into slot n % kSlots under a tag of its own, then the receiver's flag
// posted[sender] rises to n. The receiver copies packets out in order and raises the sender's flag
// taken[receiver]; packet n + kSlots may be written once packet n was taken. Numbers count for
// ever, from 1 without gaps.
#pragma once

#include <cstddef>
#include <cstdint>

#include "protocol/flags.hpp"
#include "protocol/reach.hpp"
#include "protocol/sync.hpp"

namespace ferry::protocol {

/// What packets rely on, as parameters, so that the explorer can break it.
struct PacketTraits {
  using Await = AwaitTraits;
  static constexpr std::uint64_t kSlots = 8;
  /// Packets that may be under way and not taken.
  static constexpr std::uint64_t kWindow = kSlots;
  /// A network counts the packet's bytes before it shows the flag.
  static constexpr bool kCounted = true;
  /// Every packet has a tag of its own. Under one tag, early bytes of the next packet would stand
  /// in for late bytes of this one.
  FERRY_FN static constexpr std::uint64_t tagged(std::uint64_t number) { return number; }
};

/// The flags of one rank: posted[sender], and taken[receiver] of what it sent itself.
template <class Traits = PacketTraits>
class Packets {
 public:
  FERRY_FN Packets(const FlagLayout& posted, const FlagLayout& taken, int self,
                   std::byte* own_posted, std::byte* own_taken)
      : posted_(posted),
        taken_(taken),
        self_(self),
        own_posted_{own_posted, posted.stride, posted.ranks},
        own_taken_{own_taken, taken.stride, taken.ranks} {}

  FERRY_FN static constexpr std::uint64_t slot(std::uint64_t number) {
    return number % Traits::kSlots;
  }
  /// The tag under which packet `number` is written.
  FERRY_FN static constexpr std::uint64_t tag(std::uint64_t number) {
    return make_tag(Channel::kPacket, Traits::tagged(number));
  }

  /// Sender: whether the slot of packet `number` is free. Acquire: the receiver's reads of the slot
  /// come before.
  FERRY_FN bool may_write(int receiver, std::uint64_t number) const {
    return number <= Traits::kWindow ||
           Traits::Await::reached(own_taken_[receiver].load(Traits::Await::kLoad),
                                  number - Traits::kWindow);
  }
  /// The same as a wait.
  template <class W>
  FERRY_FN Status await_slot(int receiver, std::uint64_t number, W& watch) const {
    if (number <= Traits::kWindow) return {};
    return await_flag<typename Traits::Await>(own_taken_[receiver], receiver,
                                              number - Traits::kWindow, kAnyAhead, watch);
  }
  /// Sender: packet `number` is written, `bytes` of it.
  template <class R>
    requires Reach<R>
  FERRY_FN void post(R& reach, int receiver, std::uint64_t number, std::uint64_t bytes) const {
    reach.publish(receiver,
                  Signal{posted_.place(self_), number, tag(number), Traits::kCounted ? bytes : 0});
  }

  /// Receiver: whether packet `number` is there. Acquire: it may be read then.
  FERRY_FN bool arrived(int sender, std::uint64_t number) const {
    return Traits::Await::reached(own_posted_[sender].load(Traits::Await::kLoad), number);
  }
  /// The same as a wait.
  template <class W>
  FERRY_FN Status await(int sender, std::uint64_t number, W& watch) const {
    return await_flag<typename Traits::Await>(own_posted_[sender], sender, number, kAnyAhead,
                                              watch);
  }
  /// Receiver: `number` and all before it were copied out.
  template <class R>
    requires Reach<R>
  FERRY_FN void take(R& reach, int sender, std::uint64_t number) const {
    reach.publish(sender,
                  Signal{taken_.place(self_), number, make_tag(Channel::kPacketTaken, number), 0});
  }

 private:
  FlagLayout posted_;
  FlagLayout taken_;
  int self_;
  FlagArray own_posted_;
  FlagArray own_taken_;
};

}  // namespace ferry::protocol

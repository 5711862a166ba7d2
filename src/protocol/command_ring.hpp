// Commands from a GPU's kernels to a thread that posts them on a network: a ring in memory that
// both see. It is also the seam for networks that a kernel can drive by itself: what it says is
// `put` into a window of a peer, which is what such a network offers, too; that it is there is a
// counted signal that follows it (Chunks), and `begin` is where a call's turn comes.
//
// Commands are numbered from 0 for ever. Whoever makes command n writes its slot, n % size, and
// then the slot's word, n + 1. The thread takes them in order and says how many it has taken. Slots
// may be filled in any order, by anybody, as long as command n is made only when n - size has been
// taken: producers that must not wait (kernels) are started only then, so the ring never overflows.
#pragma once

#include <cstdint>

#include "protocol/command.hpp"
#include "protocol/sync.hpp"

namespace ferry::protocol {

/// What the ring relies on, as parameters, so that the explorer can break it.
struct CommandRingTraits {
  static constexpr order kPost = order::release;
  static constexpr order kPoll = order::acquire;
  static constexpr order kTaken = order::release;
  static constexpr order kRoom = order::acquire;
  /// A slot may be filled again when its last command was taken.
  static constexpr std::uint64_t kSpare = 0;
  /// A slot's word says whose lap it is.
  FERRY_FN static constexpr bool is(std::uint64_t word, std::uint64_t number) {
    return word == number + 1;
  }
};

template <class Traits = CommandRingTraits>
class CommandRing {
 public:
  /// `slots`: [size]; `taken`: how many have been.
  FERRY_FN CommandRing(CommandSlot* slots, std::uint64_t size, std::uint64_t* taken)
      : slots_(slots), size_(size), taken_{taken} {}

  std::uint64_t size() const { return size_; }
  /// Command `number` may be made once so many have been taken.
  FERRY_FN std::uint64_t needed(std::uint64_t number) const {
    return number < size_ + Traits::kSpare ? 0 : number + 1 - size_ - Traits::kSpare;
  }

  /// Producer: waits until command `number` may be made.
  template <class W>
  FERRY_FN Status await_room(std::uint64_t number, W& watch) const {
    const std::uint64_t least = needed(number);
    if (least == 0) return {};
    return taken_.wait_until([least](std::uint64_t taken) { return taken >= least; }, watch,
                             Traits::kRoom);
  }
  /// Producer: makes command `number`.
  FERRY_FN void post(std::uint64_t number, const Command& command) const {
    CommandSlot& slot = slots_[number % size_];
    write(&slot.command, command);
    const Flag word{&slot.number};
    word.store(number + 1, Traits::kPost);
    word.wake();
  }

  /// Consumer: command `number` if it is there. Not to be asked for again.
  FERRY_FN bool take(std::uint64_t number, Command& command) const {
    const CommandSlot& slot = slots_[number % size_];
    if (!Traits::is(Flag{const_cast<std::uint64_t*>(&slot.number)}.load(Traits::kPoll), number)) {
      return false;
    }
    command = read(&slot.command);
    taken_.store(number + 1, Traits::kTaken);
    taken_.wake();
    return true;
  }
  /// Consumer: waits for it.
  template <class W>
  FERRY_FN Status await(std::uint64_t number, Command& command, W& watch) const {
    const Flag word{&slots_[number % size_].number};
    const Status status = word.wait_until(
        [number](std::uint64_t seen) { return Traits::is(seen, number); }, watch, Traits::kPoll);
    if (status.ok()) (void)take(number, command);
    return status;
  }

 private:
  CommandSlot* slots_;
  std::uint64_t size_;
  Flag taken_;
};

}  // namespace ferry::protocol

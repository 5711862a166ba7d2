// How a process that joins and the ranks of other domains come to reach each other: each links the
// other by its card, and sends it a message. Two are linked when both messages have come.
//
// If a rank of its domain is left, that one sends on its card, and they link each other when it has
// its seat, in that epoch. Otherwise it knocks at all ranks whose cards it finds, under its ticket;
// a rank whose view has nobody of that domain answers, and they are linked before it has its seat.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/channel.hpp"
#include "engine/membership/carrier.hpp"

namespace ferry::engine {

class Linking {
 public:
  Linking(fabric::Fabric& fabric, std::shared_ptr<Carrier> carrier, const Channel& channel,
          std::uint64_t ticket);

  /// Of a process that begins alone: no far rank is there.
  void begin_alone();
  /// A process has taken a far seat with this view, or this rank has joined with it. `ticket`: of
  /// who has the seat; 0: not known yet, its message says it.
  void begin(int seat, const Member::View& view, std::uint64_t ticket);
  bool pending(int seat) const { return at(seat).state != State::linked; }
  /// This rank has not linked it, so it cannot have written here.
  bool untouched(int seat) const { return at(seat).state == State::waits; }
  /// The epoch in which it was linked; 1: the group was made with both.
  protocol::Epoch since(int seat) const { return at(seat).epoch; }
  /// The step that was committed when it joined, plus 1, or Channel::kJoining; 0: a founder.
  std::uint64_t joined_at(int seat) const { return at(seat).joined_at; }
  void forget_joined() {
    for (Seat& seat : seats_) seat.joined_at = 0;
  }
  bool any() const { return any_; }
  /// Whether another process had a seat before the one that has it, and could write here: what it
  /// has sent may still be under way.
  bool former_may_write() const { return former_may_write_; }
  /// Links what live seats it can. Returns those that are linked since the last time. `failed`:
  /// those whose cards cannot be used.
  std::vector<int> advance(const Member::Seats& live, Member::Seats& failed);

  // Knocks.

  /// Of a process that joins: links those that it has not.
  void knock(std::span<const fabric::Elsewhere> cards);
  /// Of a process that joins: whether the rank has answered.
  bool answered(int seat);
  /// Of a rank: answers who knocks for a hole. Its ticket; 0: nobody is there.
  std::uint64_t answer(int seat);

  /// Whether a process with this card proves that the former holder of its seat has ended.
  bool proves_end(int seat, std::span<const std::byte> card) const;
  /// The same of who was answered.
  bool proves_end(int seat) const;

 private:
  /// waits: for a card; told: the message is sent, and the other one has not come.
  enum class State : std::uint8_t { linked, waits, told };
  struct Seat {
    State state = State::linked;
    protocol::Epoch epoch = 1;
    std::uint64_t ticket = 0;
    std::uint64_t joined_at = 0;
    std::uint64_t step = 0;   // of the view with which it was to be linked
    std::uint64_t since = 1;  // epoch, or ticket, under which it was linked
    bool with_this = false;   // this rank joined with that view
  };
  /// Before there is a seat.
  struct Door {
    std::uint64_t ticket = 0;       // under which this rank has linked it last; 0: not so
    std::uint64_t refused = 0;      // whose card could not be
    std::vector<std::byte> card{};  // at which this rank has knocked
    bool answered = false;          // then
    fabric::Place holder{};         // of who had the seat last
  };
  bool is_far(int seat) const { return carrier_ && carrier_->far(seat); }
  const Seat& at(int seat) const { return seats_[static_cast<std::size_t>(seat)]; }
  Door& door(int seat) { return doors_[static_cast<std::size_t>(seat)]; }
  bool try_link(int seat, Seat& there);
  bool knows_memory(int seat, const Seat& there);
  void link(int seat, std::span<const std::byte> card, std::uint64_t since);
  void check_control(int seat) const;

  fabric::Fabric& fabric_;
  std::shared_ptr<Carrier> carrier_;
  const Channel& channel_;
  std::uint64_t ticket_;  // of this rank
  std::vector<Seat> seats_;
  std::vector<Door> doors_;
  bool knocks_ = false;
  bool any_ = false;
  bool former_may_write_ = false;
};

}  // namespace ferry::engine

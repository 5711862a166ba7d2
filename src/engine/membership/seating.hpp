// What the ranks of a group in shared memory say of its membership, where it lies, and which
// process has which seat: ranks of the group, and processes that wait for the seat of a lost one.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/layout.hpp"
#include "fabric/fabric.hpp"
#include "fabric/lobby.hpp"
#include "protocol/board.hpp"
#include "protocol/membership.hpp"

namespace ferry::engine {

struct SeatTraits : protocol::MembershipTraits {
  static constexpr int kSeats = 256;
  static constexpr int kJoins = 8;
};
using Member = protocol::Membership<SeatTraits>;
inline constexpr std::size_t kStatementWords = sizeof(Member::Said) / sizeof(std::uint64_t);
static_assert(sizeof(Member::Said) % sizeof(std::uint64_t) == 0);
static_assert(sizeof(Member::Said) <= kStatementBytes);

/// In the control segment of the rank that speaks.
inline protocol::Board<> board_of(std::byte* control, const ControlLayout& layout) {
  return {control + layout.statement, kStatementWords};
}
inline protocol::Flag bell_of(std::byte* control, const ControlLayout& layout) {
  return protocol::Flag{reinterpret_cast<std::uint64_t*>(control + layout.bell)};
}
/// Beside the bell: how often processes that wait for a seat have rung it. Ranks look for them only
/// after that, for a look reads a directory.
inline protocol::Flag knocks_of(std::byte* control, const ControlLayout& layout) {
  return protocol::Flag{
      reinterpret_cast<std::uint64_t*>(control + layout.bell + protocol::kFlagBytes)};
}
/// Tells the rank whose control segment this is that others went on without it, in this epoch.
void evict(std::byte* control, const ControlLayout& layout, protocol::Epoch epoch);
/// Wakes the rank whose control segment this is: there is something new to read.
void ring(std::byte* control, const ControlLayout& layout);
/// The number of the statement that was read; 0: none yet.
std::uint64_t read_statement(std::byte* control, const ControlLayout& layout, Member::Said& said);

/// Whether a view is of the group's ranks, and each joiner that it names has a seat in it.
bool of_ranks(const Member::View& view, const Member::Seats& all);

class Seating {
 public:
  /// Another process, and what it says; epoch 0: it waits for a seat, or nothing was said yet.
  struct Guest {
    fabric::Visitor visitor{};
    Member::Said said{};
    bool waits() const { return said.epoch == 0 && said.ticket != 0; }
    /// It has or had a seat.
    bool seated() const { return visitor.ticket == 0 || said.epoch != 0; }
  };

  Seating(fabric::Fabric& fabric, const ControlLayout& layout)
      : fabric_(fabric),
        lobby_(fabric.lobby()),
        layout_(layout),
        seats_(static_cast<std::size_t>(fabric.size())) {}

  bool open() const { return lobby_ != nullptr && lobby_->is_open(); }
  /// Looks who shows itself, and reads what it says.
  void update();
  /// The same, of a rank: it goes on as if nobody waited where that fails (too many open files).
  bool try_update() noexcept;
  const std::vector<Guest>& guests() const { return guests_; }
  /// Of a rank: hands on what processes say that wait for holes of the view, one for each hole.
  void hear_waiting(Member& member) const;
  /// Those that wait for holes of the view.
  std::vector<Guest> waiting(const Member& member) const;
  /// Whether one waits for a hole that nobody may still write from, as far as this rank knows.
  bool one_waits(const Member& member) const;
  /// Whether a process of this domain shows itself that has or had a seat.
  bool any_seated() const;
  /// Of a process that joins, and looked at last: the one that has its seat in the newest epoch.
  const Guest* holder(int seat) const;
  /// The newest of what they say.
  const Member::Said* newest() const;
  /// Of a process that waits for a seat.
  void knock_all() const;
  std::vector<fabric::Elsewhere> elsewhere() const { return lobby_->elsewhere(); }

  /// From now on the seat is that process, which joined with this view.
  void seat(int seat, std::uint64_t ticket, const Member::View& view);
  /// The epoch in which the process joined that has the seat; 1: before this rank did.
  protocol::Epoch since(int seat) const { return seats_[static_cast<std::size_t>(seat)].epoch; }
  /// The step that was committed then, plus 1; 0: before this rank did. The view says so: the
  /// process may have ended before this rank could read it there.
  std::uint64_t joined_at(int seat) const {
    return seats_[static_cast<std::size_t>(seat)].joined_at;
  }
  void forget_joined() {
    for (Seat& seat : seats_) seat.joined_at = 0;
  }
  /// Of a process that has joined: all seats of its domain but its own.
  void seat_all(const Member::View& view);
  /// Whether a process that had a seat before another may still write.
  bool former_may_write() const;
  bool ever_seated() const { return ever_seated_; }

 private:
  struct Seat {
    protocol::Epoch epoch = 1;
    std::uint64_t joined_at = 0;
  };
  void note_joins(const Member::View& view);

  fabric::Fabric& fabric_;
  fabric::Lobby* lobby_;
  ControlLayout layout_;
  std::vector<Guest> guests_{};  // by seat, then ticket
  std::vector<Seat> seats_;
  bool ever_seated_ = false;
};

}  // namespace ferry::engine

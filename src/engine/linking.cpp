#include "engine/linking.hpp"

#include <ferry/error.hpp>
#include <string>
#include <utility>

namespace ferry::engine {

void Linking::begin(int seat, const Member::View& view, std::uint64_t ticket) {
  any_ = true;
  former_may_write_ = former_may_write_ || !untouched(seat);
  seats_[static_cast<std::size_t>(seat)] = {State::waits, view.epoch, ticket,
                                            ticket == 0 ? 0 : view.step + 1, view.step};
  if (ticket != 0) carrier_->seat(seat, ticket);
}

/// Flags are written there as if it were this rank's.
void Linking::check_control(int seat) const {
  const std::size_t mine = fabric_.bytes(channel_.rank(), Channel::kControl);
  const std::size_t theirs = fabric_.bytes(seat, Channel::kControl);
  if (theirs == mine) return;
  throw Error(ErrorKind::mismatch,
              "rank " + std::to_string(channel_.rank()) + ": the card of rank " +
                  std::to_string(seat) + ", which joins, names a control segment of " +
                  std::to_string(theirs) + " bytes, expected " + std::to_string(mine),
              {.rank = channel_.rank(), .peer = seat});
}

/// By the card of its own message, or the one that a rank of its domain has sent.
bool Linking::try_link(int seat, Seat& there) {
  const auto link_message = fabric_.link_message(seat, there.epoch);
  const auto waiting = carrier_->waiting(seat);
  const bool sent_on = waiting && there.ticket != 0 && waiting->said.ticket == there.ticket;
  if (!link_message && !sent_on) return false;
  fabric_.link(seat, link_message ? link_message->card : waiting->card, there.epoch,
               {channel_.joined_at(channel_.rank()), ticket_});
  check_control(seat);
  return true;
}

std::vector<int> Linking::advance(const Member::Seats& live, Member::Seats& failed) {
  std::vector<int> done;
  if (!any_) return done;
  for (int seat = live.next(); seat >= 0; seat = live.next(seat + 1)) {
    Seat& there = seats_[static_cast<std::size_t>(seat)];
    try {
      if (there.state == State::waits && try_link(seat, there)) there.state = State::told;
    } catch (const Error&) {
      failed.add(seat);
      continue;
    }
    if (there.state != State::told) continue;
    const auto link_message = fabric_.link_message(seat, there.epoch);
    if (!link_message) continue;
    if (there.ticket == 0) {  // this rank has joined, and learns how the seat did
      const std::uint64_t at = link_message->words[0];  // in the epoch before, or it is in this one
      there.joined_at = at == Channel::kJoining ? there.step + 1 : at;
      there.ticket = link_message->words[1];
      carrier_->seat(seat, there.ticket);
    }
    there.state = State::linked;
    done.push_back(seat);
  }
  return done;
}

}  // namespace ferry::engine

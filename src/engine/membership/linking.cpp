#include "engine/membership/linking.hpp"

#include <ferry/error.hpp>
#include <string>
#include <utility>

namespace ferry::engine {

Linking::Linking(fabric::Fabric& fabric, std::shared_ptr<Carrier> carrier, const Channel& channel,
                 std::uint64_t ticket)
    : fabric_(fabric),
      carrier_(std::move(carrier)),
      channel_(channel),
      ticket_(ticket),
      seats_(static_cast<std::size_t>(channel.size())),
      doors_(seats_.size()) {
  for (int seat = 0; seat < channel.size(); ++seat) {
    if (is_far(seat)) door(seat).holder = fabric_.place(seat);
  }
  // A founder has reached all from the beginning.
  if (ticket_ != 0) begin_alone();
}

void Linking::begin_alone() {
  for (int seat = 0; seat < channel_.size(); ++seat) {
    if (is_far(seat)) seats_[static_cast<std::size_t>(seat)].state = State::waits;
  }
}

void Linking::begin(int seat, const Member::View& view, std::uint64_t ticket) {
  any_ = true;
  former_may_write_ = former_may_write_ || !untouched(seat);
  seats_[static_cast<std::size_t>(seat)] = {
      .state = State::waits,
      .epoch = view.epoch,
      .ticket = ticket,
      .joined_at = ticket == 0 ? 0 : view.step + 1,
      .step = view.step,
      .since = view.epoch,
      .with_this = ticket_ != 0 && view.ticket(channel_.rank()) == ticket_};
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

void Linking::link(int seat, std::span<const std::byte> card, std::uint64_t since) {
  fabric_.link(seat, card, since, {channel_.joined_at(channel_.rank()), ticket_});
  door(seat).ticket = (since & fabric::kTicketBit) != 0 ? since : 0;
  check_control(seat);
}

/// Under the ticket of the one that knocked; or in the epoch, by the card of its message, or the
/// one that a rank of its domain has sent. Who knocks leaves it to the other one. Of two who have
/// joined at once and knocked at each other, the lower seat's ticket counts.
bool Linking::try_link(int seat, Seat& there) {
  const bool knocked = knocks_ && there.with_this;
  if (knocked && answered(seat)) {
    there.since = ticket_;
    return true;
  }
  if (const auto link_message = fabric_.link_message(seat, there.epoch)) {
    link(seat, link_message->card, there.epoch);
    return true;
  }
  const auto knock = fabric_.knock(seat);
  if (knock && there.ticket != 0 && knock->ticket == there.ticket &&
      (!knocked || seat < channel_.rank())) {
    if (door(seat).ticket != there.ticket) link(seat, knock->message.card, there.ticket);
    there.since = there.ticket;
    carrier_->tell_memory(seat, there.ticket, fabric_.card());
    return true;
  }
  if (knocked) return false;
  const auto waiting = carrier_->waiting(seat);
  if (!waiting || there.ticket == 0 || waiting->said.ticket != there.ticket) return false;
  link(seat, waiting->card, there.epoch);
  return true;
}

/// A rank that this one has knocked at says it once more when both are in one view.
bool Linking::knows_memory(int seat, const Seat& there) {
  if (ticket_ == 0 || there.since != ticket_) return true;
  const auto card = carrier_->memory(seat, ticket_);
  if (!card) return false;
  fabric_.attach_card(seat, *card);
  check_control(seat);
  return true;
}

std::vector<int> Linking::advance(const Member::Seats& live, Member::Seats& failed) {
  std::vector<int> done;
  if (!any_) return done;
  for (int seat = live.next(); seat >= 0; seat = live.next(seat + 1)) {
    Seat& there = seats_[static_cast<std::size_t>(seat)];
    std::optional<fabric::Fabric::LinkMessage> link_message;
    try {
      if (there.state == State::waits && try_link(seat, there)) there.state = State::told;
      if (there.state != State::told || !knows_memory(seat, there)) continue;
      link_message = fabric_.link_message(seat, there.since);
    } catch (const Error&) {
      failed.add(seat);
    }
    if (!link_message) continue;
    if (there.ticket == 0) {  // this rank has joined, and learns how the seat did
      const std::uint64_t at = link_message->words[0];  // in the epoch before, or it is in this one
      there.joined_at = at == Channel::kJoining ? there.step + 1 : at;
      there.ticket = link_message->words[1];
      carrier_->seat(seat, there.ticket);
    }
    there.state = State::linked;
    door(seat).holder = fabric_.place(seat);
    done.push_back(seat);
  }
  return done;
}

void Linking::knock(std::span<const fabric::Elsewhere> cards) {
  knocks_ = true;
  for (const fabric::Elsewhere& there : cards) {
    Door& one = door(there.rank);
    const bool open = carrier_->far(there.rank) && untouched(there.rank) && !one.answered;
    if (!open || one.card == there.card) continue;
    one.card = there.card;
    try {
      link(there.rank, there.card, ticket_);
    } catch (const Error&) {  // the next one there is tried
      one.ticket = 0;
    }
  }
}

bool Linking::answered(int seat) {
  Door& there = door(seat);
  if (there.answered) return true;
  if (there.ticket != ticket_) return false;
  const auto answer = fabric_.link_message(seat, ticket_);
  if (!answer) return false;
  fabric_.attach_card(seat, answer->card);  // it may have grown since it showed its own
  check_control(seat);
  carrier_->seat(seat, answer->words[1]);
  there.answered = true;
  return true;
}

std::uint64_t Linking::answer(int seat) {
  const auto knock = fabric_.knock(seat);
  if (!knock || knock->message.words[1] != knock->ticket) return 0;
  Door& there = door(seat);
  if (there.refused == knock->ticket) return 0;
  try {
    if (there.ticket != knock->ticket) link(seat, knock->message.card, knock->ticket);
  } catch (const Error&) {
    there.refused = knock->ticket;
    return 0;
  }
  return fabric_.peer_state(seat) == fabric::PeerState::alive ? knock->ticket : 0;
}

bool Linking::proves_end(int seat, std::span<const std::byte> card) const {
  try {
    const fabric::Place& former = doors_[static_cast<std::size_t>(seat)].holder;
    return fabric::proves_end(former, fabric_.place_in(seat, card));
  } catch (const Error&) {  // such a card cannot be
    return false;
  }
}

bool Linking::proves_end(int seat) const {
  const auto knock = fabric_.knock(seat);
  return knock && proves_end(seat, knock->message.card);
}

}  // namespace ferry::engine

#include "engine/membership/carrier.hpp"

#include <cstring>
#include <type_traits>
#include <utility>

#include "platform/death_watch.hpp"

namespace ferry::engine {
std::shared_ptr<Carrier> Carrier::make(fabric::Fabric& fabric, const Domains& domains,
                                       std::byte* control, const ControlLayout& layout) {
  if (domains.count() == 1 || !fabric.carries_texts() || fabric.size() > SeatTraits::kSeats) {
    return nullptr;
  }
  std::shared_ptr<Carrier> carrier(new Carrier(fabric, domains, control, layout));
  // The fabric, whose memory this writes to, ends its threads before that memory.
  fabric.set_on_text(
      [carrier](int peer, std::span<const std::byte> bytes) { carrier->take(peer, bytes); });
  return carrier;
}

Carrier::Carrier(fabric::Fabric& fabric, const Domains& domains, std::byte* control,
                 const ControlLayout& layout)
    : fabric_(fabric),
      domains_(domains),
      control_(control),
      layout_(layout),
      rank_(fabric.rank()),
      seats_(static_cast<std::size_t>(fabric.size())) {}

void Carrier::say(int peer, const Said& said) {
  send(peer, {Kind::statement, static_cast<std::uint64_t>(rank_), 0, said});
}

void Carrier::tell_last(int peer, int seat, const Said& said) {
  std::uint64_t ticket = said.ticket;
  if (ticket == 0) {
    const std::scoped_lock lock(mutex_);
    ticket = seats_[static_cast<std::size_t>(seat)].ticket;
  }
  send(peer, {Kind::last, static_cast<std::uint64_t>(seat), ticket, said});
}

void Carrier::tell_waits(int peer, protocol::Epoch epoch, int seat, const Said& said,
                         std::span<const std::byte> card) {
  send(peer, {Kind::waits, static_cast<std::uint64_t>(seat), epoch, said}, card);
}

void Carrier::tell_memory(int peer, std::uint64_t ticket, std::span<const std::byte> card) {
  send(peer, {Kind::memory, static_cast<std::uint64_t>(rank_), ticket, {}}, card);
}

void Carrier::leave() {
  Said said;
  read_statement(control_, layout_, said);
  for (int peer = 0; peer < domains_.ranks(); ++peer) {
    if (far(peer)) tell_last(peer, rank_, said);
  }
}

void Carrier::evict(int peer, protocol::Epoch epoch) {
  Text text{Kind::evicted, static_cast<std::uint64_t>(peer), 0, {}};
  text.said.epoch = epoch;
  send(peer, text);
}

void Carrier::send(int peer, const Text& text, std::span<const std::byte> card) {
  static_assert(std::is_trivially_copyable_v<Text>);
  const auto head = std::as_bytes(std::span(&text, 1));
  if (card.empty()) return fabric_.send_text(peer, head);
  std::vector<std::byte> all(head.begin(), head.end());
  all.insert(all.end(), card.begin(), card.end());
  fabric_.send_text(peer, all);
}

std::optional<Carrier::Said> Carrier::heard(int peer, std::uint64_t& seen) {
  const std::scoped_lock lock(mutex_);
  const Seat& seat = seats_[static_cast<std::size_t>(peer)];
  if (seat.count == seen) return std::nullopt;
  seen = seat.count;
  return seat.newest;
}

std::optional<Carrier::Said> Carrier::last(int seat) {
  const std::scoped_lock lock(mutex_);
  return seats_[static_cast<std::size_t>(seat)].last;
}

std::optional<Carrier::Waiting> Carrier::asks(int seat) {
  const std::scoped_lock lock(mutex_);
  return seats_[static_cast<std::size_t>(seat)].asks;
}

std::optional<Carrier::Waiting> Carrier::waiting(int seat) {
  const std::scoped_lock lock(mutex_);
  return seats_[static_cast<std::size_t>(seat)].waiting;
}

std::optional<std::vector<std::byte>> Carrier::memory(int peer, std::uint64_t ticket) {
  const std::scoped_lock lock(mutex_);
  const Seat& seat = seats_[static_cast<std::size_t>(peer)];
  if (seat.memory_for != ticket) return std::nullopt;
  return seat.memory;
}

void Carrier::seat(int seat, std::uint64_t ticket) {
  const std::scoped_lock lock(mutex_);
  Seat& there = seats_[static_cast<std::size_t>(seat)];
  if (there.ticket == ticket) return;
  there.ticket = ticket;
  there.newest = {};
  there.last.reset();
}

/// Whether what came can be: seats and sets of the group, about who may say it.
bool Carrier::sound(int peer, const Text& text) const {
  const auto ranks = static_cast<std::uint64_t>(domains_.ranks());
  if (!far(peer) || text.seat >= ranks) return false;
  const auto seat = static_cast<int>(text.seat);
  const Member::Seats all = Member::Seats::first(domains_.ranks());
  const Said& said = text.said;
  if (!all.contains(said.suspects) || !all.contains(said.quarantined) ||
      !of_ranks(said.view, all) || !of_ranks(said.proposal, all)) {
    return false;
  }
  switch (text.kind) {
    case Kind::statement: return seat == peer && said.epoch != 0;
    case Kind::last: return domains_.together(seat, peer);
    case Kind::evicted: return seat == rank_ && said.epoch != 0;
    case Kind::memory: return seat == peer;
    case Kind::waits: return domains_.together(seat, peer) && said.epoch == 0 && said.ticket != 0;
  }
  return false;
}

void Carrier::take(Seat& seat, const Text& text, std::span<const std::byte> card) {
  const Said& said = text.said;
  switch (text.kind) {
    case Kind::evicted:  // as a rank of this domain would write it
      engine::evict(control_, layout_, said.epoch);
      return;
    case Kind::waits: {
      auto& waiting = card.empty() ? seat.asks : seat.waiting;
      waiting = {text.about, said, {card.begin(), card.end()}};
      return;
    }
    case Kind::memory:
      seat.memory_for = text.about;
      seat.memory.assign(card.begin(), card.end());
      return;
    case Kind::last:
      if (text.about == seat.ticket) seat.last = said;
      return;
    case Kind::statement:
      if (said.ticket != seat.ticket ||
          std::pair(said.epoch, said.number) <= std::pair(seat.newest.epoch, seat.newest.number)) {
        return;
      }
      seat.newest = said;
      ++seat.count;
  }
}

void Carrier::take(int peer, std::span<const std::byte> bytes) {
  Text text;
  if (bytes.empty()) {
    DeathWatch::tell();  // a failure broadcast has come, too, a fence or a link
  } else if (bytes.size() >= sizeof text) {
    std::memcpy(&text, bytes.data(), sizeof text);
    const auto card = bytes.subspan(sizeof text);
    const bool sent_on = text.kind == Kind::waits && text.seat != static_cast<std::uint64_t>(peer);
    const bool has_card = sent_on || text.kind == Kind::memory;
    if (!sound(peer, text) || card.empty() == has_card) return;
    const std::scoped_lock lock(mutex_);
    take(seats_[text.seat], text, card);
  } else {
    return;
  }
  ring(control_, layout_);
}

}  // namespace ferry::engine

#include "engine/membership/seating.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <exception>
#include <iterator>
#include <utility>

#include "engine/channel.hpp"

namespace ferry::engine {

void evict(std::byte* control, const ControlLayout& layout, protocol::Epoch epoch) {
  auto* word = reinterpret_cast<std::uint64_t*>(control + layout.evicted);
  // Release, and before this rank changes any memory: who reads it later reads this, too.
  std::atomic_ref(*word).store(epoch, std::memory_order_release);
}

void ring(std::byte* control, const ControlLayout& layout) {
  const protocol::Flag bell = bell_of(control, layout);
  // Release: who finds the bell rung finds what was said.
  bell.fetch_add(1, protocol::order::release);
  bell.wake();
}

std::uint64_t read_statement(std::byte* control, const ControlLayout& layout, Member::Said& said) {
  std::array<std::uint64_t, kStatementWords> text{};
  const std::uint64_t number = board_of(control, layout).read(text.data());
  said = std::bit_cast<Member::Said>(text);
  return number;
}

bool of_ranks(const Member::View& view, const Member::Seats& all) {
  for (const protocol::Join& join : view.joins) {
    const bool named = join.seat < static_cast<std::uint64_t>(SeatTraits::kSeats) &&
                       view.live.has(static_cast<int>(join.seat));
    if (join != protocol::Join{} && !named) return false;
  }
  return all.contains(view.live);
}

void Seating::update() {
  guests_.clear();
  for (fabric::Visitor& visitor : lobby_->visitors()) {
    Guest guest;
    read_statement(visitor.control, layout_, guest.said);
    guest.visitor = std::move(visitor);
    guests_.push_back(std::move(guest));
  }
  std::sort(guests_.begin(), guests_.end(), [](const Guest& a, const Guest& b) {
    return std::pair(a.visitor.rank, a.visitor.ticket) <
           std::pair(b.visitor.rank, b.visitor.ticket);
  });
}

bool Seating::try_update() noexcept try {
  update();
  return true;
} catch (const std::exception&) {
  return false;
}

void Seating::hear_waiting(Member& member) const {
  if (member.standing() != Member::Standing::kMember) return;
  for (int seat = 0; seat < fabric_.size(); ++seat) {
    if (member.view().live.has(seat)) continue;
    const auto first = std::find_if(guests_.begin(), guests_.end(), [&](const Guest& guest) {
      return guest.visitor.rank == seat && guest.waits();
    });
    if (first != guests_.end()) {
      member.hear(seat, first->said);
    } else {
      member.suspect(seat);  // who waited there has gone
    }
  }
}

std::vector<Seating::Guest> Seating::waiting(const Member& member) const {
  std::vector<Guest> all;
  std::copy_if(guests_.begin(), guests_.end(), std::back_inserter(all), [&](const Guest& guest) {
    return guest.waits() && !member.view().live.has(guest.visitor.rank);
  });
  return all;
}

bool Seating::one_waits(const Member& member) const {
  return std::any_of(guests_.begin(), guests_.end(), [&](const Guest& guest) {
    const int seat = guest.visitor.rank;
    if (!guest.waits() || member.view().live.has(seat)) return false;
    // Quarantine ends in the next regroup, if whom the others went on without has ended since.
    return !member.quarantined().has(seat) || fabric_.peer_state(seat) == fabric::PeerState::dead;
  });
}

bool Seating::any_seated() const {
  return std::any_of(guests_.begin(), guests_.end(),
                     [](const Guest& guest) { return guest.seated(); });
}

const Seating::Guest* Seating::holder(int seat) const {
  const Guest* newest = nullptr;
  for (const Guest& guest : guests_) {
    if (guest.visitor.rank != seat || !guest.seated()) continue;
    if (newest == nullptr || guest.said.epoch > newest->said.epoch) newest = &guest;
  }
  return newest;
}

const Member::Said* Seating::newest() const {
  const Member::Said* newest = nullptr;
  for (const Guest& guest : guests_) {
    if (newest == nullptr || guest.said.epoch > newest->epoch) newest = &guest.said;
  }
  return newest;
}

void Seating::knock_all() const {
  // First all, then the bells: the leader must not miss what another rank has heard.
  for (const Guest& guest : guests_) {
    // Release: who finds it finds the door, and what was said there.
    knocks_of(guest.visitor.control, layout_).fetch_add(1, protocol::order::release);
  }
  for (const Guest& guest : guests_) ring(guest.visitor.control, layout_);
}

void Seating::note_joins(const Member::View& view) {
  for (const protocol::Join& join : view.joins) {
    if (join.ticket != 0) seats_[join.seat] = {view.epoch, view.step + 1};
  }
}

void Seating::seat(int seat, std::uint64_t ticket, const Member::View& view) {
  lobby_->seat(seat, ticket);
  note_joins(view);
  ever_seated_ = true;
}

bool Seating::former_may_write() const {
  return lobby_ != nullptr && lobby_->former_runs([this](std::byte* control) {
    return Channel::at_rest(control, layout_);
  });
}

void Seating::seat_all(const Member::View& view) {
  update();
  note_joins(view);
  for (int seat = 0; seat < fabric_.size(); ++seat) {
    if (seat == fabric_.rank() || !lobby_->has(seat)) continue;
    const Guest* there = holder(seat);
    const std::uint64_t admitted = view.ticket(seat);  // with this process
    if (view.live.has(seat) && (admitted != 0 || there != nullptr)) {
      lobby_->seat(seat, admitted != 0 ? admitted : there->visitor.ticket);
    } else {
      lobby_->vacate(seat);
    }
  }
  ever_seated_ = true;
}

}  // namespace ferry::engine

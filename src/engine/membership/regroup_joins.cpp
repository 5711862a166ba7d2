// How processes come into the group (seating.hpp, linking.hpp): of those that join, and of the
// ranks.
#include <algorithm>
#include <string>

#include "base/text.hpp"
#include "engine/membership/regroup.hpp"
#include "platform/death_watch.hpp"

namespace ferry::engine {
namespace {

/// So often a process that joins tells that it waits.
constexpr auto kKnockPeriod = std::chrono::milliseconds(100);
/// A process that joins takes a group of one domain as ended when it has seen no rank for so long.
constexpr auto kGone = std::chrono::seconds(1);

}  // namespace

/// Before this rank has its seat: of those that have answered.
const Regroup::Said* Regroup::newest_far() const {
  const Said* newest = nullptr;
  for (int peer = 0; peer < channel_.size(); ++peer) {
    const Said& said = said_[static_cast<std::size_t>(peer)];
    if (far(peer) && said.epoch != 0 && (newest == nullptr || said.epoch > newest->epoch)) {
      newest = &said;
    }
  }
  return newest;
}

/// Of a process in whose domain nobody is left: knocks at the ranks of the others, hears those that
/// answer, and tells them that it waits. It names the epoch only if all of that view have answered:
/// who leads the next agreement then knows of it, and none has its seat in quarantine.
void Regroup::knock() {
  if (!carrier_ || seating_.any_seated()) return;
  const bool again = Clock::now() >= knock_at_;
  if (again) {
    knock_at_ = Clock::now() + kKnockPeriod;
    linking_.knock(seating_.elsewhere());
    if (cards_) linking_.knock(cards_());
  }
  Member::Seats answered;
  for (int peer = 0; peer < channel_.size(); ++peer) {
    const auto p = static_cast<std::size_t>(peer);
    if (!far(peer) || !linking_.answered(peer)) continue;
    answered.add(peer);
    if (const auto said = carrier_->heard(peer, heard_[p])) said_[p] = *said;
  }
  const Said* newest = newest_far();
  const bool all = newest != nullptr && answered.contains(newest->view.live);
  for (int peer = answered.next(); again && peer >= 0; peer = answered.next(peer + 1)) {
    carrier_->tell_waits(peer, all ? newest->epoch : 0, channel_.rank(), member_->statement(), {});
  }
  if (newest == nullptr) return;
  member_->hear(channel_.rank(), *newest);
  if (member_->standing() != Standing::kMember) return;
  for (int peer = answered.next(); peer >= 0; peer = answered.next(peer + 1)) {
    member_->hear(peer, said_[static_cast<std::size_t>(peer)]);
  }
}

/// Holes in far domains of which the view has nobody.
Member::Seats Regroup::seats_of_empty_domains() const {
  Member::Seats seats;
  if (!carrier_) return seats;
  const Member::Seats& live = member_->view().live;
  for (int seat = 0; seat < channel_.size(); ++seat) {
    if (!far(seat)) continue;
    bool empty = true;
    for (int other = live.next(); other >= 0; other = live.next(other + 1)) {
      empty = empty && !carrier_->domains().together(seat, other);
    }
    if (empty) seats.add(seat);
  }
  return seats;
}

void Regroup::answer_knocks() {
  const Member::Seats seats = seats_of_empty_domains();
  for (int seat = seats.next(); seat >= 0; seat = seats.next(seat + 1)) {
    std::uint64_t& ticket = asking_[static_cast<std::size_t>(seat)];
    ticket = linking_.answer(seat);
    if (ticket != 0) carrier_->say(seat, member_->statement());
  }
}

bool Regroup::former_ended(int seat) const {
  return asking_[static_cast<std::size_t>(seat)] != 0 && linking_.proves_end(seat);
}

/// What a process says that knocks for the seat, if it may be taken in now. Of a domain the lowest
/// seat alone: the others come after it, by its door, so that all of a domain share memory.
std::optional<Regroup::Said> Regroup::asking(int seat) const {
  const auto ticket_at = [&](int s) { return asking_[static_cast<std::size_t>(s)]; };
  if (ticket_at(seat) == 0) return std::nullopt;
  for (int lower = 0; lower < seat; ++lower) {
    if (ticket_at(lower) != 0 && carrier_->domains().together(lower, seat)) return std::nullopt;
  }
  const auto asks = carrier_->asks(seat);
  const bool now = asks && asks->epoch == member_->view().epoch &&
                   asks->said.ticket == ticket_at(seat) &&
                   (!member_->quarantined().has(seat) || former_ended(seat));
  if (!now) return std::nullopt;
  return asks->said;
}

/// Of the rank that leads: whether one may be taken in.
bool Regroup::one_asks() const {
  if (member_->view().live.next() != channel_.rank()) return false;
  const Member::Seats seats = seats_of_empty_domains();
  for (int seat = seats.next(); seat >= 0; seat = seats.next(seat + 1)) {
    if (asking(seat)) return true;
  }
  return false;
}

void Regroup::hear_asking() {
  if (member_->standing() != Standing::kMember) return;
  answer_knocks();
  const Member::Seats seats = seats_of_empty_domains();
  for (int seat = seats.next(); seat >= 0; seat = seats.next(seat + 1)) {
    if (former_ended(seat)) member_->release(seat);
    if (const auto said = asking(seat)) {
      member_->hear(seat, *said);
    } else {
      member_->suspect(seat);  // who asked has gone
    }
  }
}

void Regroup::hear_guests() {
  if (!seating_.open() || member_->view().live.count() == channel_.size()) return;
  // Who waits knocks again and again; who waited before may have gone.
  const std::uint64_t knocked = knocks();
  if ((knocked != knocks_heard_ || !waiting_.empty()) && seating_.try_update()) {
    knocks_heard_ = knocked;
    seating_.hear_waiting(*member_);  // forgets who waited before
    waiting_ = seating_.waiting(*member_);
    if (carrier_) {
      waiting_since_ = member_->view().epoch;
      for_far([this](int peer) { tell_waiting(peer); });  // before this rank says that it stopped
    }
  }
  hear_asking();
}

void Regroup::tell_waiting(int peer) const {
  for (const Seating::Guest& guest : waiting_) {
    carrier_->tell_waits(peer, waiting_since_, guest.visitor.rank, guest.said, guest.visitor.card);
  }
}

void Regroup::seat_joiners() {
  const auto& view = member_->view();
  if (member_->standing() != Standing::kMember || view.epoch == seated_) return;
  if (seated_ == 0) {
    seating_.seat_all(view);
    for_far([&](int peer) { linking_.begin(peer, view, view.ticket(peer)); });
  } else {
    for (const protocol::Join& join : view.joins) {
      if (join.ticket == 0) continue;
      const auto seat = static_cast<int>(join.seat);
      if (far(seat)) {
        asking_[join.seat] = 0;
        linking_.begin(seat, view, join.ticket);
        continue;
      }
      seating_.seat(seat, join.ticket, view);
      if (carrier_) carrier_->seat(seat, join.ticket);
      ended_.remove(seat);
      heard_[static_cast<std::size_t>(seat)] = 0;
      said_[static_cast<std::size_t>(seat)] = {};
    }
  }
  seated_ = view.epoch;
}

/// Who can be reached from now on hears what it has missed.
void Regroup::advance_links() {
  Member::Seats failed;
  for (const int peer : linking_.advance(member_->view().live, failed)) {
    if (left_epoch_ >= linking_.since(peer)) memory_->fabric->fence(peer, left_epoch_);
    tell_waiting(peer);
    carrier_->say(peer, member_->statement());
  }
  for (int seat = failed.next(); seat >= 0; seat = failed.next(seat + 1)) member_->suspect(seat);
}

Epoch Regroup::begin_alone() {
  const int self = channel_.rank();
  *member_ = Member::lone_founder(self, arbiter_.has_value());
  linking_.begin_alone();
  seated_ = member_->view().epoch;
  deaths_ = DeathWatch::count();
  return go_on();
}

Epoch Regroup::join() {
  channel_.say_joined(Channel::kJoining);
  channel_.await_join(
      Error(ErrorKind::peer_failed,
            "rank " + std::to_string(channel_.rank()) + ": it has not joined the group yet",
            {channel_.rank(), channel_.rank(), kRegroup, 0, 0, 0}));
  const auto end = Clock::now() + config_.deadline;
  auto ring_at = Clock::now();
  auto gone_at = ring_at + kGone;
  for (;;) {
    if (channel_.left()) throw_destroyed();
    const std::uint64_t rung = bell().load(protocol::order::acquire);
    publish();  // before those that hear the bell read it
    seating_.update();
    for (const Seating::Guest& guest : seating_.guests()) {
      member_->hear(guest.visitor.rank, guest.said);
      if (member_->standing() == Standing::kMember) break;
    }
    knock();
    if (member_->standing() == Standing::kMember) break;
    if (carrier_ || seating_.any_seated()) gone_at = Clock::now() + kGone;
    check_may_join(std::min(end, gone_at));
    if (Clock::now() >= ring_at) {
      seating_.knock_all();
      ring_at = Clock::now() + kKnockPeriod;
    }
    channel_.beat(true);
    if (config_.on_wait) config_.on_wait();
    wait(rung);
  }
  seat_joiners();
  ran_ = Clock::now();
  give_time();
  return agree(0);
}

void Regroup::check_may_join(Clock::time_point end) const {
  const int self = channel_.rank();
  const auto refuse = [&](ErrorKind kind, const std::string& text) {
    throw Error(kind, "rank " + std::to_string(self) + ": cannot join the group: " + text,
                {self, self, kRegroup, 0, 0, 0});
  };
  const Seating::Guest* holder = seating_.holder(self);
  const Said* newest = seating_.newest();
  const std::string there =
      holder == nullptr ? "" : "process " + std::to_string(holder->visitor.pid) + ", ";
  const bool all = newest == nullptr || newest->epoch == 0;  // the view of epoch 1
  if (holder != nullptr && (all || newest->view.live.has(self))) {
    refuse(ErrorKind::refused, "its place is not free: " + there +
                                   "which runs, has it; a process takes the place of one that has "
                                   "ended");
  }
  if (Clock::now() < end) return;
  if (holder != nullptr) {
    refuse(ErrorKind::deadline,
           there + "which the others went on without, still runs; end it first");
  }
  if (!carrier_ || seating_.any_seated()) {
    refuse(ErrorKind::deadline,
           seating_.any_seated()
               ? "its ranks did not call regroup within the deadline; commit returns true on all "
                 "of them while a process waits"
               : "all its ranks have ended");
  }
  const Said* far = newest_far();
  if (far == nullptr) {
    refuse(ErrorKind::deadline,
           "no rank of its domain is left, and none of another domain has answered within the "
           "deadline: they answer in commit and regroup, once they go on without the lost ones");
  }
  refuse(ErrorKind::deadline,
         far->view.live.has(self)
             ? "its place is not free in epoch " + std::to_string(far->epoch)
             : "ranks of other domains have answered, but did not take it in within the deadline: "
               "either they did not call regroup, or the former process of this rank may still "
               "run: a new one starts on its host, or on a new boot of the machine with its "
               "address");
}

bool Regroup::one_waits() {
  if (!seating_.open() || member_->view().live.count() == channel_.size()) return false;
  const std::uint64_t rung = bell().load(protocol::order::acquire);
  if (rung == bell_seen_) return one_waits_;
  bell_seen_ = rung;
  answer_knocks();
  const std::uint64_t knocked = knocks();
  if (knocked != knocks_seen_) {
    knocks_seen_ = knocked;
    guest_waits_ = seating_.try_update() && seating_.one_waits(*member_);
  }
  one_waits_ = guest_waits_ || one_asks();
  return one_waits_;
}

std::vector<int> Regroup::joined(const Epoch& epoch) const {
  std::vector<int> ranks;
  for (const int rank : epoch.ranks) {
    std::uint64_t at = far(rank) ? linking_.joined_at(rank) : seating_.joined_at(rank);
    // One that has not said yet when it joined has committed nothing since.
    if (!far(rank) && at == 0) at = channel_.joined_at(rank);
    if (at == Channel::kJoining || at == epoch.step + 1) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace ferry::engine

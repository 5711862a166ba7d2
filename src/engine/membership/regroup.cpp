#include "engine/membership/regroup.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <string>
#include <utility>

#include "base/text.hpp"
#include "platform/death_watch.hpp"

namespace ferry::engine {
namespace {

/// Ends a sleep at the end of its slice.
struct OneSlice {
  std::uint64_t slice;
  std::uint64_t spin_ns() const { return 0; }
  std::uint64_t slice_ns() const { return slice; }
  protocol::Status check() const {
    protocol::Status status;
    status.code = protocol::Status::Code::kDeadline;
    return status;
  }
};

}  // namespace

bool Regroup::possible(const Memory& memory, bool carrier) {
  const fabric::Fabric& fabric = *memory.fabric;
  if (fabric.size() > Traits::kSeats) return false;
  if (carrier) return true;
  for (int peer = 0; peer < fabric.size(); ++peer) {
    if (fabric.pointer(peer, Channel::kControl) == nullptr) return false;
  }
  return true;
}

void Regroup::check_possible(const char* call, const Memory& memory, bool carrier, int domains) {
  if (possible(memory, carrier)) return;
  const fabric::Fabric& fabric = *memory.fabric;
  throw Error(ErrorKind::unsupported,
              std::string(call) + ": at most " + std::to_string(Traits::kSeats) +
                  " ranks in one domain, or in several that libfabric joins (network ofi), can; "
                  "this group has " +
                  std::to_string(fabric.size()) + " in " + std::to_string(domains) + " over " +
                  std::string(fabric.name()) + "; make a new group",
              {fabric.rank(), -1, call, 0, 0, 0});
}

Regroup::Regroup(std::shared_ptr<Memory> memory, std::shared_ptr<Carrier> carrier, Channel& channel,
                 const GroupConfig& config, const ControlLayout& layout,
                 std::optional<Arbiter> arbiter, std::uint64_t ticket)
    : memory_(std::move(memory)),
      carrier_(std::move(carrier)),
      channel_(channel),
      config_(config),
      layout_(layout),
      arbiter_(std::move(arbiter)),
      member_(std::make_unique<Member>(
          ticket == 0 ? Member::founder(channel.rank(), channel.size(), arbiter_.has_value())
                      : Member::joiner(channel.rank(), ticket, arbiter_.has_value()))),
      seating_(*memory_->fabric, layout),
      linking_(*memory_->fabric, carrier_, channel, ticket),
      seated_(ticket == 0 ? 1 : 0),
      asking_(static_cast<std::size_t>(channel.size())),
      heard_(asking_.size()),
      said_(heard_.size()) {}

Epoch Regroup::run(std::uint64_t step) {
  begin(step);
  return agree(member_->view().epoch);
}

Epoch Regroup::agree(protocol::Epoch since) {
  std::uint64_t newest = since, agreed = since;
  for (;;) {
    if (channel_.left()) throw_destroyed();
    const std::uint64_t rung = bell().load(protocol::order::acquire);
    poll();
    publish();  // before what follows from it
    ask_arbiter();
    while (member_->settle()) {
      seat_joiners();
      publish();
    }
    check_standing();
    // The agreement may have taken the deadline.
    if (std::exchange(agreed, member_->view().epoch) != member_->view().epoch) give_time();
    advance_links();
    // An epoch that was over before this rank went on in it.
    if (member_->view().epoch > left_epoch_ + 1) leave_epoch(member_->view().epoch - 1);
    if (member_->view().epoch != newest && ready_to_go_on()) {
      const Epoch epoch = go_on();
      if (member_->running()) return epoch;
      // Another change: others may have gone on, and who has not heard of it has time again.
      channel_.stop(true);
      leave_epoch(member_->view().epoch);
      newest = member_->view().epoch;
      give_time();
    }
    check_progress();
    wait(rung);
  }
}

void Regroup::begin(std::uint64_t step) {
  const auto failed = channel_.dead();
  if (failed && member_->standing() == Standing::kMinority) throw *failed;
  if (member_->running()) {
    member_->progressed(std::max(channel_.generation(), member_->view().generation - 1), step);
  }
  member_->went_on();
  channel_.stop(true);
  leave_epoch(member_->view().epoch);
  seat_joiners();  // of a call that threw before it could
  // Not later: a leader that found one then would stop ranks that have gone on.
  hear_guests();
  ran_ = Clock::now();
  give_time();
  polled_ = {};
  ended_ = {};  // told again: who did not know of a joiner then has not believed it
  poll();       // what is old already gives no new trust
  member_->stop();
  // Who is late is not waited for again, unless it is here. A death is proven below; others may
  // still come.
  const bool late = failed && failed->kind() == ErrorKind::deadline;
  const int culprit = late ? failed->peer() : -1;
  if (culprit >= 0 && culprit != channel_.rank() && !stopped(culprit)) member_->suspect(culprit);
  suspect_missed_elsewhere();
}

/// Nothing is put any more in this epoch.
void Regroup::leave_epoch(protocol::Epoch epoch) {
  if (left_epoch_ >= epoch) return;
  left_epoch_ = epoch;
  for_far([&](int peer) { memory_->fabric->fence(peer, epoch); });
}

/// Whether nothing of the epoch before is under way any more, to this rank or from it. A far rank
/// that does not say so within the deadline is lost.
bool Regroup::ready_to_go_on() {
  bool ready = true;
  const bool late = Clock::now() >= timeout_;
  for_far([&](int peer) {
    const protocol::Epoch before = member_->view().epoch - 1;
    const bool linked = !linking_.pending(peer);
    if (linked && (linking_.since(peer) > before || memory_->fabric->fenced(peer, before))) return;
    if (late) {
      member_->suspect(peer);
      give_time();
    }
    // Suspected, it ends the epoch before this rank puts anything in it.
    ready = ready && member_->statement().suspects.has(peer);
  });
  return ready;
}

void Regroup::poll() {
  const std::uint64_t deaths = DeathWatch::count();
  const auto now = Clock::now();
  const bool processes = deaths != deaths_ || now - polled_ >= kPollPeriod;
  if (processes) polled_ = now;
  deaths_ = deaths;
  for (int peer = 0; peer < channel_.size(); ++peer) {
    if (peer == channel_.rank()) continue;
    if (far(peer)) {
      poll_far(peer, processes);
    } else {
      poll_near(peer, processes);
    }
  }
}

void Regroup::poll_near(int peer, bool processes) {
  // First whether it can say more, then what it has said.
  const bool ended = channel_.left(peer) ||
                     (processes && memory_->fabric->peer_state(peer) == fabric::PeerState::dead);
  hear(peer);
  // Not of a hole: who waits for it would be forgotten.
  const bool may_end = suspects_ending_ && processes && member_->view().live.has(peer);
  if (may_end && memory_->fabric->peer_ends(peer)) member_->suspect(peer);
  if (!ended) return;
  if (carrier_ && !ended_.has(peer)) {
    ended_.add(peer);
    for_far(
        [&](int far) { carrier_->tell_last(far, peer, said_[static_cast<std::size_t>(peer)]); });
  }
  member_->died(peer);
}

void Regroup::poll_far(int peer, bool processes) {
  const auto p = static_cast<std::size_t>(peer);
  if (!member_->view().live.has(peer)) {
    if (linking_.untouched(peer)) member_->release(peer);
    const auto waiting = carrier_->waiting(peer);
    if (waiting && waiting->epoch == member_->view().epoch) {
      const bool held = member_->quarantined().has(peer);
      if (held && linking_.proves_end(peer, waiting->card)) member_->release(peer);
      member_->hear(peer, waiting->said);
    }
  }
  if (const auto said = carrier_->heard(peer, heard_[p])) {
    said_[p] = *said;
    heard_at_ = Clock::now();
    member_->hear(peer, *said);
    seat_joiners();
  }
  if (const auto last = carrier_->last(peer)) {
    if (last->epoch != 0) member_->hear(peer, *last);
    member_->died(peer);
  } else if (processes && !linking_.pending(peer) &&
             memory_->fabric->peer_state(peer) != fabric::PeerState::alive) {
    member_->suspect(peer);
  }
}

void Regroup::hear(int peer) {
  const auto p = static_cast<std::size_t>(peer);
  if (board_of(control(peer), layout_).number() == heard_[p]) return;
  heard_[p] = read_statement(control(peer), layout_, said_[p]);
  heard_at_ = Clock::now();
  member_->hear(peer, said_[p]);
  seat_joiners();
}

void Regroup::publish() {
  if (member_->statement().number == published_) return;
  const auto text = std::bit_cast<std::array<std::uint64_t, kStatementWords>>(member_->statement());
  const bool said = channel_.unless_left(
      [&] { board_of(control(channel_.rank()), layout_).publish(text.data()); });
  if (!said) throw_destroyed();
  published_ = member_->statement().number;
  for_far([this](int peer) { carrier_->say(peer, member_->statement()); });
  const auto& live = member_->view().live;
  for (int peer = live.next(); peer >= 0; peer = live.next(peer + 1)) {
    if (peer != channel_.rank() && !far(peer)) ring(control(peer), layout_);
  }
}

/// What came before the peer listened is lost.
void Regroup::send_again() {
  for_far([this](int peer) {
    tell_waiting(peer);
    carrier_->say(peer, member_->statement());
    for (int seat = ended_.next(); seat >= 0; seat = ended_.next(seat + 1)) {
      carrier_->tell_last(peer, seat, said_[static_cast<std::size_t>(seat)]);
    }
  });
}

void Regroup::throw_destroyed() const {
  throw Error(ErrorKind::destroyed, "regroup: the group is destroyed",
              {channel_.rank(), -1, kRegroup, channel_.generation(), 0, 0});
}

void Regroup::check_standing() {
  if (member_->standing() == Standing::kEvicted) channel_.throw_evicted(kRegroup);
}

void Regroup::wait(std::uint64_t rung) {
  if (member_->statement().number != published_) return;
  if (DeathWatch::count() != deaths_) return;
  const auto left = std::chrono::nanoseconds(kPollPeriod);
  memory_->fabric->hand_over();
  OneSlice watch{static_cast<std::uint64_t>(left.count())};
  (void)bell().wait_until([rung](std::uint64_t seen) { return seen != rung; }, watch);
}

Epoch Regroup::go_on() {
  channel_.beat(false);
  const auto& view = member_->view();
  Epoch epoch{view.epoch, view.generation, {}, view.step, deaths_};
  for (int peer = 0; peer < channel_.size(); ++peer) {
    if (view.live.has(peer)) {
      epoch.ranks.push_back(peer);
      continue;
    }
    memory_->fabric->forget(peer);
    if (asking_[static_cast<std::size_t>(peer)] != 0) continue;  // the lost one was excluded before
    if (far(peer)) {
      carrier_->evict(peer, epoch.number);
      memory_->fabric->exclude(peer);
      continue;
    }
    evict(control(peer), layout_, epoch.number);
  }
  if (channel_.joined_at(channel_.rank()) == Channel::kJoining) channel_.say_joined(view.step + 1);
  // `one_waits` reads anew, and if some waited before this epoch, looks for those it has no seat
  // for.
  bell_seen_ = ~bell().load(protocol::order::relaxed);
  if (!waiting_.empty()) knocks_seen_ = ~knocks();
  guest_waits_ = false;
  channel_.begin_epoch(epoch);
  free_held();
  return epoch;
}

bool Regroup::lost_may_write() const {
  if (seating_.former_may_write() || linking_.former_may_write()) return true;
  for (int peer = 0; peer < channel_.size(); ++peer) {
    if (channel_.has(peer) || channel_.at_rest(peer)) continue;
    if (far(peer)) {
      if (linking_.untouched(peer)) continue;  // nobody was ever there
      return true;                             // what it has sent may still be under way
    }
    if (memory_->fabric->peer_state(peer) != fabric::PeerState::dead) return true;
  }
  return false;
}

void Regroup::free_held() const {
  if (memory_->arena.holds_back() && !lost_may_write()) memory_->arena.free_held();
}

}  // namespace ferry::engine

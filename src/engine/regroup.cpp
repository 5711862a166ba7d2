#include "engine/regroup.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <string>
#include <utility>

#include "base/text.hpp"
#include "fabric/death_watch.hpp"

namespace ferry::engine {
namespace {

constexpr const char* kRegroup = "regroup";
/// How often processes are looked at without the kernel having told of a death.
constexpr auto kPollPeriod = std::chrono::milliseconds(20);
/// A round that has not ended after so long is begun anew.
constexpr auto kRetryPeriod = std::chrono::milliseconds(250);

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

bool Regroup::possible(const Memory& memory) {
  const fabric::Fabric& fabric = *memory.fabric;
  if (fabric.size() > Traits::kSeats) return false;
  for (int peer = 0; peer < fabric.size(); ++peer) {
    if (fabric.pointer(peer, Channel::kControl) == nullptr) return false;
  }
  return true;
}

Regroup::Regroup(std::shared_ptr<Memory> memory, Channel& channel, const GroupConfig& config,
                 const ControlLayout& layout)
    : memory_(std::move(memory)),
      channel_(channel),
      config_(config),
      layout_(layout),
      member_(std::make_unique<Member>(Member::founder(channel.rank(), channel.size()))),
      heard_(static_cast<std::size_t>(channel.size())),
      said_(heard_.size()) {
  static_assert(sizeof(Said) % sizeof(std::uint64_t) == 0);
  static_assert(sizeof(Said) <= kStatementBytes);
}

protocol::Board<> Regroup::board(int peer) const {
  return {control(peer) + layout_.statement, kWords};
}

protocol::Flag Regroup::bell(int peer) const {
  return protocol::Flag{reinterpret_cast<std::uint64_t*>(control(peer) + layout_.bell)};
}

Epoch Regroup::run(std::uint64_t step) {
  begin(step);
  const std::uint64_t epoch = member_->view().epoch;
  std::uint64_t newest = epoch;
  for (;;) {
    if (channel_.left()) throw_destroyed();
    const std::uint64_t rung = bell(channel_.rank()).load(protocol::order::acquire);
    poll();
    publish();  // before what follows from it
    while (member_->settle()) publish();
    check_standing();
    if (member_->view().epoch > epoch && member_->running()) return go_on();
    if (member_->view().epoch != newest) {  // another loss: who has not heard of it has time again
      newest = member_->view().epoch;
      timeout_ = Clock::now() + config_.deadline;
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
  channel_.stop();
  timeout_ = Clock::now() + config_.deadline;
  polled_ = {};
  poll();  // what is old already gives no new trust
  member_->stop();
  // Who is late is not waited for again, unless it is here. A death is proven below; others may
  // still come.
  const bool late = failed && failed->kind() == ErrorKind::deadline;
  const int culprit = late ? failed->peer() : -1;
  if (culprit >= 0 && culprit != channel_.rank() && !stopped(culprit)) member_->suspect(culprit);
}

void Regroup::poll() {
  const std::uint64_t deaths = fabric::DeathWatch::count();
  const auto now = Clock::now();
  const bool processes = deaths != deaths_ || now - polled_ >= kPollPeriod;
  if (processes) polled_ = now;
  deaths_ = deaths;
  for (int peer = 0; peer < channel_.size(); ++peer) {
    if (peer == channel_.rank()) continue;
    // First whether it can say more, then what it has said.
    const bool ended = channel_.left(peer) ||
                       (processes && memory_->fabric->peer_state(peer) == fabric::PeerState::dead);
    hear(peer);
    if (ended) member_->died(peer);
  }
}

void Regroup::hear(int peer) {
  const auto p = static_cast<std::size_t>(peer);
  const protocol::Board<> theirs = board(peer);
  if (theirs.number() == heard_[p]) return;
  std::array<std::uint64_t, kWords> text{};
  heard_[p] = theirs.read(text.data());
  said_[p] = std::bit_cast<Said>(text);
  heard_at_ = Clock::now();
  member_->hear(peer, said_[p]);
}

void Regroup::publish() {
  if (member_->statement().number == published_) return;
  const auto text = std::bit_cast<std::array<std::uint64_t, kWords>>(member_->statement());
  const bool said = channel_.unless_left([&] { board(channel_.rank()).publish(text.data()); });
  if (!said) throw_destroyed();
  published_ = member_->statement().number;
  const auto& live = member_->view().live;
  for (int peer = live.next(); peer >= 0; peer = live.next(peer + 1)) {
    if (peer == channel_.rank()) continue;
    // Release: who finds the bell rung finds what was said.
    bell(peer).fetch_add(1, protocol::order::release);
    bell(peer).wake();
  }
}

void Regroup::throw_destroyed() const {
  throw Error(ErrorKind::destroyed, "regroup: the group is destroyed",
              {channel_.rank(), -1, kRegroup, channel_.generation(), 0, 0});
}

void Regroup::check_standing() {
  if (member_->standing() == Standing::kEvicted) channel_.throw_evicted(kRegroup);
}

void Regroup::suspect_silent() {
  const Member::Seats live = member_->view().live - member_->statement().suspects;
  for (int peer = live.next(); peer >= 0; peer = live.next(peer + 1)) {
    if (peer == channel_.rank()) continue;
    if (!stopped(peer) || !channel_.waits(peer)) member_->suspect(peer);
  }
}

bool Regroup::stopped(int peer) const {
  const Said& said = said_[static_cast<std::size_t>(peer)];
  return said.epoch == member_->view().epoch && said.stopped != 0;
}

void Regroup::check_progress() {
  channel_.beat(true);
  if (config_.on_wait) config_.on_wait();
  const auto now = Clock::now();
  if (now >= timeout_) {
    timeout_ = now + config_.deadline;
    suspect_silent();
    if (member_->minority()) {
      const Member::Seats gone = may_run();
      const std::string text =
          "rank " + std::to_string(channel_.rank()) + ": regroup: " + names(gone) +
          " cannot be reached but may still run, and the ranks that are left are no majority of "
          "epoch " +
          std::to_string(member_->view().epoch) + " (" + names(member_->view().live) +
          "); end here, or make a new group once those are known to be dead";
      give_up(Error(ErrorKind::deadline, text,
                    {channel_.rank(), gone.next(), kRegroup, channel_.generation(), 0, 0}));
    }
  }
  if (now - heard_at_ >= kRetryPeriod) {
    heard_at_ = now;
    member_->retry();
  }
}

void Regroup::give_up(const Error& error) {
  member_->give_up();
  channel_.give_up(error);
  throw error;
}

Regroup::Member::Seats Regroup::may_run() const {
  Member::Seats some;
  const Member::Seats& suspects = member_->statement().suspects;
  for (int peer = suspects.next(); peer >= 0; peer = suspects.next(peer + 1)) {
    const bool ended =
        channel_.left(peer) || memory_->fabric->peer_state(peer) == fabric::PeerState::dead;
    if (!ended) some.add(peer);
  }
  return some;
}

std::string Regroup::names(const Member::Seats& seats) const {
  std::vector<int> ranks;
  for (int seat = seats.next(); seat >= 0; seat = seats.next(seat + 1)) ranks.push_back(seat);
  return spell_ranks(ranks);
}

void Regroup::wait(std::uint64_t rung) {
  if (member_->statement().number != published_) return;
  if (fabric::DeathWatch::count() != deaths_) return;
  const auto left = std::chrono::nanoseconds(kPollPeriod);
  OneSlice watch{static_cast<std::uint64_t>(left.count())};
  (void)bell(channel_.rank())
      .wait_until([rung](std::uint64_t seen) { return seen != rung; }, watch);
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
    auto* word = reinterpret_cast<std::uint64_t*>(control(peer) + layout_.evicted);
    // Release, and before this rank changes any memory: who reads it later reads this, too.
    std::atomic_ref(*word).store(epoch.number, std::memory_order_release);
  }
  channel_.begin_epoch(epoch);
  free_held();
  return epoch;
}

void Regroup::free_held() const {
  if (!memory_->arena.holds_back()) return;
  for (int peer = 0; peer < channel_.size(); ++peer) {
    if (channel_.has(peer)) continue;
    if (memory_->fabric->peer_state(peer) != fabric::PeerState::dead) return;
  }
  memory_->arena.free_held();
}

}  // namespace ferry::engine

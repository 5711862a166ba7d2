// Of a regroup that takes long: who is counted as gone, and what a rank does that is left without a
// quorum.
#include <algorithm>
#include <string>
#include <vector>

#include "base/text.hpp"
#include "engine/membership/regroup.hpp"

namespace ferry::engine {
namespace {

/// A round that has not ended after so long is begun anew.
constexpr auto kRetryPeriod = std::chrono::milliseconds(250);
/// A rank that has not looked for so long was stopped itself, or kept from the CPU. That time does
/// not count, and then it blames nobody for so long.
constexpr auto kPause = std::chrono::milliseconds(100),
               kHeardAgain = std::chrono::milliseconds(500);

}  // namespace

/// Of the leader: first for its promise, then for its vote.
void Regroup::ask_arbiter() {
  while (arbiter_ && member_->needs_arbiter() && Clock::now() >= ask_at_) {
    try {
      const auto answer = arbiter_->ask(member_->statement());
      if (!answer) {
        if (arbiter_problem_.empty()) arbiter_problem_ = "it has not answered yet";
        return;
      }
      member_->hear_arbiter(*answer);
      arbiter_problem_.clear();
    } catch (const Error& error) {  // another rank asks now, most often
      arbiter_problem_ = error.what();
      ask_at_ = Clock::now() + kPollPeriod;
    }
    publish();
  }
}

/// From now on everybody has a deadline before silence is held against it.
void Regroup::give_time() {
  timeout_ = Clock::now() + config_.deadline;
  last_chance_ = false;
}

/// Ranks of this domain that those of other domains do not hear. The kernel tells of no death: they
/// are stopped, unless they can be seen to wait.
void Regroup::suspect_missed_elsewhere() {
  if (!carrier_) return;
  const Member::Seats& live = member_->view().live;
  for (int peer = live.next(); peer >= 0; peer = live.next(peer + 1)) {
    if (peer == channel_.rank() || far(peer) || stopped(peer) || channel_.waits(peer)) continue;
    if (channel_.told_dead(peer)) member_->suspect(peer);
  }
}

void Regroup::suspect_silent() {
  const Member::Seats live = member_->view().live - member_->statement().suspects;
  for (int peer = live.next(); peer >= 0; peer = live.next(peer + 1)) {
    if (peer != channel_.rank() && !takes_part(peer)) member_->suspect(peer);
  }
}

/// Those that were silent by chance.
void Regroup::trust_again() {
  const Member::Seats suspects = member_->statement().suspects;
  for (int peer = suspects.next(); peer >= 0; peer = suspects.next(peer + 1)) {
    if (takes_part(peer)) member_->trust(peer);
  }
}

bool Regroup::takes_part(int peer) const {
  const bool here = far(peer) ? memory_->fabric->peer_state(peer) == fabric::PeerState::alive
                              : channel_.waits(peer);
  return here && stopped(peer);
}

bool Regroup::stopped(int peer) const {
  const Said& said = said_[static_cast<std::size_t>(peer)];
  return said.epoch == member_->view().epoch && said.stopped != 0;
}

void Regroup::check_progress() {
  channel_.beat(true);
  if (config_.on_wait) config_.on_wait();
  const auto now = Clock::now();
  // The others may not have run either: they must be heard first.
  if (now - ran_ > kPause) timeout_ = std::max(timeout_ + (now - ran_), now + kHeardAgain);
  ran_ = now;
  if (last_chance_) trust_again();
  if (now >= timeout_ && !member_->running()) {
    suspect_silent();
    const bool refused = member_->needs_arbiter() && !arbiter_problem_.empty();
    const bool hopeless = member_->minority() || refused;
    // For good, so not because a rank was kept from the CPU at this moment.
    const bool again = hopeless && !last_chance_;
    last_chance_ = again;
    timeout_ = now + (again ? std::chrono::nanoseconds(kHeardAgain) : config_.deadline);
    if (hopeless && !again) {
      const Member::Seats gone = may_run();
      const std::string text = "rank " + std::to_string(channel_.rank()) +
                               ": regroup: " + names(gone) +
                               " cannot be reached but may still run, and " + why_no_quorum() +
                               "; end here, or make a new group once those are known to be dead";
      give_up(Error(ErrorKind::deadline, text,
                    {channel_.rank(), gone.next(), kRegroup, channel_.generation(), 0, 0}));
    }
  }
  if (now - heard_at_ >= kRetryPeriod) {
    heard_at_ = now;
    send_again();
    member_->retry();
  }
}

std::string Regroup::why_no_quorum() const {
  const Member::Seats& live = member_->view().live;
  const Member::Seats left = live - member_->statement().suspects;
  std::string text = "the ranks that are left are no majority of epoch " +
                     std::to_string(member_->view().epoch) + " (" + names(live) + ")";
  if (2 * left.count() != live.count()) return text;
  if (!arbiter_) return text + ", but half of it, and the group has no arbiter";
  return text + ", but half of it, and the arbiter did not answer" +
         (arbiter_problem_.empty() ? std::string() : " (" + arbiter_problem_ + ")");
}

void Regroup::give_up(const Error& error) {
  member_->give_up();
  channel_.give_up(error);
  throw error;
}

Member::Seats Regroup::may_run() const {
  Member::Seats some;
  const Member::Seats& suspects = member_->statement().suspects;
  for (int peer = suspects.next(); peer >= 0; peer = suspects.next(peer + 1)) {
    if (!ended(peer)) some.add(peer);
  }
  return some;
}

bool Regroup::ended(int peer) const {
  if (far(peer)) return carrier_->last(peer).has_value();
  return channel_.left(peer) || memory_->fabric->peer_state(peer) == fabric::PeerState::dead;
}

std::string Regroup::names(const Member::Seats& seats) const {
  std::vector<int> ranks;
  for (int seat = seats.next(); seat >= 0; seat = seats.next(seat + 1)) ranks.push_back(seat);
  return spell_ranks(ranks);
}

}  // namespace ferry::engine

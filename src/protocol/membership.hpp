// Membership: the ranks of an elastic group agree who is in it. Seats have fixed numbers; each
// epoch has one view: who holds which seat, from which generation and step they go on.
//
// Every rank says one statement, which replaces what it said before; engines carry it to all peers,
// late, in any order or never, but whole. Whoever suspects a peer, or hears a joiner, stops: it
// uses no generation of its epoch any more. The lowest seat that is not suspected leads a round:
// - offer: a rank that hears of a newer round promises to accept nothing of older ones. Its
//   statement says its newest generation and step, whom it suspects, and what it accepted last;
// - answer: with offers of all whom it does not suspect the leader accepts a view in its round: the
//   one that was accepted in the newest round, otherwise a new one. Who hears of it accepts it too;
// - commit: a view that a quorum accepted in one round is the view of the next epoch.
// - going on: a member of that epoch that has not begun to use it minds no statement of it, unless
//   that suspects somebody: others may be back already, and want another change. So each member
//   goes on in each epoch that loses nobody.
// An agreement among all who are left, without rounds that build on each other, would not do: a
// rank may have heard all answers and committed, and then die or be cut off, while the others,
// who did not, agree on something else under the same epoch.
//
// A quorum is a majority of the view. Those proven dead do not count, but their last statements
// do: "proven" means that the process has ended and that all it said to anybody is here. One whose
// promise is of a newer round counts as any other seat: it may have helped that round. Half of the
// seats are a quorum together with an arbiter, which accepts by the same rules as a rank.
//
// A rank publishes its statement first where those who prove its death read it, then to its peers.
// Otherwise one peer could know of a vote that another, who counts its rank as dead, does not see.
#pragma once

#include <algorithm>
#include <cstdint>

#include "protocol/membership_statement.hpp"

namespace ferry::protocol {

/// The membership of one rank: plain values, no input or output. Engines hand in what they hear and
/// find out, and publish `statement()` whenever its number has changed.
template <class Traits = MembershipTraits>
class Membership {
 public:
  static constexpr int kSeats = Traits::kSeats;
  using Seats = SeatSet<kSeats>;
  using View = MembershipView<Traits>;
  using Said = Statement<Traits>;

  enum class Standing : std::uint64_t {
    kJoining,   ///< not in a view yet
    kMember,    ///< in the view
    kEvicted,   ///< the others went on without it, or it left
    kMinority,  ///< gave up: those in reach are no quorum
  };

  /// Seat `self` of a group that begins with `seats` ranks.
  static constexpr Membership founder(int self, int seats, bool arbiter = false) {
    return founder(self, Seats::first(seats), 1, arbiter);
  }
  /// Of one that begins alone, in epoch 2, for in epoch 1 all seats are taken: the others may join.
  static constexpr Membership lone_founder(int self, bool arbiter = false) {
    return founder(self, Seats::of(self), 2, arbiter);
  }
  /// A process that wants seat `self`. `ticket`: not 0, and no other process ever has the same.
  static constexpr Membership joiner(int self, std::uint64_t ticket, bool arbiter = false) {
    Membership rank(self, arbiter);
    rank.mine().ticket = ticket;
    rank.changed();
    return rank;
  }

  constexpr const Said& statement() const { return heard_[self_]; }
  constexpr const View& view() const { return statement().view; }
  constexpr Standing standing() const { return standing_; }
  constexpr const Seats& quarantined() const { return statement().quarantined; }
  /// Whether this rank may use generations: it is in the view, and nobody wants to change it.
  constexpr bool running() const {
    return standing_ == Standing::kMember && (!Traits::kStops || statement().stopped == 0);
  }
  /// Whether a message of this epoch and generation counts.
  constexpr bool accepts(Epoch epoch, Generation generation) const {
    return running() && epoch == view().epoch && generation >= view().generation;
  }
  /// Whether memory may be granted that these seats could write to in an earlier epoch.
  constexpr bool may_grant(const Seats& writers) const { return (writers & quarantined()).empty(); }

  /// Newest generation used and step committed. Only while `running`.
  constexpr void progressed(Generation generation, std::uint64_t step) {
    mine().generation = generation;
    mine().step = step;
  }

  /// It uses the epoch of its view, and minds what others say of it from now on.
  constexpr void went_on() {
    if (standing_ != Standing::kMember || used_ == view().epoch) return;
    used_ = view().epoch;
    for (int s = view().live.next(); s >= 0; s = view().live.next(s + 1)) {
      if (s != self_ && of_epoch(s)) mind(heard_[s]);
    }
    take_in_joiners();
  }
  /// A change is wanted: stops, and tells the others.
  constexpr void stop() {
    if (standing_ != Standing::kMember || mine().stopped != 0) return;
    mine().stopped = 1;
    changed();
    went_on();
    advance();
  }
  /// The seat is dying, late, or cut off. A waiting joiner is forgotten. `suspect(self)`: this rank
  /// wants to leave.
  constexpr void suspect(int seat) {
    if (standing_ != Standing::kMember) return;
    if (!view().live.has(seat)) {
      heard_[seat] = {};
      return;
    }
    if (mine().suspects.has(seat)) return;
    mine().suspects.add(seat);
    changed();
    stop();
    advance();
  }
  /// The seat is heard again.
  constexpr void trust(int seat) {
    if (!mine().suspects.has(seat) || dead_.has(seat)) return;
    mine().suspects.remove(seat);
    changed();
    advance();
  }
  /// Proven: the process that held the seat last has ended, and its last statement was handed in.
  constexpr void died(int seat) {
    if (standing_ != Standing::kMember) return;
    release(seat);
    if (!view().live.has(seat)) return;
    dead_.add(seat);
    suspect(seat);
    advance();
  }
  /// The process that held the seat last can no longer write to this rank's memory.
  constexpr void release(int seat) {
    if (!mine().quarantined.has(seat)) return;
    mine().quarantined.remove(seat);
    changed();
    take_in_joiners();
  }
  /// The round has made no progress for a while: the leader begins another.
  constexpr void retry() {
    if (stopped_member() && leads()) begin_round();
  }
  /// Whether those that this rank neither suspects nor knows to be dead are no quorum.
  constexpr bool minority() const {
    return standing_ == Standing::kMember &&
           !quorum(live_here() | Seats::of(self_), statement().round, arbiter_exists_ != 0);
  }
  /// For good: it may come back as a joiner.
  constexpr void give_up() { standing_ = Standing::kMinority; }

  /// What a peer, or a joiner of that seat, says.
  constexpr void hear(int seat, const Said& said) {
    if (standing_ == Standing::kEvicted || standing_ == Standing::kMinority) return;
    follow(said);
    if (standing_ != Standing::kMember || seat == self_) return;
    if (said.epoch == 0) return hear_joiner(seat, said);
    const bool current = said.epoch == statement().epoch || !Traits::kEpochs;
    if (!current || !view().live.has(seat) || dead_.has(seat)) return;
    if (heard_[seat].epoch == said.epoch && heard_[seat].number >= said.number) return;
    heard_[seat] = said;
    trust(seat);
    if (!listens() && said.suspects.empty()) return;
    mind(said);
    take_in_joiners();
    advance();
  }

  /// The leader's round needs the arbiter: send it `statement()`, and `hear_arbiter` its answer.
  constexpr bool wants_arbiter() const {
    if (!arbiter_exists_ || !stopped_member() || proposer(statement().round) != self_) return false;
    const bool proposed = statement().accepted == statement().round;
    const bool answered = arbiter_.epoch == statement().epoch &&
                          (proposed ? arbiter_.accepted : arbiter_.round) >= statement().round;
    return !answered && statement().round != 0;
  }
  /// The same, where those in reach are no majority by themselves.
  constexpr bool needs_arbiter() const {
    return wants_arbiter() && !quorum(live_here() | Seats::of(self_), statement().round, false);
  }
  constexpr void hear_arbiter(const Said& state) {
    if (standing_ != Standing::kMember) return;
    follow(state);
    if (standing_ != Standing::kMember || state.epoch != statement().epoch) return;
    arbiter_ = state;
    take(state);
    advance();
  }
  /// What the arbiter's state becomes when it is asked; the caller sets it by compare-and-set.
  static constexpr Said arbitrate(Said state, const Said& asked) {
    if (asked.epoch < state.epoch) return state;
    if (asked.epoch > state.epoch) {
      state = {};
      state.epoch = asked.epoch;
      state.view = asked.view;
    }
    if (Traits::kArbiterPromises && asked.round < state.round) return state;
    state.round = asked.round;
    if (asked.accepted == asked.round) {
      state.accepted = asked.accepted;
      state.proposal = asked.proposal;
    }
    return state;
  }

  /// Commits the view that a quorum accepted, if there is one: true. Call it after each event,
  /// until it is false: the new view may already have to be changed.
  constexpr bool settle() {
    if (!stopped_member() || statement().accepted == 0) return false;
    const std::uint64_t round = statement().accepted;
    Seats votes;
    for (int s = view().live.next(); s >= 0; s = view().live.next(s + 1)) {
      if (of_epoch(s) && heard_[s].accepted == round) votes.add(s);
    }
    const bool arbiter = arbiter_.epoch == statement().epoch && arbiter_.accepted == round;
    if (!quorum(votes, round, arbiter)) return false;
    follow_view(View{statement().proposal});
    return true;
  }

 private:
  static constexpr Membership founder(int self, const Seats& seats, Epoch epoch, bool arbiter) {
    Membership rank(self, arbiter);
    rank.standing_ = Standing::kMember;
    rank.mine().epoch = epoch;
    rank.used_ = epoch;
    rank.mine().view.epoch = epoch;
    rank.mine().view.generation = 1;
    rank.mine().view.live = seats;
    rank.changed();
    return rank;
  }
  constexpr Membership(int self, bool arbiter) : self_(self), arbiter_exists_(arbiter ? 1 : 0) {}

  static constexpr int proposer(std::uint64_t round) {
    return static_cast<int>(round % static_cast<std::uint64_t>(kSeats));
  }
  constexpr Said& mine() { return heard_[self_]; }
  constexpr void changed() { ++mine().number; }
  constexpr bool stopped_member() const {
    return standing_ == Standing::kMember && statement().stopped != 0;
  }
  constexpr bool listens() const {
    return standing_ == Standing::kMember && (used_ == statement().epoch || !Traits::kGoesOn);
  }
  constexpr bool of_epoch(int seat) const { return heard_[seat].epoch == statement().epoch; }
  /// In the view, not suspected and not dead, as far as this rank knows.
  constexpr Seats live_here() const { return (view().live - statement().suspects) - dead_; }
  /// The dead that do not count in `round`.
  constexpr Seats discounted(std::uint64_t round) const {
    Seats set;
    for (int s = dead_.next(); s >= 0; s = dead_.next(s + 1)) {
      const bool newer = of_epoch(s) && heard_[s].round > round;
      if (!newer || !Traits::kLastPromise) set.add(s);
    }
    return set;
  }
  constexpr bool quorum(const Seats& votes, std::uint64_t round, bool arbiter) const {
    const int one = arbiter ? 1 : 0;
    if (Traits::majority(2 * votes.count() + one, view().live.count())) return true;
    const Seats rest = view().live - discounted(round);
    return Traits::majority(2 * (votes & rest).count() + one, rest.count());
  }

  /// Follows a rank, or the arbiter, that is in a later epoch.
  constexpr void follow(const Said& said) {
    if (said.epoch <= statement().epoch) return;
    if (standing_ == Standing::kJoining) {
      const std::uint64_t ticket = said.view.ticket(self_);
      if (Traits::kTickets ? ticket == statement().ticket : said.view.live.has(self_)) {
        follow_view(said.view);
      } else if (said.epoch > asked_ && !said.view.live.has(self_)) {
        asked_ =
            said.epoch;  // the seat is free: asks again, they may have had no use for it before
        changed();
      }
    } else if (said.epoch == statement().epoch + 1 || !Traits::kTickets) {
      follow_view(said.view);
    } else {
      standing_ = Standing::kEvicted;  // it was in none of the views between
    }
  }
  /// The next epoch begins, with or without this rank.
  constexpr void follow_view(const View& next) {
    const bool joins = standing_ == Standing::kJoining;
    const bool given_away = Traits::kTickets && !joins && next.ticket(self_) != 0;
    if (!next.live.has(self_) || given_away) {
      standing_ = Standing::kEvicted;
      return;
    }
    Said said;
    const Seats gone = view().live - next.live;
    said.quarantined = mine().quarantined;
    if (Traits::kQuarantine && !joins) said.quarantined = said.quarantined | (gone - dead_);
    said.suspects = mine().suspects & next.live;
    said.epoch = next.epoch;
    said.ticket = mine().ticket;
    said.number = mine().number + 1;
    said.view = next;
    said.generation = next.generation - 1;
    said.step = next.step;
    mine() = said;
    standing_ = Standing::kMember;
    dead_ = dead_ & next.live;
    for (const Join& join : next.joins) {
      const auto seat = static_cast<int>(join.seat);
      if (join.ticket == 0 || seat == self_) continue;
      heard_[seat] = {};  // no longer one who asks
      heard_[seat].epoch = next.epoch;
      heard_[seat].ticket = join.ticket;
    }
    if (!said.suspects.empty()) stop();
    take_in_joiners();
  }

  constexpr void hear_joiner(int seat, const Said& said) {
    if (Traits::kHoles && view().live.has(seat)) return;
    const Said& last = heard_[seat];
    if (last.ticket == said.ticket && (last.epoch != 0 || last.number >= said.number)) return;
    heard_[seat] = said;
    take_in_joiners();
    advance();
  }
  constexpr bool may_join(int seat) const {
    return heard_[seat].epoch == 0 && heard_[seat].ticket != 0 &&
           (!view().live.has(seat) || !Traits::kHoles);
  }
  /// The leader stops for a joiner as soon as nobody has its seat in quarantine. Another rank, or
  /// earlier, might begin an agreement that leaves it out.
  constexpr void take_in_joiners() {
    if (!listens() || statement().stopped != 0 || !leads()) return;
    for (int s = 0; s < kSeats; ++s) {
      if (s == self_ || !may_join(s)) continue;
      bool free = true;
      for (int m = view().live.next(); m >= 0; m = view().live.next(m + 1)) {
        free = free && of_epoch(m) && !heard_[m].quarantined.has(s);
      }
      if (free || !Traits::kHoles) return stop();
    }
  }

  constexpr void mind(const Said& said) {
    take(said);
    if (said.stopped != 0) stop();
  }
  /// The rules of an acceptor: no round older than its promise.
  constexpr void take(const Said& said) {
    Said& own = mine();
    if (said.round > own.round) {
      own.round = said.round;
      changed();
      stop();
    }
    if (said.accepted == 0 || said.accepted == own.accepted) return;
    if (Traits::kPromises ? said.accepted < own.round : said.accepted < own.accepted) return;
    accept(said.accepted, said.proposal);
    stop();
  }
  constexpr void accept(std::uint64_t round, const View& proposal) {
    mine().accepted = round;
    mine().round = std::max(mine().round, round);
    mine().proposal = proposal;
    changed();
  }

  /// The lowest seat that is not suspected and does not want to leave.
  constexpr bool leads() const {
    const Seats live = live_here();
    for (int s = live.next(); s >= 0; s = live.next(s + 1)) {
      if (of_epoch(s) && heard_[s].suspects.has(s)) continue;
      return s == self_;
    }
    return false;
  }
  constexpr void begin_round() {
    const std::uint64_t seats = static_cast<std::uint64_t>(kSeats);
    mine().round = (mine().round / seats + 1) * seats + static_cast<std::uint64_t>(self_);
    changed();
    advance();
  }
  constexpr void advance() {
    if (!stopped_member()) return;
    const std::uint64_t round = statement().round;
    const bool orphaned = round == 0 || (Traits::kNextLeader && !live_here().has(proposer(round)));
    if (orphaned && leads()) return begin_round();
    if (round != 0 && proposer(round) == self_ && statement().accepted < round) propose(round);
  }

  constexpr void propose(std::uint64_t round) {
    Seats offered;
    for (int s = view().live.next(); s >= 0; s = view().live.next(s + 1)) {
      if (of_epoch(s) && heard_[s].round == round) offered.add(s);
    }
    const Seats live = live_here();
    if (Traits::kOffered && !offered.contains(live)) return;
    const bool arbiter = arbiter_.epoch == statement().epoch && arbiter_.round == round;
    if (!quorum(offered, round, arbiter)) return;
    const Seats known = offered | discounted(round);
    const Said* newest = nullptr;
    if (arbiter && arbiter_.accepted != 0) newest = &arbiter_;
    for (int s = known.next(); s >= 0; s = known.next(s + 1)) {
      if (!of_epoch(s) || heard_[s].accepted == 0) continue;
      if (newest == nullptr || heard_[s].accepted > newest->accepted) newest = &heard_[s];
    }
    if (newest != nullptr && Traits::kAdopts) return accept(round, View{newest->proposal});
    const Seats members = without_complaints(Traits::kOffered ? offered - dead_ : live);
    if (quorum(members, round, arbiter)) accept(round, next_view(members, known));
  }
  constexpr int complaints(int seat, const Seats& among) const {
    if (heard_[seat].suspects.has(seat)) return 2 * kSeats;  // it wants to leave
    int all = (heard_[seat].suspects & among).count();
    for (int s = among.next(); s >= 0; s = among.next(s + 1)) {
      if (heard_[s].suspects.has(seat)) ++all;
    }
    return all;
  }
  /// The members among whom nobody suspects another: who has most to do with complaints goes first.
  constexpr Seats without_complaints(Seats members) const {
    for (;;) {
      int worst = -1, most = 0;
      for (int s = members.next(); s >= 0; s = members.next(s + 1)) {
        const int all = complaints(s, members);
        if (all >= most && all > 0) {
          most = all;
          worst = s;
        }
      }
      if (worst < 0) return members;
      members.remove(worst);
    }
  }
  constexpr View next_view(const Seats& members, const Seats& known) const {
    View next;
    next.epoch = statement().epoch + 1;
    next.live = members;
    Generation newest = statement().generation;
    next.step = statement().step;
    Seats quarantined;
    for (int s = known.next(); s >= 0; s = known.next(s + 1)) {
      if (!of_epoch(s)) continue;
      newest = std::max(newest, heard_[s].generation);
      next.step = Traits::newer(next.step, heard_[s].step);
      if (members.has(s)) quarantined = quarantined | heard_[s].quarantined;
    }
    next.generation = Traits::after(std::max(newest, view().generation));
    int joins = 0;
    for (int s = 0; s < kSeats && joins < Traits::kJoins; ++s) {
      if (!may_join(s) || s == self_) continue;
      if (Traits::kHoles && (quarantined.has(s) || view().live.has(s))) continue;
      next.live.add(s);
      next.joins[joins++] = {static_cast<std::uint64_t>(s), heard_[s].ticket};
    }
    return next;
  }

  int self_;
  int arbiter_exists_;
  Standing standing_ = Standing::kJoining;
  Epoch used_ = 0;      // the newest in which this rank went on
  Epoch asked_ = 0;     // of a joiner: the newest in which it found its seat free
  Seats dead_;          // of the view, proven
  Said heard_[kSeats];  // the newest of each seat; the own one is what this rank says
  Said arbiter_;
};

}  // namespace ferry::protocol

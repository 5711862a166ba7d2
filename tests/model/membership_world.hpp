// Ranks that run protocol/membership.hpp, all that may happen to them, and what must hold. The
// protocol has no shared memory, only statements; so a state is a plain value. Statements arrive in
// the order in which they were sent, except for a bounded number that are late for as long as they
// like; all other events happen at any moment.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "protocol/membership.hpp"

namespace ferry::model {

using protocol::MembershipTraits;

struct SmallTraits : MembershipTraits {
  static constexpr int kSeats = 4;
  static constexpr int kJoins = 1;
  static constexpr bool kKnocksProve = true;  ///< who joins has seen that the former one has ended
};

/// What may happen, and how often.
struct MembershipCase {
  int ranks = 3;
  std::uint64_t deaths = 0;
  std::uint64_t late = 0;  ///< suspicions of ranks that are well
  std::uint64_t cuts = 0;  ///< one-way partitions
  std::uint64_t retries = 0;
  std::uint64_t delays = 1;       ///< statements that others overtake
  std::uint64_t generations = 0;  ///< of each epoch
  std::uint64_t regroups = 0;     ///< stops of ranks that suspect nobody
  bool goes_on = false;           ///< at any moment after a commit, not at once
  bool agreeing = false;          ///< rank 0 has begun a round
  int joins = -1;                 ///< a process that wants this seat
  bool arbiter = false;
  bool gives_up = false;
  bool closes = false;           ///< segments are closed without a proof of death
  bool knocks = false;           ///< who joins runs where the former holder of its seat ran
  std::uint64_t walks = 0;       ///< random walks instead of all states
  std::uint64_t most = 300'000;  ///< states; reaching it is a failure
};

template <class Traits = SmallTraits>
class MembershipWorld {
 public:
  using Rank = protocol::Membership<Traits>;
  using View = typename Rank::View;
  using Said = typename Rank::Said;
  using Seats = typename Rank::Seats;
  using Standing = typename Rank::Standing;

  explicit MembershipWorld(const MembershipCase& what) : case_(what) {}

  static constexpr int kProcesses = 4;
  static constexpr int kEpochs = 14;
  static constexpr std::uint64_t kTicket = 7;

  /// What is under way from one process to another: one statement, as it was when it was sent.
  struct Channel {
    Said said;
    std::uint64_t full = 0;
    std::uint64_t late = 0;  ///< arrives at any time
  };
  struct Process {
    Rank rank = Rank::joiner(0, kTicket);
    Said said;  // published
    std::uint64_t alive = 0;
    std::uint64_t used = 0;  // the newest epoch in which it went on
    std::uint64_t generation = 0, step = 0;
    std::uint64_t granted = 0;   // processes that could write to its memory
    std::uint64_t released = 0;  // those that it knows cannot any more
  };
  struct State {
    std::array<Process, kProcesses> processes;
    std::array<std::array<Channel, kProcesses>, kProcesses> channels;
    std::array<View, kEpochs> decided;
    std::uint64_t cut = 0;  // bit from * kProcesses + to
    std::uint64_t deaths = 0, late = 0, cuts = 0, retries = 0, delays = 0, regroups = 0;
    std::array<std::uint64_t, kProcesses * kProcesses> queue{};  // from * kProcesses + to
    std::uint64_t queued = 0;
    std::uint64_t joined = 0;  // the epoch in which the joiner came in
    Said arbiter;
  };
  static_assert(std::is_trivially_copyable_v<State>);

  State start() {
    State s;
    s.decided[at(static_cast<int>(founder(0).view().epoch))] = founder(0).view();
    for (int p = 0; p < count(); ++p) {
      Process& mine = s.processes[at(p)];
      mine.rank = p < case_.ranks ? founder(p) : Rank::joiner(case_.joins, kTicket, case_.arbiter);
      mine.alive = 1;
      mine.used = mine.rank.view().epoch;
      mine.granted = p < case_.ranks ? (1u << case_.ranks) - 1 : 0;
    }
    for (int p = 0; p < count(); ++p) publish(s, p);
    // The founders have heard each other.
    healing_ = true;
    for (int p = 0; p < case_.ranks; ++p) {
      for (int q = 0; q < case_.ranks; ++q) deliver(s, p, q, 0);
    }
    healing_ = false;
    if (case_.agreeing) {
      const Process before = s.processes[0];
      s.processes[0].rank.stop();
      follow_up(s, 0, before, 0);
    }
    return s;
  }

  static constexpr int kKinds = 17;
  int events() const { return kKinds * kProcesses * kProcesses; }
  /// False: it cannot happen, or changes nothing.
  bool apply(State& s, int event) {
    const bool happens = try_event(s, event);
    if (happens) forget_those_gone(s);
    return happens;
  }
  /// Quickly: whether `apply` is worth a try.
  bool may(const State& s, int event) const {
    const int kind = event / (kProcesses * kProcesses);
    const int p = event / kProcesses % kProcesses, q = event % kProcesses;
    if (p >= count() || q >= count() || (kind >= 7 && q != 0) || (kind < 7 && p == q)) return false;
    if (kind < 3) return may_arrive(s, p, q) && (kind == 0 || s.deaths < case_.deaths);
    if (kind == 4) return s.processes[at(q)].alive == 0;
    if (kind == 5) return case_.closes;
    if (kind == 6) return s.cuts < case_.cuts;
    if (kind == 7) return s.retries < case_.retries;
    if (kind == 8) return case_.arbiter;
    if (kind == 9) return case_.gives_up;
    if (kind == 10) return s.deaths < case_.deaths;
    if (kind == 13) return case_.knocks;
    if (kind == 14) return case_.goes_on;
    if (kind == 15) return s.regroups < case_.regroups;
    return kind == 3 || kind == 16 || case_.generations > 0;
  }
  std::string name(int event) const {
    static const char* const kNames[] = {"hears",
                                         "hears, dies unheard",
                                         "hears, dies speaking",
                                         "suspects",
                                         "proves the death of",
                                         "closes to",
                                         "is not heard by",
                                         "retries",
                                         "asks the arbiter",
                                         "gives up",
                                         "dies",
                                         "uses a generation",
                                         "commits a step",
                                         "has it from who joins that the former one has ended",
                                         "goes on",
                                         "calls regroup",
                                         "the next statement is late"};
    const int kind = event / (kProcesses * kProcesses);
    const int p = event / kProcesses % kProcesses, q = event % kProcesses;
    const std::string a = std::to_string(kind < 3 ? q : p), b = std::to_string(kind < 3 ? p : q);
    return a + " " + kNames[kind] + (kind < 7 ? " " + b : "");
  }
  std::uint64_t newest_epoch(const State& s) const {
    std::uint64_t epoch = 0;
    for (int p = 0; p < count(); ++p) {
      if (active(s, p)) epoch = std::max(epoch, s.processes[at(p)].rank.view().epoch);
    }
    return epoch;
  }
  /// Notes what must not be; `progress`: also whether the group can go on from here.
  void check(const State& s, bool progress) {
    expect_invariants(s);
    if (progress && failure_.empty()) expect_progress(s);
  }
  /// Empty: none was noted.
  const std::string& failure() const { return failure_; }

 private:
  static std::size_t at(int i) { return static_cast<std::size_t>(i); }
  int count() const { return case_.ranks + (case_.joins >= 0 ? 1 : 0); }
  int seat(int process) const { return process < case_.ranks ? process : case_.joins; }
  bool is_cut(const State& s, int from, int to) const {
    return (s.cut >> (from * kProcesses + to) & 1) != 0;
  }
  /// The process that has the seat in that epoch.
  int occupant(const State& s, int seat_of, std::uint64_t epoch) const {
    return seat_of == case_.joins && s.joined != 0 && epoch >= s.joined ? case_.ranks : seat_of;
  }

  Rank founder(int p) const {
    return case_.ranks == 1 ? Rank::lone_founder(p, case_.arbiter)
                            : Rank::founder(p, case_.ranks, case_.arbiter);
  }

  // ---- what a process does after each event, in one go

  void send(State& s, int from, int to) {
    Channel& channel = s.channels[at(from)][at(to)];
    const Said& said = s.processes[at(from)].said;
    const bool fresh = said.number > channel.said.number;
    if (from == to || channel.full != 0 || !fresh || is_cut(s, from, to)) return;
    if (!active(s, to)) return;
    channel = {said, 1, 0};
    s.queue[s.queued++] = static_cast<std::uint64_t>(from * kProcesses + to);
  }
  /// The channel is empty, or its statement late.
  void leave_queue(State& s, int from, int to) {
    std::size_t kept = 0;
    for (std::size_t i = 0; i < s.queued; ++i) {
      const std::uint64_t item = s.queue[i];
      if (item != static_cast<std::uint64_t>(from * kProcesses + to)) s.queue[kept++] = item;
    }
    for (std::size_t i = kept; i < s.queued; ++i) s.queue[i] = 0;
    s.queued = kept;
  }
  void drop(State& s, int from, int to) {
    s.channels[at(from)][at(to)].full = 0;
    s.channels[at(from)][at(to)].late = 0;
    leave_queue(s, from, to);
  }
  bool delay(State& s) {
    if (s.queued == 0 || s.delays >= case_.delays) return false;
    ++s.delays;
    const int from = static_cast<int>(s.queue[0]) / kProcesses;
    const int to = static_cast<int>(s.queue[0]) % kProcesses;
    s.channels[at(from)][at(to)].late = 1;
    leave_queue(s, from, to);
    return true;
  }
  bool may_arrive(const State& s, int from, int to) const {
    const Channel& channel = s.channels[at(from)][at(to)];
    const bool first =
        s.queued > 0 && s.queue[0] == static_cast<std::uint64_t>(from * kProcesses + to);
    return channel.full != 0 && (first || channel.late != 0 || case_.walks > 0 || healing_);
  }
  void publish(State& s, int p) {
    s.processes[at(p)].said = s.processes[at(p)].rank.statement();
    for (int to = 0; to < count(); ++to) send(s, p, to);
  }
  /// `dies`: 1: before it publishes; 2: when it has published where its death will be proven.
  void follow_up(State& s, int p, const Process& before, int dies) {
    Process& mine = s.processes[at(p)];
    note_epoch(s, p, before);
    if (dies != 0) settle(s, p);
    if (dies != 0) mine.alive = 0;
    if (dies == 2) mine.said = mine.rank.statement();
    if (dies != 0) return;
    publish(s, p);
    while (settle(s, p)) publish(s, p);
  }
  bool settle(State& s, int p) {
    const Process before = s.processes[at(p)];
    if (!s.processes[at(p)].rank.settle()) return false;
    note_epoch(s, p, before);
    return true;
  }
  void note_epoch(State& s, int p, const Process& before) {
    if (s.processes[at(p)].rank.view().epoch != before.rank.view().epoch) entered(s, p, before);
  }

  void fail(const char* what) {
    if (failure_.empty()) failure_ = what;
  }

  void entered(State& s, int p, const Process& before) {
    Process& mine = s.processes[at(p)];
    const View& view = mine.rank.view();
    if (view.epoch >= kEpochs) return fail("too many epochs for this test");
    View& decided = s.decided[at(static_cast<int>(view.epoch))];
    const View& old = s.decided[at(static_cast<int>(view.epoch) - 1)];
    if (decided.epoch == 0) {
      decided = view;
      if (case_.joins >= 0 && view.ticket(case_.joins) == kTicket && s.joined == 0) {
        s.joined = view.epoch;
      }
      expect_quorum(s, view, old);
    } else if (!(decided == view)) {
      fail("two views of one epoch");
    }
    if (before.rank.standing() == Standing::kMember) {
      const std::uint64_t steps = view.step - old.step;
      if (view.step < mine.step) fail("a survivor is ahead of the agreed step");
      if (steps > 0 && mine.generation < old.generation + steps - 1) {
        fail("a step was committed that a survivor has not computed");
      }
      if (mine.used + 1 < view.epoch && s.deaths + s.late + s.cuts == 0) {
        fail("a rank was passed over, though nobody was lost");
      }
    }
    mine.generation = view.generation - 1;
    mine.step = view.step;
    for (int other = view.live.next(); other >= 0; other = view.live.next(other + 1)) {
      mine.granted |= 1ull << occupant(s, other, view.epoch);
    }
    if (case_.goes_on) return;
    mine.used = view.epoch;
    mine.rank.went_on();
  }
  void expect_quorum(const State& s, const View& view, const View& old) {
    int alive = old.live.count();
    for (int other = old.live.next(); other >= 0; other = old.live.next(other + 1)) {
      if (s.processes[at(occupant(s, other, old.epoch))].alive == 0) --alive;
    }
    if (2 * (view.live & old.live).count() + (case_.arbiter ? 1 : 0) <= alive) {
      fail("a minority committed");
    }
  }

  // ---- what must hold in every state

  void expect_invariants(const State& s) {
    for (int p = 0; p < count(); ++p) {
      const Process& mine = s.processes[at(p)];
      const std::uint64_t epoch = mine.rank.view().epoch;
      if (epoch != 0 && epoch + 1 < kEpochs) {
        const View& next = s.decided[at(static_cast<int>(epoch) + 1)];
        if (next.epoch != 0 && mine.generation >= next.generation) {
          fail("a generation belongs to two epochs");
        }
      }
      if (mine.alive == 0 || mine.rank.standing() != Standing::kMember) continue;
      for (int q = 0; q < count(); ++q) {
        if (q == p) continue;
        const Process& other = s.processes[at(q)];
        const std::uint64_t theirs = other.rank.view().epoch;
        if (theirs < epoch && mine.rank.accepts(theirs, other.generation)) {
          fail("an old generation is accepted");
        }
        const bool both = other.alive != 0 && other.rank.standing() == Standing::kMember;
        if (both && seat(p) == seat(q) && theirs == epoch) fail("two processes in one seat");
        const bool here = mine.rank.view().live.has(seat(q)) && occupant(s, seat(q), epoch) == q;
        const bool may_write = (mine.granted & ~mine.released) >> q & 1;
        if (may_write && !here && mine.rank.may_grant(Seats::of(seat(q)))) {
          fail("a quarantined region is granted");
        }
      }
    }
  }

  // ---- events

  bool active(const State& s, int p) const {
    const Standing standing = s.processes[at(p)].rank.standing();
    return s.processes[at(p)].alive != 0 && standing != Standing::kEvicted &&
           standing != Standing::kMinority;
  }

  bool deliver(State& s, int from, int to, int dies) {
    Channel& channel = s.channels[at(from)][at(to)];
    if (!may_arrive(s, from, to) || !active(s, to)) return false;
    if (dies != 0 && s.deaths >= case_.deaths) return false;
    if (dies != 0) ++s.deaths;
    const Process before = s.processes[at(to)];
    s.processes[at(to)].rank.hear(seat(from), channel.said);
    drop(s, from, to);
    send(s, from, to);
    const bool news = before.rank.statement().number != s.processes[at(to)].rank.statement().number;
    if (dies != 0 && !news) return false;
    follow_up(s, to, before, dies);
    return true;
  }
  bool suspect(State& s, int p, int q) {
    Process& mine = s.processes[at(p)];
    if (p == q || !active(s, p) || mine.rank.standing() != Standing::kMember) return false;
    const View& view = mine.rank.view();
    const bool here = view.live.has(seat(q)) && occupant(s, seat(q), view.epoch) == q;
    if (!here || mine.rank.statement().suspects.has(seat(q))) return false;
    const bool well = active(s, q) && !is_cut(s, q, p);
    if (well && s.late++ >= case_.late) return false;
    const Process before = mine;
    mine.rank.suspect(seat(q));
    follow_up(s, p, before, 0);
    return true;
  }
  bool go_on(State& s, int p) {
    Process& mine = s.processes[at(p)];
    if (!active(s, p) || mine.rank.standing() != Standing::kMember) return false;
    if (mine.used == mine.rank.view().epoch) return false;
    const Process before = mine;
    mine.used = mine.rank.view().epoch;
    mine.rank.went_on();
    follow_up(s, p, before, 0);
    return true;
  }
  /// Of a rank that goes on with all others.
  bool regroup(State& s, int p) {
    Process& mine = s.processes[at(p)];
    if (!active(s, p) || s.regroups >= case_.regroups || !mine.rank.running()) return false;
    if (mine.used != mine.rank.view().epoch) return false;
    const Process before = mine;
    ++s.regroups;
    mine.rank.stop();
    follow_up(s, p, before, 0);
    return true;
  }
  bool trust(State& s, int p, int q) {
    if (p == q || !active(s, p)) return false;
    const Process before = s.processes[at(p)];
    s.processes[at(p)].rank.trust(seat(q));
    if (before.rank.statement().number == s.processes[at(p)].rank.statement().number) return false;
    follow_up(s, p, before, 0);
    return true;
  }
  bool prove(State& s, int p, int q) {
    Process& mine = s.processes[at(p)];
    const Process& other = s.processes[at(q)];
    if (p == q || !active(s, p) || mine.rank.standing() != Standing::kMember) return false;
    if (other.alive != 0 || is_cut(s, q, p) || (mine.released >> q & 1) != 0) return false;
    const std::uint64_t epoch = mine.rank.view().epoch;
    if (occupant(s, seat(q), epoch) != q) return false;
    if (q >= case_.ranks && (s.joined == 0 || epoch < s.joined)) return false;  // it had no seat
    const Process before = mine;
    drop(s, q, p);
    mine.rank.hear(seat(q), other.said);
    mine.rank.died(seat(q));
    mine.released |= 1ull << q;
    follow_up(s, p, before, 0);
    return true;
  }
  bool close(State& s, int p, int q) {
    Process& mine = s.processes[at(p)];
    if (!case_.closes || !active(s, p) || !mine.rank.quarantined().has(seat(q))) return false;
    if (((mine.granted & ~mine.released) >> q & 1) == 0) return false;
    const Process before = mine;
    mine.rank.release(seat(q));
    mine.released |= 1ull << q;
    follow_up(s, p, before, 0);
    return true;
  }
  /// The process that joins proves to a rank that nobody can prove it to otherwise.
  bool knock(State& s, int p) {
    if (!case_.knocks || !active(s, p) || p == case_.ranks) return false;
    Process& mine = s.processes[at(p)];
    const int former = case_.joins;
    const bool seated = mine.rank.view().live.has(former);
    if (mine.rank.standing() != Standing::kMember || seated) return false;
    if (!mine.rank.quarantined().has(former)) return false;
    const bool ended = s.processes[at(former)].alive == 0;
    if (Traits::kKnocksProve && !ended) return false;
    const Process before = mine;
    mine.rank.release(former);
    if (ended) mine.released |= 1ull << former;
    follow_up(s, p, before, 0);
    return true;
  }
  bool retry(State& s, int p) {
    if (!active(s, p) || s.retries >= case_.retries) return false;
    const Process before = s.processes[at(p)];
    s.processes[at(p)].rank.retry();
    if (before.rank.statement().number == s.processes[at(p)].rank.statement().number) return false;
    ++s.retries;
    follow_up(s, p, before, 0);
    return true;
  }
  bool ask(State& s, int p) {
    if (!active(s, p) || !s.processes[at(p)].rank.wants_arbiter()) return false;
    const Process before = s.processes[at(p)];
    const Said old = s.arbiter;
    s.arbiter = Rank::arbitrate(s.arbiter, before.rank.statement());
    s.processes[at(p)].rank.hear_arbiter(s.arbiter);
    follow_up(s, p, before, 0);
    return std::memcmp(&old, &s.arbiter, sizeof(old)) != 0 ||
           s.processes[at(p)].rank.statement().number != before.rank.statement().number;
  }
  bool give_up(State& s, int p) {
    if (!case_.gives_up || !active(s, p) || !s.processes[at(p)].rank.minority()) return false;
    s.processes[at(p)].rank.give_up();
    return true;
  }
  bool die(State& s, int p) {
    if (!s.processes[at(p)].alive || s.deaths >= case_.deaths) return false;
    ++s.deaths;
    s.processes[at(p)].alive = 0;
    return true;
  }
  bool cut(State& s, int p, int q) {
    if (p == q || s.cuts >= case_.cuts || is_cut(s, p, q)) return false;
    ++s.cuts;
    s.cut |= 1ull << (p * kProcesses + q);
    drop(s, p, q);
    return true;
  }

  /// All of the view have used generation `g` of its epoch.
  bool all_used(const State& s, const View& view, std::uint64_t g) const {
    for (int other = view.live.next(); other >= 0; other = view.live.next(other + 1)) {
      const Process& peer = s.processes[at(occupant(s, other, view.epoch))];
      if (peer.rank.view().epoch != view.epoch || peer.generation < g) return false;
    }
    return true;
  }
  bool use(State& s, int p) {
    Process& mine = s.processes[at(p)];
    const View& view = mine.rank.view();
    if (!mine.alive || !mine.rank.running()) return false;
    if (mine.generation + 1 >= view.generation + case_.generations) return false;
    if (mine.generation >= view.generation && !all_used(s, view, mine.generation)) return false;
    ++mine.generation;
    mine.rank.progressed(mine.generation, mine.step);
    return true;
  }
  bool commit(State& s, int p) {
    Process& mine = s.processes[at(p)];
    const View& view = mine.rank.view();
    if (!mine.alive || !mine.rank.running() || case_.generations == 0) return false;
    if (!all_used(s, view, view.generation + (mine.step - view.step))) return false;
    ++mine.step;
    mine.rank.progressed(mine.generation, mine.step);
    return true;
  }

  bool try_event(State& s, int event) {
    const int kind = event / (kProcesses * kProcesses);
    const int p = event / kProcesses % kProcesses, q = event % kProcesses;
    if (p >= count() || q >= count()) return false;
    if (kind >= 7 && q != 0) return false;
    switch (kind) {
      case 0:
      case 1:
      case 2: return deliver(s, p, q, kind);
      case 3: return suspect(s, p, q);
      case 4: return prove(s, p, q);
      case 5: return close(s, p, q);
      case 6: return cut(s, p, q);
      case 7: return retry(s, p);
      case 8: return ask(s, p);
      case 9: return give_up(s, p);
      case 10: return die(s, p);
      case 11: return use(s, p);
      case 12: return commit(s, p);
      case 13: return knock(s, p);
      case 14: return go_on(s, p);
      case 15: return regroup(s, p);
      default: return p == 0 && delay(s);
    }
  }
  void forget_those_gone(State& s) {
    for (int to = 0; to < count(); ++to) {
      if (active(s, to)) continue;
      for (int from = 0; from < count(); ++from) drop(s, from, to);
    }
  }
  // ---- progress: from any state, if everything arrives from now on, the group goes on

  void expect_progress(const State& from) {
    State s = from;
    healing_ = true;
    heal(s);
    healing_ = false;
  }
  void heal(State& s) {
    s.cut = 0;
    s.deaths = case_.deaths;
    for (int p = 0; p < count(); ++p) {
      for (int q = 0; q < count(); ++q) {
        drop(s, p, q);
        s.channels[at(p)][at(q)].said = {};
        send(s, p, q);
      }
    }
    for (int round = 0; round < 60 && failure_.empty(); ++round) {
      bool any = false;
      for (int p = 0; p < count(); ++p) {
        for (int q = 0; q < count(); ++q) any = deliver(s, p, q, 0) || any;
      }
      for (int p = 0; p < count(); ++p) {
        any = ask(s, p) || any;
        any = go_on(s, p) || any;
        any = knock(s, p) || any;
        for (int q = 0; q < count(); ++q) {
          any = prove(s, p, q) || any;
          if (!active(s, q)) any = suspect(s, p, q) || any;
          if (active(s, q)) any = trust(s, p, q) || any;
        }
      }
      if (any) continue;
      if (settled(s)) return;
      for (int p = 0; p < count() && !any && case_.retries > 0; ++p) {
        const Process before = s.processes[at(p)];
        if (!active(s, p)) continue;
        s.processes[at(p)].rank.retry();
        any = before.rank.statement().number != s.processes[at(p)].rank.statement().number;
        if (any) follow_up(s, p, before, 0);
      }
      if (!any) break;
    }
    if (!settled(s)) fail("stuck, though a quorum is alive and hears everything");
  }
  /// The newest view has all who are left, and they run; or these are no quorum.
  bool settled(const State& s) const {
    const std::uint64_t epoch = newest_epoch(s);
    if (epoch == 0 || epoch >= kEpochs) return true;
    const View& view = s.decided[at(static_cast<int>(epoch))];
    int left = 0, dead = 0;
    bool running = true;
    for (int other = view.live.next(); other >= 0; other = view.live.next(other + 1)) {
      const int p = occupant(s, other, epoch);
      const Process& mine = s.processes[at(p)];
      if (active(s, p)) ++left;
      if (mine.alive == 0) ++dead;
      running = running && active(s, p) && mine.rank.running() && mine.rank.view().epoch == epoch;
    }
    if (2 * left + (case_.arbiter ? 1 : 0) <= view.live.count() - dead) return true;
    return running;
  }

  MembershipCase case_;
  std::string failure_{};
  bool healing_ = false;
};

}  // namespace ferry::model

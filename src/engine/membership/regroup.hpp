// How the ranks that are left of a group agree on its next epoch (protocol/membership.hpp). Each
// publishes its statement in its own control segment, which the others of its domain can read also
// after its death, rings their bells, and sends it to other domains (carrier.hpp). There a death is
// proven by a rank of the same domain, which sends on what the dead rank said last.
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine/channel.hpp"
#include "engine/membership/arbiter.hpp"
#include "engine/membership/carrier.hpp"
#include "engine/membership/linking.hpp"
#include "engine/membership/seating.hpp"

namespace ferry::engine {

class Regroup {
 public:
  using Traits = SeatTraits;
  using Said = Member::Said;
  using Standing = Member::Standing;

  /// Whether all ranks of the group can hear each other's statements, and are not too many.
  static bool possible(const Memory& memory, bool carrier);
  /// Throws Error(unsupported) of this call if not; `domains`: for its words.
  static void check_possible(const char* call, const Memory& memory, bool carrier, int domains);

  /// `ticket`: of a process that joins; 0: the group was made with it.
  /// `carrier`: of a group of several domains, otherwise null.
  Regroup(std::shared_ptr<Memory> memory, std::shared_ptr<Carrier> carrier, Channel& channel,
          const GroupConfig& config, const ControlLayout& layout,
          std::optional<Arbiter> arbiter = {}, std::uint64_t ticket = 0);

  /// Stops, agrees with the ranks that are left, and has the channel go on with them: their epoch.
  /// Throws Error(evicted) when they went on without this one, and Error(deadline) when those in
  /// reach are no quorum; then the group has failed for good. After any other error it may be
  /// called again.
  /// `step`: the newest that this rank has committed.
  Epoch run(std::uint64_t step);
  /// Where a process that joins finds ranks of other domains, beside its host; never blocks.
  using Cards = std::function<std::vector<fabric::Elsewhere>()>;
  void look_at(Cards cards) { cards_ = std::move(cards); }
  /// Of a process that begins alone, once: epoch 2 has this rank only.
  Epoch begin_alone();
  /// Of a process that joins, once: waits until the ranks take it in, at most one deadline. Throws
  /// Error(refused) when another process has its seat.
  Epoch join();
  /// Whether a process waits that `run` would take in. Of a rank that has been through `run`; costs
  /// one comparison while none has come.
  bool one_waits();
  /// Those of `epoch` that have joined since its step was committed.
  std::vector<int> joined(const Epoch& epoch) const;
  /// All far ranks have the group's state, also those that have joined since that step.
  void forget_joined() {
    linking_.forget_joined();
    seating_.forget_joined();
  }
  /// The epoch in which the process joined that has the seat; 1: before this rank did.
  protocol::Epoch since(int seat) const {
    return far(seat) ? linking_.since(seat) : seating_.since(seat);
  }
  /// Whether a seat was ever taken by another process.
  bool ever_seated() const { return seating_.ever_seated() || linking_.any(); }
  /// Whether a rank that was lost may still write to this one's memory.
  bool lost_may_write() const;
  /// Regions that were held back are free again if none can.
  void free_held() const;
  /// Processes of this group use GPUs, whose driver takes them apart long after they were killed:
  /// who is being ended is suspected, which needs a majority without it, and is proven dead later.
  void suspect_ending() { suspects_ending_ = true; }

 private:
  using Clock = std::chrono::steady_clock;

  std::byte* control(int peer) const { return memory_->fabric->pointer(peer, Channel::kControl); }
  protocol::Flag bell() const { return bell_of(control(channel_.rank()), layout_); }
  /// How often processes of this domain that wait for a seat have knocked.
  std::uint64_t knocks() const {
    return knocks_of(control(channel_.rank()), layout_).load(protocol::order::acquire);
  }
  void begin(std::uint64_t step);
  Epoch agree(protocol::Epoch since);
  void hear_guests();
  void answer_knocks();
  void hear_asking();
  std::optional<Said> asking(int seat) const;
  bool former_ended(int seat) const;
  bool one_asks() const;
  Member::Seats seats_of_empty_domains() const;
  void knock();
  const Said* newest_far() const;
  void tell_waiting(int peer) const;
  void seat_joiners();
  void advance_links();
  void check_may_join(Clock::time_point end) const;
  void poll();
  void poll_near(int peer, bool processes);
  void poll_far(int peer, bool processes);
  void hear(int peer);
  void publish();
  void send_again();
  /// Calls `each` with the far ranks that are in the view.
  template <class Each>
  void for_far(const Each& each) const {
    if (!carrier_) return;
    const Member::Seats& live = member_->view().live;
    for (int peer = live.next(); peer >= 0; peer = live.next(peer + 1)) {
      if (far(peer)) each(peer);
    }
  }
  void leave_epoch(protocol::Epoch epoch);
  bool ready_to_go_on();
  void ask_arbiter();
  void check_standing();
  void check_progress();
  void give_time();
  void suspect_missed_elsewhere();
  void suspect_silent();
  void trust_again();
  bool takes_part(int peer) const;  ///< it has stopped, and waits
  bool far(int peer) const { return carrier_ && carrier_->far(peer); }
  bool ended(int peer) const;     ///< proven
  bool stopped(int peer) const;   ///< it says so, of this epoch
  Member::Seats may_run() const;  ///< of the suspects
  void wait(std::uint64_t rung);
  Epoch go_on();
  std::string why_no_quorum() const;
  [[noreturn]] void give_up(const Error& error);
  [[noreturn]] void throw_destroyed() const;
  std::string names(const Member::Seats& seats) const;

  static constexpr const char* kRegroup = "regroup";
  /// How often processes are looked at without the kernel having told of a death.
  static constexpr auto kPollPeriod = std::chrono::milliseconds(20);

  std::shared_ptr<Memory> memory_;
  std::shared_ptr<Carrier> carrier_;
  Channel& channel_;
  const GroupConfig& config_;
  ControlLayout layout_;
  std::optional<Arbiter> arbiter_;
  std::string arbiter_problem_{};  // why it did not answer when it was asked last
  Clock::time_point ask_at_{};     // not before
  std::unique_ptr<Member> member_;
  Seating seating_;
  Linking linking_;
  std::vector<Seating::Guest> waiting_{};  // of this domain, as heard last
  std::uint64_t knocks_heard_ = 0;         // before that
  protocol::Epoch waiting_since_ = 0;      // then
  Cards cards_{};
  Clock::time_point knock_at_{};   // not before
  protocol::Epoch seated_;         // who has a seat in this epoch is mapped
  std::uint64_t bell_seen_ = 0;    // when `one_waits` last looked
  bool one_waits_ = false;         // then
  std::uint64_t knocks_seen_ = 0;  // when it last looked for those of this domain
  bool guest_waits_ = false;       // then
  bool suspects_ending_ = false;
  std::vector<std::uint64_t> asking_;  // [R]: tickets of those that knock, answered
  std::vector<std::uint64_t> heard_;   // [R]: the number of the text read last
  std::vector<Said> said_;             // [R]: that text
  protocol::Epoch left_epoch_ = 0;     // in which nothing is put any more, as far ranks were told
  Member::Seats ended_{};              // of this domain, as the far ranks were told
  std::uint64_t published_ = 0;        // the statement's number
  std::uint64_t deaths_ = 0;           // told by the kernel before the last poll
  Clock::time_point polled_{};         // at the processes
  Clock::time_point heard_at_{};       // when anybody last said something new
  Clock::time_point ran_{};            // when this rank last asked whether anybody is late
  Clock::time_point timeout_{};        // until when silence is no reason to suspect
  bool last_chance_ = false;           // then this rank gives up
};

}  // namespace ferry::engine

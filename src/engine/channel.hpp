// Steps of an exchange on one group: swaps, deliveries, loans, and what becomes of a rank that
// fails in one. Turns the protocols' statuses into errors with words.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/wait_notice.hpp"
#include "core/call.hpp"
#include "core/layout.hpp"
#include "engine/memory.hpp"
#include "engine/reach.hpp"
#include "engine/record.hpp"
#include "engine/wait_chain.hpp"
#include "ferry/group.hpp"
#include "protocol/chunks.hpp"
#include "protocol/delivery.hpp"
#include "protocol/failure_broadcast.hpp"
#include "protocol/swap.hpp"

namespace ferry::engine {

using protocol::Generation;

class GroupWatch;

/// A membership of the group, as its engine uses it.
struct Epoch {
  std::uint64_t number = 1;
  Generation first = 1;      ///< generation; flags of earlier epochs are less
  std::vector<int> ranks{};  ///< ascending
  std::uint64_t step = 0;    ///< the newest that any of its ranks has committed
  std::uint64_t deaths = 0;  ///< that the kernel has told of: all of ranks that are not in it
};

/// The flags that a wait polls, so that a rank that is not awaited may leave or die in peace.
struct Awaited {
  protocol::FlagArray flags{};
  std::uint64_t wanted = 0;
  int only = -1;  ///< one source, or -1 for all
  bool missing(int peer) const;
};

class Channel {
 public:
  /// The segment with flags, mailbox and what a rank says about itself, the same on all ranks.
  static constexpr fabric::SegmentId kControl = 0;

  /// `control`: this rank's control segment; all peers' are attached as segment 0.
  Channel(std::shared_ptr<Memory> memory, const GroupConfig& config, const fabric::Segment& control,
          const ControlLayout& layout);

  int rank() const { return rank_; }
  /// Seats of the group, holes included.
  int size() const { return size_; }
  /// The ranks of this epoch, ascending, this one included.
  const std::vector<int>& ranks() const { return ranks_; }
  bool has(int peer) const { return live_[static_cast<std::size_t>(peer)] != 0; }
  /// [R]: the same, for flags of an engine's own.
  const std::uint8_t* live() const { return live_.data(); }
  /// relaxed: read by other threads for their messages and failure broadcasts alone.
  Generation generation() const { return generation_.load(std::memory_order_relaxed); }
  FabricReach& reach() { return reach_; }
  /// In this process, or null outside the domain.
  std::byte* pointer(int peer, fabric::Address address) const {
    std::byte* base = memory_->fabric->pointer(peer, address.segment);
    return base == nullptr ? nullptr : base + address.offset;
  }

  /// Where a peer said that `bytes` lie: its address in this process, or null outside the domain.
  /// Fails the group with Error(mismatch) unless they lie inside a segment of the peer.
  std::byte* checked(const char* stage, int peer, fabric::Address address, std::uint64_t bytes);
  /// A peer sent what cannot be: fails the group with Error(mismatch) naming it.
  [[noreturn]] void throw_violation(const char* stage, int peer, const std::string& what);

  /// Starts the next generation: gives every rank this message (head, then body) and waits for
  /// theirs. `stage` is named in errors: "dispatch: grants".
  void swap(const char* stage, const StepMessage& head, std::span<const std::byte> body = {});
  /// The same with a body for each peer: `write(peer, body)` writes it and returns its bytes, at
  /// most `max_body_bytes`.
  using WriteBody = std::function<std::size_t(int peer, std::byte* body)>;
  void swap(const char* stage, const StepMessage& head, const WriteBody& write);
  /// The messages of the last swap, valid until the next.
  StepMessage head(int source) const;
  const std::byte* body(int source) const;
  std::size_t max_body_bytes() const { return layout_.message_bytes - sizeof(StepMessage); }

  /// Rows for `peer` are written in the current generation, `bytes` of them outside the domain.
  void deliver(int peer, std::uint64_t bytes);
  std::uint64_t delivery_tag() const { return protocol::Delivery<>::tag(generation_); }
  void await_delivered(const char* stage, int source = -1);
  /// This rank no longer reads `owner`'s rows of the current generation.
  void give_back(int owner);
  /// Waits until the readers (`peers`: those inside the domain) have read this rank's rows.
  void await_given_back(const char* stage, int reader);

  /// The tag of the next chunk that crosses from here to `peer`.
  std::uint64_t chunk_tag(int peer) const {
    return protocol::Chunks<>::tag(chunks_sent_[static_cast<std::size_t>(peer)] + 1);
  }
  /// The next chunk for `peer` is written, `bytes` of it.
  void send_chunk(int peer, std::uint64_t bytes);
  /// Takes the next chunk of `source` if it is there.
  bool take_chunk(int source);
  void await_chunk(const char* stage, int source);

  /// Runs one wait of any protocol under this group's watch; throws what its status says.
  template <class Wait>
  void await(const char* stage, const Awaited& awaited, Wait&& wait);

  /// Says which call this rank is in, for the peers' messages; stays after a failure. `survives`:
  /// it goes on without ranks that fail.
  void enter_call(const CallWord& call, bool survives = false);

  /// Of a wait of another kind: as the fabric's.
  bool progress() { return memory_->fabric->progress(); }
  void hand_over() { memory_->fabric->hand_over(); }
  /// Nothing more to do for the network for now, by the thread that did it.
  void rest() { memory_->fabric->rest(); }

  /// Said by a call before it throws what every rank throws in this step, before anything moved:
  /// the group can go on.
  void all_ranks_throw() { all_throw_ = true; }
  /// Whether it was said since the last time that this was asked.
  bool all_ranks_threw() { return std::exchange(all_throw_, false); }

  /// Throws when the group is destroyed or dead.
  void check_usable(const char* call) const;
  /// Marks the group dead, unless it is already, and tells the peers that this rank failed.
  void fail(const char* stage, const std::string& reason, ErrorKind kind = ErrorKind::interrupted);
  /// Tells the peers that this rank leaves; later calls throw Error(destroyed). Whether it has left
  /// just now, and is as good as dead for the others.
  bool leave();

  // For a change of the membership (regroup.cpp), by the thread whose turn it is.

  /// Calls fail until the next epoch begins, and the peers' waits for this rank end. `ended`: its
  /// calls have, so what peers await of these comes; else they were cut off.
  void stop(bool ended);
  /// Goes on with these ranks. Nothing of the epoch before counts: no flag, no failure.
  void begin_epoch(const Epoch& epoch);
  /// The group has failed; `for_good`: whatever it failed with before.
  void die(const Error& error, bool for_good = false);
  /// The same of a rank that has not joined yet: this is no failure.
  void await_join(const Error& error) { mark_dead(error, false); }
  /// For good, as no majority is left. Other ranks may still run, and this one may go on elsewhere:
  /// so it never tells them that it has left, which would let them go on as if it were gone.
  void give_up(const Error& error);
  /// Throws Error(evicted), which fails the group, when other ranks went on without this one. After
  /// rows were read in place: what was read before may be of their next epoch.
  void check_evicted(const char* stage);
  [[noreturn]] void throw_evicted(const char* stage);
  /// From now on a rank of another domain that is silent ends a wait for it before the deadline.
  void lose_silent() { loses_silent_.store(true, std::memory_order_relaxed); }
  /// Whether the peer, of this domain, waits for others now.
  bool waits(int peer) const;
  /// Whether a rank has told in this epoch that the peer died, or is not heard any more.
  bool told_dead(int peer) const;
  /// Whether the peer has destroyed its group. It says nothing any more.
  bool left(int peer) const;
  /// Whether it has left, and nothing that it has begun writes to other ranks any more.
  bool at_rest(int peer) const;
  /// The same of a rank with this control segment.
  static bool at_rest(std::byte* control, const ControlLayout& layout);
  /// Of a rank that has left. Not one that gave up: it never says that it has left.
  void say_at_rest();
  /// Of a process that joined: the step that was committed then, plus 1, or kJoining; 0: the group
  /// was made with it, as with all ranks of other domains.
  static constexpr std::uint64_t kJoining = ~std::uint64_t{0};
  std::uint64_t joined_at(int peer) const;
  void say_joined(std::uint64_t at);
  /// Runs `say` unless this rank has left, and so that it cannot leave meanwhile.
  bool unless_left(const std::function<void()>& say);

  // For an engine whose waits run on a GPU (channel_failure.cpp).

  /// The error that the group failed with.
  std::optional<Error> dead() const;
  /// Checks once whether a peer has failed, or has died or left while this rank needs it. Then the
  /// group is dead and the peers are told. `awaits(peer)`: whether the call that runs now does.
  /// `ended()`: calls that have ended here; a rank that left after more is not missed. Both are
  /// asked only when a rank has died or left.
  std::optional<Error> poll(const char* stage, const std::function<Generation()>& ended,
                            const std::function<bool(int)>& awaits);
  /// Of `ended`: every rank that left is missed.
  static constexpr Generation kUnknownEnd = ~Generation{0};
  /// A wait for `peer` on the GPU reached its deadline: the group is dead and the peers are told.
  Error late(const char* stage, int peer, std::uint64_t expected, std::uint64_t seen);
  /// Whether this rank waits for peers now, for their blame. To be said at least every 100 ms.
  void beat(bool waiting);
  /// Said once, before any swap: calls are no swaps, and `count` says how many there were. Swaps
  /// are numbered by themselves, anew in each epoch.
  void swap_beside_calls() { beside_calls_ = true; }
  /// How many calls there were, for messages and failure broadcasts.
  void count(Generation generation) { generation_.store(generation, std::memory_order_relaxed); }

  // For transfers between two ranks, beside the calls of all.

  /// This rank waits for transfers now, and has waited for those with `peer` so long. To be said at
  /// least every 100 ms.
  void beat_transfers(int peer, std::chrono::nanoseconds waited);
  /// No more of them are under way.
  void end_transfers() { say_awaited(WaitChain::In::transfer, -1, {}); }
  /// Whether a peer of the domain does.
  bool transfers(int peer) const;
  /// Whether the peer has said, of this epoch, that it waits for another rank. Only in groups of
  /// several domains.
  bool held_up(int peer) const {
    return wait_chain_.awaited_by(peer, since_.load(std::memory_order_relaxed)) >= 0;
  }
  /// The peer did not do `what` ("send 8 bytes (tag 0)") in time: the group is dead and the peers
  /// are told.
  Error late_transfer(const char* call, int peer, const std::string& what,
                      std::chrono::nanoseconds waited);

  // For an exchange that goes on without some ranks.

  /// Whether a peer will never come again: its process ends or has ended, or it destroyed its
  /// group.
  bool gone(int peer) const;
  void count_wait(const char* stage, std::chrono::steady_clock::time_point begin,
                  std::chrono::nanoseconds waited) {
    wait_ns_.fetch_add(static_cast<std::uint64_t>(waited.count()), std::memory_order_relaxed);
    record_.waited(stage, begin, waited, generation());
  }
  Record& record() { return record_; }
  const Record& record() const { return record_; }

  bool left() const { return left_.load(std::memory_order_acquire); }

  std::uint64_t wait_ns() const { return wait_ns_.load(std::memory_order_relaxed); }

  /// How long after the deadline others may still say who is to blame: those that are missing wait
  /// themselves, or nobody here sees which of them do. None where one of them has said that it
  /// left.
  std::chrono::nanoseconds grace(const Awaited& awaited) const;

 private:
  friend class GroupWatch;
  Generation next_swap();
  void await_swap(const char* stage);
  /// As `die`, without telling the log. False: it is dead already.
  bool mark_dead(const Error& error, bool for_good);
  /// Of a write that waits for room: throws what a wait would.
  void look_up(int peer);
  [[noreturn]] void raise(const char* stage, const protocol::Status& status,
                          const std::optional<protocol::FailureBroadcast>& heard,
                          std::chrono::nanoseconds waited);
  /// Failure broadcasts of this epoch.
  template <class Counts>
  std::optional<protocol::FailureBroadcast> scan(Counts counts) const {
    return broadcasts_.scan(counts, since_.load(std::memory_order_relaxed));
  }
  /// The epoch in which others went on without this rank; 0: none.
  std::uint64_t evicted() const;
  void say_left();
  /// For whom this rank waits; -1: for nobody. Peers of other domains see it by this alone.
  void say_awaited(WaitChain::In in, int peer, std::chrono::nanoseconds waited);
  protocol::FailureBroadcast broadcast(protocol::FailureBroadcast::Kind kind, int culprit);
  protocol::FailureBroadcast broadcast(protocol::FailureBroadcast::Kind kind, int culprit,
                                       Generation generation);
  int blame(const Awaited& awaited, int fallback) const;
  int blame_by_chain(const Awaited& awaited, int fallback) const;
  int silent(const Awaited& awaited) const;
  /// A word of a rank's own line, or null when its memory is not in this process.
  std::uint64_t* own_word(int peer, std::size_t index) const;
  /// Whether a wait for the peer is in vain: its process has ended, or nothing is heard from it.
  bool is_lost(int peer) const;
  bool fresh(int peer, std::size_t word) const;
  /// How long this rank has known that a peer calls regroup: since it first asked in this epoch.
  std::chrono::nanoseconds stopped_for();
  std::optional<CallWord> call_of(int peer) const;
  /// "; rank 1 waits in barrier, this rank in dispatch"; empty when nothing is known.
  std::string whereabouts(std::initializer_list<int> ranks) const;

  std::shared_ptr<Memory> memory_;
  const GroupConfig& config_;
  const std::chrono::nanoseconds notice_after_ = wait_notice_after();  // of a long wait
  fabric::Segment control_;
  ControlLayout layout_;
  int rank_;
  int size_;
  FabricReach reach_;
  std::atomic<Generation> generation_{0};     // written by the thread whose turn it is
  Generation swapped_ = 0;                    // the last swap, of the same thread
  bool beside_calls_ = false;                 // or the same as `generation_`
  std::atomic<Generation> since_{0};          // the least that a broadcast of this epoch can have
  std::atomic<std::uint64_t> stop_heard_{0};  // ns: when a peer was first heard to call regroup
  std::vector<int> ranks_;
  std::vector<std::uint8_t> live_;  // [R]
  std::uint64_t deaths_ = 0;        // told by the kernel, of ranks that are in no epoch any more
  protocol::Swap<> swap_;
  protocol::Delivery<> delivery_;
  protocol::Loan<> loan_;
  protocol::Chunks<> chunks_;
  std::vector<std::uint64_t> chunks_sent_;   // [R], of the thread whose turn it is, as the next
  std::vector<std::uint64_t> chunks_taken_;  // [R]
  protocol::FailureBroadcasts<> broadcasts_;
  bool has_far_ = false;  // ranks of other domains
  WaitChain wait_chain_;
  alignas(64) std::uint64_t own_broadcast_ = 0;
  std::vector<std::byte> outgoing_;
  bool all_throw_ = false;  // of the thread whose turn it is, as the next
  bool survives_ = false;   // the call goes on without ranks that fail
  std::atomic<bool> loses_silent_{false};
  std::atomic<bool> left_{false};
  std::atomic<bool> given_up_ = false;
  std::mutex leaving_;
  const std::int64_t owner_pid_ = process_id();
  std::atomic<std::uint64_t> wait_ns_{0};
  Record record_;
  mutable std::mutex dead_mutex_;
  std::optional<Error> dead_{};
};

/// The watch of a group's waits: deadline, destroy, failure broadcasts, dead peers, the caller's
/// `on_wait`.
class GroupWatch {
 public:
  GroupWatch(Channel& channel, const Awaited& awaited, const char* stage);
  ~GroupWatch();
  GroupWatch(const GroupWatch&) = delete;
  GroupWatch& operator=(const GroupWatch&) = delete;

  std::uint64_t spin_ns() const;
  std::uint64_t slice_ns() const;
  bool progress();
  void hand_over();
  protocol::Status check();
  /// What `check` does now and then.
  protocol::Status poll(bool late);

  const std::optional<protocol::FailureBroadcast>& broadcast() const { return broadcast_; }
  std::chrono::steady_clock::time_point start() const { return start_; }
  std::chrono::nanoseconds waited() const { return Clock::now() - start_; }

 private:
  using Clock = std::chrono::steady_clock;
  void beat(std::uint64_t value);
  bool left_may_be_under_way(const protocol::FailureBroadcast& left) const;
  /// Whether the reporter has ended the call that this rank waits in. Then every rank has raised
  /// its flags of that call, or is about to.
  bool has_ended_this_call(const protocol::FailureBroadcast& stopped) const;
  /// Whether no call is waited for any more, because a rank has called regroup.
  bool must_regroup() const;
  bool ends_wait(const protocol::FailureBroadcast& told, bool late, int dead) const;
  void say_who_is_missing();
  int culprit() const;
  Clock::duration longest_slice() const;

  Channel& channel_;
  Awaited awaited_;
  const char* stage_;
  Clock::time_point start_ = Clock::now();
  Clock::time_point last_poll_ = start_;
  std::uint64_t deaths_;  // told by the kernel when this last polled
  int halvings_ = 0;      // of the slice, since a death that did not end this wait
  bool failed_ = false;
  WaitNotice long_wait_;
  std::optional<protocol::FailureBroadcast> broadcast_{};
};

template <class Wait>
void Channel::await(const char* stage, const Awaited& awaited, Wait&& wait) {
  GroupWatch watch(*this, awaited, stage);
  protocol::Status status;
  try {
    status = wait(watch);
  } catch (const std::exception& thrown) {
    fail(stage, thrown.what());  // on_wait threw: Ctrl-C
    throw;
  } catch (...) {
    fail(stage, "on_wait threw");
    throw;
  }
  const auto waited = watch.waited();
  count_wait(stage, watch.start(), waited);
  if (!status.ok()) raise(stage, status, watch.broadcast(), waited);
}

}  // namespace ferry::engine

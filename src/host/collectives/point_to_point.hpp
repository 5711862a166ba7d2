// send and recv: transfers between two ranks, beside the calls of all ranks.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/kept_error.hpp"
#include "core/stream_state.hpp"
#include "host/collectives/packet_ring.hpp"

namespace ferry::host {

class PointToPoint;

/// A send or a receive; its event's state. All but `done` belongs to whoever holds the mutex of
/// PointToPoint.
struct Transfer final : Event::State {
  using Clock = std::chrono::steady_clock;

  bool sends = false;
  std::byte* data = nullptr;  // of a send: only read
  std::size_t bytes = 0;
  int peer = 0;
  std::int32_t tag = 0;
  std::weak_ptr<PointToPoint> mover{};

  std::uint64_t message = 0;  // its number, once it has one
  std::size_t moved = 0;      // bytes
  bool begun = false;
  Clock::time_point start{};
  Clock::time_point deadline{};
  bool accepted = false;  // its data are to come, after those of others
  bool extended = false;  // the deadline was
  KeptError error{};
  std::atomic<bool> done{false};

  bool ready() override { return done.load(std::memory_order_acquire); }
  void wait(std::chrono::nanoseconds limit, const OnWait& on_wait) override;
  const char* call() const { return sends ? "send" : "recv"; }
};

/// Matches sends with receives by (peer, tag) in the order in which they begin, and moves
/// all of them together: whoever waits for one moves every one, and while nobody waits a thread
/// does. A message that fits a packet goes at once; of a longer one the data follow when a receive
/// has accepted it, so packets never wait for a receive, and none of them holds up others.
class PointToPoint : public std::enable_shared_from_this<PointToPoint> {
 public:
  using Clock = std::chrono::steady_clock;

  /// `region`: of PacketLayout::bytes, at the same place on all ranks.
  PointToPoint(std::shared_ptr<HostEngine> engine, const engine::Region& region);
  /// Transfers that are under way throw Error(destroyed).
  ~PointToPoint();
  PointToPoint(const PointToPoint&) = delete;
  PointToPoint& operator=(const PointToPoint&) = delete;

  std::shared_ptr<Transfer> make(bool sends, void* data, std::size_t bytes, int peer,
                                 std::int32_t tag);
  /// It is under way from now on. `waits`: the caller is about to wait for it.
  void begin(const std::shared_ptr<Transfer>& transfer, bool waits);
  /// Until it is done, or `limit` is over (false). `on_wait` may throw.
  bool wait(Transfer& transfer, std::chrono::nanoseconds limit, const OnWait& on_wait);
  /// The caller of a wait gave up: the transfer must not use its memory any more.
  void fail(const Transfer& transfer, const std::string& reason);
  const OnWait& on_wait() const { return engine_->config().on_wait; }
  /// Ends all transfers; there will be no more.
  void stop();

 private:
  using Held = std::shared_ptr<Transfer>;
  using Lock = std::unique_lock<std::mutex>;

  /// A message that no receive has asked for yet.
  struct Unexpected {
    PacketHead head;
    std::vector<std::byte> data;  // all of it, if it came along
  };
  struct Answer {
    PacketHead head;
    Held done{};  ///< the receive that has ended with it; null: its data are to come
    KeptError error{};
  };
  /// What there is with one rank.
  struct Peer {
    int open = 0;                // transfers that are not done
    std::uint64_t sent = 0;      // messages to it
    std::uint64_t received = 0;  // messages from it
    std::deque<Held> to_send{};
    std::map<std::uint64_t, Held> sent_not_answered{};
    std::deque<Held> accepted{};  // sends whose data go out
    std::deque<Answer> answers{};
    std::deque<Held> wanted{};  // receives without a message
    std::deque<Unexpected> unexpected{};
    std::map<std::uint64_t, Held> receiving{};
    Clock::time_point data_moved{};  // last, either way
    std::optional<Clock::time_point> left_since{};
  };

  void run_alone();
  void move_until(Lock& lock, const Transfer* awaited);
  bool step();
  bool step(int rank, Peer& peer);
  bool post_next(int rank, Peer& peer);
  void take(int rank, Peer& peer, const PacketRing::Packet& packet);
  void take_message(int rank, Peer& peer, const PacketRing::Packet& packet);
  void take_answer(int rank, Peer& peer, const PacketHead& head);
  void take_data(int rank, Peer& peer, const PacketRing::Packet& packet);
  void match(Peer& peer, const Held& receive, const PacketHead& head, const std::byte* data);
  [[noreturn]] void violation(int rank, const std::string& what) const;
  KeptError mismatch(const Transfer& transfer, std::uint64_t theirs) const;
  void complete(const Held& transfer, KeptError error = {});
  void fail_all(const KeptError& error);

  // transfer_watch.cpp

  /// Fails all where the group has failed, or a peer is gone or late.
  void look_after_peers();
  bool is_gone(int rank);
  std::optional<Error> late();
  bool extended(Transfer& transfer) const;

  bool fits(std::size_t bytes) const { return bytes <= ring_.most_carried(); }
  std::chrono::nanoseconds nap() const;

  std::shared_ptr<HostEngine> engine_;
  std::shared_ptr<void> memory_;
  PacketRing ring_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Peer> peers_;
  std::set<int> active_;    // those with open transfers
  std::vector<Held> open_;  // transfers begun and not done, in that order
  bool moving_ = false;     // some thread is in move_until
  int waiting_ = 0;         // threads in wait
  bool stopped_ = false;
  Clock::time_point last_look_{};
  std::uint64_t deaths_ = 0;  // told by the kernel before the last poll
  std::thread thread_;        // started by the first transfer that nobody waits for
};

}  // namespace ferry::host

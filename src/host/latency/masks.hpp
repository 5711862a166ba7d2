// Masks of a latency exchange on the host: whom this rank goes on without, and the waits that find
// out. docs/design/failures.md, "Masks".
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include "host/latency/heartbeat.hpp"
#include "host/throughput/engine.hpp"
#include "protocol/mask.hpp"
#include "protocol/rejoin.hpp"

namespace ferry::host {

/// One byte for each rank.
using RankBytes = std::vector<std::uint8_t>;
using Clock = std::chrono::steady_clock;

/// The flags that a wait is for.
struct SourceWait {
  const char* stage = "";
  protocol::FlagArray flags{};
  Generation wanted = 0;
  std::uint64_t depth = 2;  ///< how far ahead a flag may not be: the generations in flight
};

/// How long a call has waited. Time in which this rank did not run is not waiting: then this rank
/// is the late one, and must not mask those that could not send without it.
class CallTime {
 public:
  explicit CallTime(std::chrono::nanoseconds deadline) : deadline_(deadline) {}
  void begin() {
    begun_ = polled_ = Clock::now();
    extensions_ = 0;
  }
  /// Each poll of a wait, at most some milliseconds after the one before.
  void poll(Clock::time_point now);
  bool over() const { return left() <= left().zero(); }
  std::chrono::nanoseconds left() const { return deadline_ - (polled_ - begun_); }
  /// Grants one more deadline, from the last poll on.
  void extend() {
    begun_ = polled_;
    ++extensions_;
  }
  int extensions() const { return extensions_; }
  Clock::time_point begun() const { return begun_; }
  Clock::time_point polled() const { return polled_; }

 private:
  std::chrono::nanoseconds deadline_;
  Clock::time_point begun_{}, polled_{};
  int extensions_ = 0;
};

class LatencyMasks {
 public:
  /// `told`: this rank's array of words in which peers say that they mask it.
  LatencyMasks(HostEngine& engine, FabricReach& reach, const protocol::FlagLayout& layout,
               std::byte* told, LatencyHeartbeat heartbeat, bool on);

  bool on() const { return on_; }
  bool masked(int peer) const {
    // relaxed: whom to leave out is this rank's own decision; nothing is read on the strength of it
    return masked_[static_cast<std::size_t>(peer)].load(std::memory_order_relaxed);
  }
  std::vector<bool> all() const;
  /// By the caller's wish.
  void set(int peer, bool masked, Generation now);
  const std::uint64_t* count() const { return &count_; }

  /// Throws Error(evicted) if a peer that this rank has not masked has masked this rank, or if
  /// this rank must rejoin first.
  void check_evicted(const char* call) const;
  /// The deadline of a call runs from here: all its waits share it.
  void begin_call() {
    begin_wait();
    if (on_ && !must_rejoin() && evictor() < 0) beat();
  }
  /// Whether the words of a peer can be read here.
  bool reads(int peer) const { return heartbeat_.reads(peer); }

  /// This rank must rejoin, or regroup, before it makes other calls.
  bool must_rejoin() const { return must_rejoin_.load(std::memory_order_relaxed); }
  /// A rank that was lost before the exchange was made.
  void leave_out(int peer) {
    masked_[static_cast<std::size_t>(peer)].store(true, std::memory_order_relaxed);
  }
  /// Nothing of that rank's memory is looked at any more.
  void forget(int peer) { heartbeat_.forget(peer); }

  /// Waits for the flags of the ranks in `pending`. `came(newcomers)` is called for each lot of
  /// them. Ranks that miss the deadline, or are gone, are masked, and `missed(peer)` is called;
  /// those that are held up themselves get another deadline. Throws Error(evicted).
  void await(const SourceWait& wait, RankBytes pending, Generation now,
             const std::function<void(const RankBytes&)>& came,
             const std::function<void(int)>& missed = {});

  /// The newest generation that this rank's words name.
  Generation newest_told() const;
  /// Masks that were told before `generation` no longer count, nor do this rank's own, but of those
  /// that are `gone`.
  void start_over(Generation generation, const RankBytes& gone);
  void require_rejoin() { must_rejoin_.store(true, std::memory_order_relaxed); }
  Generation base() const { return base_.load(std::memory_order_relaxed); }

 private:
  friend class MaskWatch;
  int evictor() const;
  void begin_wait() {
    time_.begin();
    heartbeat_.begin_window(time_.begun());
  }
  /// Not by a rank that was evicted: nobody is to wait for it.
  void beat();
  /// At the deadline: whether this rank waits for `peer` on, which is held up. A silent rank can
  /// hold up others once for each of the ranks here; without silent ranks somebody made another
  /// call. `arrived`: in a rejoin, whether a rank is there; it holds up nobody.
  bool waits_on(int peer, const std::function<bool(int)>& arrived = {}) const;
  /// Grants one more deadline.
  void extend() {
    time_.extend();
    heartbeat_.begin_window(time_.begun());
  }
  void mask(int peer, Generation now, const char* stage, const char* why);
  void tell(int peer, bool masked, Generation now);  // with mutex_ held
  [[noreturn]] void throw_evicted(const char* call, int peer, std::uint64_t expected,
                                  std::uint64_t seen) const;
  [[noreturn]] void throw_regroups(const char* call, int peer) const;

  HostEngine& engine_;
  FabricReach& reach_;
  protocol::ToldMasks told_;
  LatencyHeartbeat heartbeat_;
  bool on_;
  std::vector<std::atomic<bool>> masked_;
  mutable std::mutex mutex_;          // of the words: masks are set by any thread
  std::vector<std::uint64_t> words_;  // [R]: what each peer was told last
  alignas(8) std::uint64_t count_ = 0;
  std::atomic<Generation> base_{0};  // of the last rejoin
  std::atomic<bool> must_rejoin_{false};
  CallTime time_;  // of the thread whose turn it is
};

/// The watch of a wait under masks: the call's deadline, destroy, ranks that are gone, ranks that
/// went on without this one, the caller's `on_wait`. No failure broadcast of the group ends it.
class MaskWatch {
 public:
  /// `pending`: of the wait.
  MaskWatch(HostEngine& engine, LatencyMasks& masks, protocol::RankSet pending);
  /// Of a rejoin, where nobody can be masked. `arrived(peer)`: whether the peer has come to it.
  MaskWatch(HostEngine& engine, LatencyMasks& masks, std::function<bool(int)> arrived);
  ~MaskWatch();
  MaskWatch(const MaskWatch&) = delete;
  MaskWatch& operator=(const MaskWatch&) = delete;

  std::uint64_t spin_ns() const;
  std::uint64_t slice_ns() const;
  bool progress();
  void hand_over();
  protocol::Status check();
  void awaits(int peer) { only_ = peer; }
  /// Whether the last wait ended because a rank waits for the others in regroup, where it comes to
  /// no call before they are there, too.
  bool regroups() const { return regroups_; }
  /// All ranks have come to the rejoin: what is left takes them no time, so a rank that was the
  /// last to come does not have this one give up while the others go on.
  void all_arrived() { masks_.begin_wait(); }

 private:
  bool rejoins() const { return arrived_ != nullptr; }
  int gone() const;
  /// Whether `peer` is waited for.
  bool awaited(int peer) const;
  /// An awaited rank that has called regroup, or −1.
  int regrouping() const;
  /// What ends a call, and not a rejoin: a peer that went on without this rank, or −1.
  int evictor() const { return rejoins() ? -1 : masks_.evictor(); }
  HostEngine& engine_;
  LatencyMasks& masks_;
  CallTime& time_;
  protocol::RankSet pending_{};
  std::function<bool(int)> arrived_{};
  int only_ = -1;
  bool regroups_ = false;
  std::uint64_t deaths_ = 0;  // told by the kernel when this last looked
};

}  // namespace ferry::host

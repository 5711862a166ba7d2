// Masks of a latency exchange: how a wait learns that a peer died, left or is late (MaskWatch), and
// what it does then.
#include "host/latency/masks.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "base/log.hpp"
#include "platform/death_watch.hpp"

namespace ferry::host {

using protocol::Status;

namespace {

constexpr auto kSlice = std::chrono::milliseconds(5);  // of a sleep
constexpr auto kMaskPollPeriod =
    std::chrono::milliseconds(1);                        // at peers and at the caller's wishes
constexpr auto kPause = std::chrono::milliseconds(100);  // between polls: this rank did not run

}  // namespace

void CallTime::poll(Clock::time_point now) {
  if (now - polled_ > kPause) begun_ += now - polled_;
  polled_ = now;
}

LatencyMasks::LatencyMasks(HostEngine& engine, FabricReach& reach,
                           const protocol::FlagLayout& layout, std::byte* told,
                           LatencyHeartbeat heartbeat, bool on)
    : engine_(engine),
      reach_(reach),
      told_(layout, engine.rank(), told),
      heartbeat_(std::move(heartbeat)),
      on_(on),
      masked_(static_cast<std::size_t>(engine.size())),
      words_(static_cast<std::size_t>(engine.size())),
      time_(engine.config().deadline) {}

std::vector<bool> LatencyMasks::all() const {
  std::vector<bool> all;
  for (int peer = 0; peer < engine_.size(); ++peer) all.push_back(masked(peer));
  return all;
}

void LatencyMasks::tell(int peer, bool masked, Generation now) {
  std::uint64_t& word = words_[static_cast<std::size_t>(peer)];
  const bool told = (word & 1) != 0 && (word >> 1) > base();
  if (told == masked) return;
  word = protocol::next_mask(word, std::max(now, base() + 1), masked);
  told_.tell(reach_, peer, word);
}

void LatencyMasks::set(int peer, bool masked, Generation now) {
  std::scoped_lock lock(mutex_);
  masked_[static_cast<std::size_t>(peer)].store(masked, std::memory_order_relaxed);
  // What it was told would be of a generation that the others go on from.
  if (!must_rejoin()) tell(peer, masked, now);
}

void LatencyMasks::mask(int peer, Generation now, const char* stage, const char* why) {
  {
    std::scoped_lock lock(mutex_);
    if (masked_[static_cast<std::size_t>(peer)].exchange(true, std::memory_order_relaxed)) return;
    tell(peer, true, now);
    // Release: who sees the count sees the mask.
    std::atomic_ref(count_).fetch_add(1, std::memory_order_release);
  }
  engine_.channel().record().masked();
  if (!logs(LogLevel::warn)) return;
  log(LogLevel::warn, engine_.rank(), "mask",
      {{"peer", peer}, {"generation", now}, {"stage", stage}, {"why", why}});
}

void LatencyMasks::beat() {
  heartbeat_.beat(reach_, [this](int peer) { return masked(peer); });
}

bool LatencyMasks::waits_on(int peer, const std::function<bool(int)>& arrived) const {
  int silent = 0;
  for (int other = 0; other < engine_.size(); ++other) {
    if (other == engine_.rank() || (arrived && arrived(other))) continue;
    silent += heartbeat_.held_up(other) ? 0 : 1;
  }
  return time_.extensions() <= silent && heartbeat_.held_up(peer);
}

int LatencyMasks::evictor() const {
  // A rank that this one has masked has no say.
  return told_.find(base(), [this](int peer) { return !masked(peer); });
}

void LatencyMasks::check_evicted(const char* call) const {
  if (must_rejoin()) {
    throw Error(ErrorKind::evicted,
                "rank " + std::to_string(engine_.rank()) + ": " + call +
                    ": the last rejoin of this exchange, or regroup of its group, failed on this "
                    "rank; rejoin again, or regroup",
                {engine_.rank(), engine_.rank(), call, base(), 0, 0});
  }
  if (!on_) return;
  if (const int peer = evictor(); peer >= 0) throw_evicted(call, peer, 0, 0);
}

void LatencyMasks::throw_evicted(const char* call, int peer, std::uint64_t expected,
                                 std::uint64_t seen) const {
  if (logs(LogLevel::warn)) {
    log(LogLevel::warn, engine_.rank(), "evicted", {{"call", call}, {"by", peer}});
  }
  throw Error(ErrorKind::evicted,
              "rank " + std::to_string(engine_.rank()) + ": " + call + ": rank " +
                  std::to_string(peer) +
                  " has masked this rank and goes on without it: evicted; its results since "
                  "may lack rows. Call rejoin on all ranks to come back, or regroup",
              {engine_.rank(), peer, call, base(), expected, seen});
}

void LatencyMasks::await(const SourceWait& wait, RankBytes pending, Generation now,
                         const std::function<void(const RankBytes&)>& came,
                         const std::function<void(int)>& missed) {
  const auto began = Clock::now();
  const auto give_up = [&](int peer, const char* why) {
    mask(peer, now, wait.stage, why);
    pending[static_cast<std::size_t>(peer)] = 0;
    if (missed) missed(peer);
  };
  MaskWatch watch(engine_, *this, pending);
  while (std::any_of(pending.begin(), pending.end(), [](auto p) { return p != 0; })) {
    RankBytes newcomers(pending.size(), 0);
    const Status status =
        protocol::await_some(wait.flags, wait.wanted, wait.depth, pending, newcomers, watch);
    switch (status.code) {
      case Status::Code::kOk: came(newcomers); break;
      case Status::Code::kPeerFailed:
        if (watch.regroups()) throw_regroups(wait.stage, status.peer);
        give_up(status.peer, "gone");
        break;
      case Status::Code::kDeadline: {
        // A rank that fails while it delivers holds up some ranks and not others: those that it
        // holds up are a call behind, and come when their deadline is over.
        bool held_up = false;
        for (std::size_t p = 0; p < pending.size(); ++p) {
          if (pending[p] == 0) continue;
          const int peer = static_cast<int>(p);
          if (waits_on(peer)) {
            held_up = true;
          } else {
            give_up(peer, "deadline");
          }
        }
        if (held_up) extend();
        break;
      }
      case Status::Code::kInterrupted:
        throw Error(ErrorKind::destroyed,
                    "rank " + std::to_string(engine_.rank()) + ": " + wait.stage +
                        ": the group was destroyed during the exchange",
                    {engine_.rank(), status.peer, wait.stage, now, wait.wanted, status.seen});
      default: throw_evicted(wait.stage, status.peer, wait.wanted, status.seen);
    }
  }
  engine_.channel().count_wait(wait.stage, began, Clock::now() - began);
}

void LatencyMasks::throw_regroups(const char* call, int peer) const {
  throw Error(ErrorKind::peer_failed,
              "rank " + std::to_string(engine_.rank()) + ": " + call + ": rank " +
                  std::to_string(peer) + " called regroup; call it on this rank, too",
              {engine_.rank(), peer, call, base(), 0, 0});
}

Generation LatencyMasks::newest_told() const {
  std::scoped_lock lock(mutex_);
  std::uint64_t newest = 0;
  for (const std::uint64_t word : words_) newest = std::max(newest, word >> 1);
  return newest;
}

void LatencyMasks::start_over(Generation generation, const RankBytes& gone) {
  std::scoped_lock lock(mutex_);
  for (std::size_t peer = 0; peer < gone.size(); ++peer) {
    const bool was = masked_[peer].exchange(gone[peer] != 0, std::memory_order_relaxed);
    if (gone[peer] != 0 && !was) std::atomic_ref(count_).fetch_add(1, std::memory_order_release);
  }
  base_.store(generation, std::memory_order_relaxed);
  must_rejoin_.store(false, std::memory_order_relaxed);
}

MaskWatch::MaskWatch(HostEngine& engine, LatencyMasks& masks, protocol::RankSet pending)
    : engine_(engine), masks_(masks), time_(masks.time_), pending_(pending) {
  engine_.channel().beat(true);
}

MaskWatch::MaskWatch(HostEngine& engine, LatencyMasks& masks, std::function<bool(int)> arrived)
    : engine_(engine), masks_(masks), time_(masks.time_), arrived_(std::move(arrived)) {
  engine_.channel().beat(true);
}

MaskWatch::~MaskWatch() {
  engine_.channel().beat(false);
}

std::uint64_t MaskWatch::spin_ns() const {
  return static_cast<std::uint64_t>(engine_.shared_memory()->fabric->spin_time().count());
}

bool MaskWatch::progress() {
  return engine_.shared_memory()->fabric->progress();
}

void MaskWatch::hand_over() {
  engine_.shared_memory()->fabric->hand_over();
}

std::uint64_t MaskWatch::slice_ns() const {
  if (DeathWatch::count() != deaths_) return 1;
  return static_cast<std::uint64_t>(
      std::clamp<std::chrono::nanoseconds>(time_.left(), std::chrono::nanoseconds(1), kSlice)
          .count());
}

bool MaskWatch::awaited(int peer) const {
  if (peer == engine_.rank()) return false;
  return only_ >= 0 ? peer == only_ : pending_[static_cast<std::size_t>(peer)] != 0;
}

int MaskWatch::gone() const {
  for (int peer = 0; peer < engine_.size(); ++peer) {
    if (awaited(peer) && engine_.channel().gone(peer)) return peer;
  }
  return -1;
}

int MaskWatch::regrouping() const {
  if (rejoins()) return -1;
  for (int peer = 0; peer < engine_.size(); ++peer) {
    if (awaited(peer) && engine_.wants_regroup(peer)) return peer;
  }
  return -1;
}

Status MaskWatch::check() {
  Status status;
  const auto now = Clock::now();
  const std::uint64_t deaths = DeathWatch::count();
  if (deaths == deaths_ &&
      now - time_.polled() < std::min<std::chrono::nanoseconds>(kMaskPollPeriod, time_.left())) {
    return status;
  }
  deaths_ = deaths;
  regroups_ = false;
  time_.poll(now);
  masks_.heartbeat_.poll(now);
  engine_.channel().beat(true);
  // Before the deadline: a rank that was stopped finds its own over, and must hear first that the
  // others went on.
  const int by = evictor();
  if (!rejoins() && by < 0) masks_.beat();
  if (engine_.channel().left()) {
    status.code = Status::Code::kInterrupted;
  } else if (by >= 0) {
    status.code = Status::Code::kOvertaken;
    status.peer = by;
  } else if (status.peer = gone(); status.peer >= 0) {
    status.code = Status::Code::kPeerFailed;
  } else if (status.peer = regrouping(); status.peer >= 0) {
    regroups_ = true;
    status.code = Status::Code::kPeerFailed;
  } else if (time_.over() && rejoins() && masks_.waits_on(only_, arrived_)) {
    masks_.extend();
  } else if (time_.over()) {
    status.code = Status::Code::kDeadline;
  } else if (engine_.config().on_wait) {
    engine_.config().on_wait();
  }
  return status;
}

}  // namespace ferry::host

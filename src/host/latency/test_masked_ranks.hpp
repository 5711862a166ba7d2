// For the tests of masks: ranks as threads whose deadlines a busy machine does not bring nearer,
// and which wait for what the others do, not for how long it takes.
#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <optional>
#include <thread>
#include <utility>

#include "host/latency/test_masked_load.hpp"

namespace ferry::host::test {

/// A wait does not count time in which its own rank did not run (CallTime). So when some rank has
/// not been seen for a while, those that wait sleep until it has been: their deadlines run only
/// while all ranks run.
class MaskedRanks {
 public:
  /// Runs `body` on each rank, with a group of `config`, an exchange with masks, and its load.
  void run(GroupConfig config, const std::function<void(Group&, LatencyExchange&, Load&)>& body) {
    config.experts = 8;
    config.on_wait = [this] { poll(); };
    make(config);
    on_ranks(kRanks, [&](int r) {
      self() = &ranks_[static_cast<std::size_t>(r)];
      saw(*self());
      const Leave leave{*this};
      Load load(*self()->group, *self()->latency);
      body(*self()->group, *self()->latency, load);
    });
  }

  /// The calling rank waits until all that have not ended have come.
  void meet() {
    const int meeting = ++self()->meetings;
    idle_until([&] {
      return std::all_of(ranks_.begin(), ranks_.end(),
                         [&](const Rank& rank) { return rank.ended || rank.meetings >= meeting; });
    });
  }
  /// The calling rank does something else until `ready()`, or some rank has ended.
  template <class Ready>
  void until(const Ready& ready) {
    idle_until([&] {
      return ready() || std::any_of(ranks_.begin(), ranks_.end(),
                                    [](const Rank& rank) { return rank.ended.load(); });
    });
  }
  /// The calling rank stops in the midst of its next wait until `ready()`.
  void stop_in_wait(const std::function<bool()>& ready) { self()->stop = ready; }
  bool stopped(int rank) const { return at(rank).stopped; }
  /// How long a rank has waited in calls, since it began to count.
  std::chrono::nanoseconds waited(int rank) const { return at(rank).waited.load(); }
  void count_waits() { self()->waited = 0ns; }

 private:
  static constexpr auto kPause = 101ms;  // more than a wait counts
  static constexpr auto kUnseen = 50ms;  // a rank that waits or is idle is seen more often

  struct Rank {
    std::optional<Group> group{};
    std::optional<LatencyExchange> latency{};
    std::atomic<Clock::time_point> seen{};
    std::atomic<std::chrono::nanoseconds> waited{};
    std::atomic<int> meetings{0};
    std::atomic<bool> idle{false};  ///< it waits for what other ranks do, in no call
    std::atomic<bool> ended{false}, stopped{false};
    std::function<bool()> stop{};
  };
  struct Leave {
    MaskedRanks& ranks;
    ~Leave() {
      self()->latency.reset();
      self()->group.reset();
      self()->idle = self()->ended = true;
      self() = nullptr;
    }
  };

  static Rank*& self() {
    static thread_local Rank* rank = nullptr;
    return rank;
  }
  static void saw(Rank& rank) { rank.seen = Clock::now(); }
  const Rank& at(int rank) const { return ranks_[static_cast<std::size_t>(rank)]; }

  /// Again when the deadline was too short for this machine, for all ranks that take part: it is
  /// meant for the exchange.
  void make(const GroupConfig& config) {
    for (int attempts = 20;; --attempts) {
      const auto bootstraps = thread_bootstrap(kRanks);
      std::atomic<bool> late{false};
      on_ranks(kRanks, [&](int r) {
        Rank& rank = ranks_[static_cast<std::size_t>(r)];
        try {
          rank.group.emplace(bootstraps[static_cast<std::size_t>(r)], config);
          rank.latency.emplace(*rank.group, masked_config());
        } catch (const Error&) {
          if (attempts == 0) throw;
          late = true;
        }
      });
      if (!late) break;
      for (Rank& rank : ranks_) {
        rank.latency.reset();
        rank.group.reset();
      }
    }
    for (Rank& rank : ranks_) saw(rank);
  }

  template <class Ready>
  void idle_until(const Ready& ready) {
    Rank& rank = *self();
    rank.idle = true;
    auto last = Clock::now();
    for (saw(rank); !ready(); saw(rank)) {
      const auto now = Clock::now();
      const bool all_idle = std::all_of(ranks_.begin(), ranks_.end(),
                                        [](const Rank& other) { return other.idle.load(); });
      if (!all_idle) last = now;
      if (now - last > 5s) {
        ADD_FAILURE() << "what a rank waits for will not come";
        break;
      }
      std::this_thread::sleep_for(1ms);
    }
    rank.idle = false;
  }

  void poll() {
    if (self() == nullptr) return;  // the group is being made
    Rank& rank = *self();
    const auto now = Clock::now();
    const auto since = now - rank.seen.load();
    if (since < kPause) rank.waited = rank.waited.load() + since;
    rank.seen = now;
    if (rank.stop) {
      const auto ready = std::exchange(rank.stop, {});
      rank.stopped = true;
      until(ready);
    } else if (std::any_of(ranks_.begin(), ranks_.end(), [&](const Rank& other) {
                 return !other.ended && now - other.seen.load() > kUnseen;
               })) {
      rank.seen = now + kPause;
      std::this_thread::sleep_for(kPause);
      saw(rank);
    }
  }

  std::array<Rank, kRanks> ranks_{};
};

}  // namespace ferry::host::test

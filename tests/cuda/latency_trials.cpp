// Latency mode of the CUDA engine under faults and for long: what takes too long for a test.
//   latency_trials --kill N      a rank killed under load, N times
//   latency_trials --stop N      a rank stopped for 3 s under load, N times; it rejoins
//   latency_trials --replays N   a graph replayed N times with changing routes, a sample compared
//   [--ranks R] [--deadline-ms D]
// Prints one line a trial and the times from fault to mask. Exit status 1: something was wrong.
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>

#include "engine_graph.hpp"
#include "engine_latency.hpp"

namespace ferry::test {
namespace {

constexpr std::uint64_t kSeed = 20261127;
constexpr int kRanksAtMost = 8, kMostTrials = 100, kVictim = 1;
constexpr LatencyTrip kTrip{CombinePath::per_rank, true, false, nullptr, {}};

struct Settings {
  int kill = 0, stop = 0, replays = 0, ranks = 0;
  int deadline_ms = 1000;
};

/// What the ranks of a run tell each other and the parent, in shared memory.
struct Told {
  std::atomic<std::int64_t> fault{0};  ///< ns
  std::atomic<int> victim{0};          ///< its process
  std::atomic<int> stop_at{0};         ///< exchanges after which a trial's load ends
  double mask_ms[kRanksAtMost]{};
  double all_ms[kMostTrials * kRanksAtMost]{};  ///< of stopped ranks
  double before = 0, after = 0;                 ///< exchanges a second
};

std::int64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}

GroupConfig config_of(const Shape& shape, const Settings& settings) {
  GroupConfig config = config_for(shape);
  config.deadline = std::chrono::milliseconds(settings.deadline_ms);
  return config;
}

/// One rank under load.
class Loaded {
 public:
  Loaded(Bootstrap& bootstrap, const Settings& settings, const Shape& shape)
      : bootstrap_(bootstrap),
        device_(take_gpu(bootstrap)),
        world_(bootstrap.size(), shape, kSeed),
        mine_(world_.ranks[static_cast<std::size_t>(bootstrap.rank())], shape, device_, copier_),
        group_(met(bootstrap), config_of(shape, settings)),
        latency_(group_, latency_config(shape, true)) {
    silent_ = world_;
    auto& x = silent_.ranks[kVictim].x;
    std::fill(x.begin(), x.end(), 0.0f);
  }

  void meet() { bootstrap_.all_gather({}, 60s); }
  int rank() const { return group_.rank(); }
  LatencyExchange& latency() { return latency_; }
  bool masks_victim() const { return latency_.masked()[kVictim]; }

  /// One exchange, compared. Whose rows are there is told by the mask before and after it.
  void trip() {
    const bool before = masks_victim();
    const LatencyReceived received = latency_dispatch(latency_, mine_, kTrip);
    const bool between = masks_victim();
    const auto rows = [&](const World& world, const std::set<int>& absent) {
      check_latency_rows(world, rank(), received, copier_, absent);
    };
    const auto all = [&] { rows(world_, {}); };
    const auto none = [&] { rows(world_, {kVictim}); };
    const auto zeros = [&] { rows(silent_, {}); };
    if (before) {
      none();
    } else if (!between) {
      all();
    } else {
      one_of({none, zeros, all});
    }
    const LatencyCombined combined = latency_combine(latency_, mine_, received, kTrip);
    const auto sums = [&](const std::set<int>& absent) {
      check_latency_sums(world_, rank(), kTrip.path, combined.x, copier_, absent);
    };
    if (between) {
      sums({kVictim});
    } else if (!masks_victim()) {
      sums({});
    } else {
      one_of({[&] { sums({kVictim}); }, [&] { sums({}); }});
    }
  }
  /// Exchanges a second, as many on all ranks.
  double speed() {
    constexpr int kExchanges = 200;
    const std::int64_t start = now_ns();
    for (int i = 0; i < kExchanges; ++i) {
      const LatencyReceived received = latency_dispatch(latency_, mine_, kTrip);
      (void)latency_combine(latency_, mine_, received, kTrip);
    }
    return kExchanges * 1e9 / static_cast<double>(now_ns() - start);
  }

 private:
  /// The ranks have met: the deadline is for Ferry, not for CUDA.
  static std::shared_ptr<Bootstrap> met(Bootstrap& bootstrap) {
    bootstrap.all_gather({}, 60s);
    return borrowed(bootstrap);
  }
  /// Throws what the last one says if none holds.
  static void one_of(const std::vector<std::function<void()>>& checks) {
    for (std::size_t i = 0; i + 1 < checks.size(); ++i) {
      try {
        checks[i]();
        return;
      } catch (const std::runtime_error&) {  // another one may hold
      }
    }
    checks.back()();
  }

  Bootstrap& bootstrap_;
  int device_;
  Copier copier_{};
  World world_;
  World silent_ = world_;  // the victim's rows are zero
  OnGpu mine_;
  Group group_;
  LatencyExchange latency_;
};

/// Waits in a thread of its own until the mask counter changes: no GPU is asked.
class MaskClock {
 public:
  MaskClock(const LatencyExchange& latency, Told& told, int rank)
      : thread_([count = latency.mask_count(), &told, rank, this] {
          auto& word = const_cast<std::uint64_t&>(*count);
          const std::uint64_t before = std::atomic_ref(word).load();
          while (std::atomic_ref(word).load(std::memory_order_acquire) == before) {
            if (stop_) return;
            std::this_thread::sleep_for(20us);
          }
          told.mask_ms[rank] = static_cast<double>(now_ns() - told.fault.load()) * 1e-6;
        }) {}
  ~MaskClock() {
    stop_ = true;
    thread_.join();
  }
  MaskClock(const MaskClock&) = delete;
  MaskClock& operator=(const MaskClock&) = delete;

 private:
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

/// Exchanges until the victim is masked, and some more; as many on all ranks that are left. Ranks
/// may mask it in different calls, but none is two calls ahead of another.
void trips_around_fault(Loaded& rank, Told& told) {
  constexpr int kMore = 25;
  const auto until = std::chrono::steady_clock::now() + 30s;
  for (int count = 0; told.stop_at == 0 || count < told.stop_at; ++count) {
    need(std::chrono::steady_clock::now() < until, "no mask after 30 s");
    rank.trip();
    if (rank.rank() == 0 && told.stop_at == 0 && rank.masks_victim()) told.stop_at = count + kMore;
  }
  need(rank.masks_victim(), "other ranks mask the victim, this one does not");
}

void killed_rank(Bootstrap& bootstrap, const Settings& settings, Told& told, int trial) {
  Shape shape;
  Loaded rank(bootstrap, settings, shape);
  rank.meet();
  for (int i = 0; i < 5; ++i) rank.trip();
  const double before = rank.speed();
  if (rank.rank() == 0) told.before = before;
  rank.meet();
  if (rank.rank() == kVictim) {
    std::thread([&told, trial] {
      std::this_thread::sleep_for(std::chrono::microseconds(20'000 + trial * 1733 % 20'000));
      told.fault = now_ns();
      kill(getpid(), SIGKILL);
    }).detach();
    for (;;) rank.trip();
  }
  {
    const MaskClock clock(rank.latency(), told, rank.rank());
    trips_around_fault(rank, told);
  }
  const double after = rank.speed();
  if (rank.rank() == 0) told.after = after;
  rank.latency().rejoin();
  for (int i = 0; i < 5; ++i) rank.trip();
}

/// Rank 0 stops the victim for 3 s, again and again.
void stopped_rank(Bootstrap& bootstrap, const Settings& settings, Told& told, int trials) {
  Shape shape;
  Loaded rank(bootstrap, settings, shape);
  if (rank.rank() == kVictim) told.victim = getpid();
  for (int trial = 0; trial < trials; ++trial) {
    rank.meet();
    for (int i = 0; i < 5; ++i) rank.trip();
    rank.meet();
    std::thread stopper;
    if (rank.rank() == 0) {
      stopper = std::thread([&told, trial] {
        std::this_thread::sleep_for(std::chrono::microseconds(5'000 + trial * 1733 % 20'000));
        told.fault = now_ns();
        kill(told.victim, SIGSTOP);
        std::this_thread::sleep_for(3s);
        kill(told.victim, SIGCONT);
      });
    }
    if (rank.rank() == kVictim) {
      bool behind = false;
      while (!behind) {
        try {
          rank.trip();
        } catch (const Error& error) {
          behind = error.kind() == ErrorKind::left_behind;
          if (!behind) throw;
        }
      }
    } else {
      const MaskClock clock(rank.latency(), told, rank.rank());
      trips_around_fault(rank, told);
    }
    if (stopper.joinable()) stopper.join();
    rank.meet();
    rank.latency().rejoin();
    for (int i = 0; i < 20; ++i) rank.trip();
    rank.meet();
    if (rank.rank() == 0) {
      std::printf("  stop %d: masked after", trial);
      for (int r = 0; r < bootstrap.size(); ++r) {
        if (r != kVictim) std::printf(" %.1f", told.mask_ms[r]);
      }
      std::printf(" ms, rejoined\n");
      std::fflush(stdout);
      told.stop_at = 0;
    }
    if (rank.rank() != kVictim)
      told.all_ms[trial * kRanksAtMost + rank.rank()] = told.mask_ms[rank.rank()];
  }
}

/// Routes that change with every replay; the trips of a sample are compared.
void replayed_rank(Bootstrap& bootstrap, int replays) {
  constexpr int kWorlds = 8, kSamples = 100;
  Shape shape;
  const int device = take_gpu(bootstrap);
  Group group(borrowed(bootstrap), config_for(shape));
  const Copier copier;
  const auto self = static_cast<std::size_t>(group.rank());
  std::vector<World> worlds;
  std::vector<std::unique_ptr<OnGpu>> inputs;
  for (int i = 0; i < kWorlds; ++i) {
    worlds.emplace_back(group.size(), shape, kSeed + static_cast<std::uint64_t>(i));
    for (Sent& sent : worlds.back().ranks) {  // other numbers of tokens
      const std::size_t used = sent.routes.size() * static_cast<std::size_t>(i) / (kWorlds - 1);
      std::fill(sent.routes.begin() + static_cast<std::ptrdiff_t>(used), sent.routes.end(), -1);
    }
    inputs.push_back(std::make_unique<OnGpu>(worlds.back().ranks[self], shape, device, copier));
  }
  const OnGpu mine(worlds[0].ranks[self], shape, device, copier);
  OwnStream own(device);
  LatencyExchange latency(group, latency_config(shape));
  LatencyTrip by_rank{CombinePath::per_rank, true, true, &own.stream, {}};
  LatencyTrip by_slot{CombinePath::per_slot, false, false, &own.stream, {}};
  LatencyExchanged one, two;
  const Graph graph(own.raw, [&] {
    one.received = latency_dispatch(latency, mine, by_rank);
    two.received = latency_dispatch(latency, mine, by_slot);
    two.combined = latency_combine(latency, mine, two.received, by_slot);
    one.combined = latency_combine(latency, mine, one.received, by_rank);
  });
  bootstrap.all_gather({}, 60s);
  const int every = std::max(1, replays / kSamples);
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < replays; ++i) {
    const auto at = static_cast<std::size_t>(i % kWorlds);
    const Sent& sent = worlds[at].ranks[self];
    const auto copy = [&](const Buffer& to, const Buffer& from, std::size_t bytes) {
      if (bytes == 0) return;
      need(cudaMemcpyAsync(to.data(), from.data(), bytes, cudaMemcpyDeviceToDevice, own.raw),
           "cudaMemcpyAsync");
    };
    copy(mine.x, inputs[at]->x, sent.x.size() * 4);
    copy(mine.routes, inputs[at]->routes, sent.routes.size() * 8);
    copy(mine.weights, inputs[at]->weights, sent.weights.size() * 4);
    graph.launch();
    if (i % every != 0 && i + 1 != replays) continue;
    graph.wait();
    for (const LatencyExchanged* got : {&one, &two}) {
      const LatencyTrip& trip = got == &one ? by_rank : by_slot;
      check_latency_rows(worlds[at], group.rank(), got->received, copier);
      check_latency_sums(worlds[at], group.rank(), trip.path, got->combined.x, copier);
    }
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (group.rank() == 0) {
    std::printf("REPLAYS %d of 2 exchanges, every %d-th compared, %.1f s: good\n", replays, every,
                seconds);
    std::fflush(stdout);
  }
  bootstrap.all_gather({}, 60s);
}

void tell(const char* fault, std::vector<double> ms) {
  if (ms.empty()) return;
  std::sort(ms.begin(), ms.end());
  const auto at = [&](double part) {
    return ms[static_cast<std::size_t>(part * static_cast<double>(ms.size() - 1) + 0.5)];
  };
  std::printf("FAULTS %s: fault to mask, %zu times: p50 %.1f ms, p99 %.1f ms, most %.1f ms\n",
              fault, ms.size(), at(0.5), at(0.99), ms.back());
}

int run(const Settings& settings) {
  const int gpus = gpu_count();
  if (gpus == 0) {
    std::printf("NO GPU\n");
    return 77;
  }
  const int ranks = settings.ranks > 0 ? settings.ranks : std::clamp(gpus, 3, 4);
  void* memory =
      mmap(nullptr, sizeof(Told), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 2;
  Told& told = *new (memory) Told();
  bool good = true;
  const auto complain = [&](const std::vector<std::string>& problems, std::size_t expected) {
    if (problems.size() == expected) return;
    good = false;
    for (const std::string& problem : problems) std::printf("WRONG %s\n", problem.c_str());
  };
  std::vector<double> killed;
  for (int trial = 0; trial < settings.kill; ++trial) {
    told.stop_at = 0;
    const auto problems =
        run_ranks(ranks, 1, [&](Bootstrap& b) { killed_rank(b, settings, told, trial); }, 60);
    complain(problems, 1);  // the victim's process ended
    std::printf("  kill %d: masked after", trial);
    for (int r = 0; r < ranks; ++r) {
      if (r == kVictim) continue;
      std::printf(" %.1f", told.mask_ms[r]);
      killed.push_back(told.mask_ms[r]);
    }
    std::printf(" ms; %.0f exchanges a second, then %.0f\n", told.before, told.after);
    std::fflush(stdout);
  }
  tell("kill", killed);
  told.stop_at = 0;
  if (settings.stop > 0) {
    complain(run_ranks(
                 ranks, 1, [&](Bootstrap& b) { stopped_rank(b, settings, told, settings.stop); },
                 60 + 10 * settings.stop),
             0);
    std::vector<double> stopped;
    for (const double ms : told.all_ms) {
      if (ms > 0) stopped.push_back(ms);
    }
    tell("stop", stopped);
  }
  if (settings.replays > 0) {
    complain(run_ranks(
                 std::min(ranks, std::max(2, gpus)), 1,
                 [&](Bootstrap& b) { replayed_rank(b, settings.replays); }, 300),
             0);
  }
  std::printf(good ? "TRIALS good\n" : "TRIALS bad\n");
  return good ? 0 : 1;
}

}  // namespace
}  // namespace ferry::test

int main(int argc, char** argv) {
  ferry::test::Settings settings;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string word = argv[i];
    const int value = std::atoi(argv[i + 1]);
    if (word == "--kill") settings.kill = value;
    if (word == "--stop") settings.stop = value;
    if (word == "--replays") settings.replays = value;
    if (word == "--ranks") settings.ranks = value;
    if (word == "--deadline-ms") settings.deadline_ms = value;
  }
  return ferry::test::run(settings);
}

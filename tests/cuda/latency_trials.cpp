// Latency mode of the CUDA engine under faults and for long: what takes too long for a test.
//   latency_trials --kill N      a rank killed under load, N times
//   latency_trials --stop N      a rank stopped for 3 s under load, N times; it rejoins
//   latency_trials --replays N   a graph replayed N times with changing routes, a sample compared
//   [--ranks R] [--deadline-ms D] [--tokens 37] [--hidden 1040] [--f32 1]
// Prints one line a trial and the times from fault to mask. Exit status 1: something was wrong.
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <string>
#include <thread>

#include "latency_load.hpp"

namespace ferry::test {
namespace {

constexpr std::uint64_t kSeed = 20261127;
constexpr int kRanksAtMost = 8, kMostTrials = 100;

struct Settings {
  int kill = 0, stop = 0, replays = 0, ranks = 0;
  int deadline_ms = 1000;
  /// Rows that cross as LL128, where GPUs allow it; of 8 tokens or fewer as LL.
  Shape shape{.hidden = 1040, .dtype = Dtype::bf16};
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

GroupConfig config_of(const Settings& settings) {
  GroupConfig config = config_for(settings.shape);
  config.deadline = std::chrono::milliseconds(settings.deadline_ms);
  return config;
}

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
  Loaded rank(bootstrap, config_of(settings), settings.shape, kSeed);
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
  Loaded rank(bootstrap, config_of(settings), settings.shape, kSeed);
  if (rank.rank() == kVictim) told.victim = getpid();
  for (int trial = 0; trial < trials; ++trial) {
    rank.meet();
    for (int i = 0; i < 5; ++i) rank.trip();
    rank.meet();
    std::future<void> stopper;  // its end is waited for, also where this rank fails
    if (rank.rank() == 0) {
      stopper = std::async(std::launch::async, [&told, trial] {
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
          behind = error.kind() == ErrorKind::evicted;
          if (!behind) throw;
        }
      }
    } else {
      const MaskClock clock(rank.latency(), told, rank.rank());
      trips_around_fault(rank, told);
    }
    if (stopper.valid()) stopper.get();
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
    complain(
        run_ranks(
            std::min(ranks, std::max(2, gpus)), 1,
            [&](Bootstrap& b) { replayed_rank(b, settings.shape, settings.replays, kSeed); }, 300),
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
    if (word == "--tokens") settings.shape.tokens = value;
    if (word == "--hidden") settings.shape.hidden = value;
    if (word == "--f32" && value != 0) settings.shape.dtype = ferry::Dtype::f32;
  }
  return ferry::test::run(settings);
}

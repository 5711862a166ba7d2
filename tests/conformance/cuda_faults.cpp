// Ranks that die, ranks that do not come, and what is left behind.
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <set>
#include <thread>

#include "cuda_parts.hpp"
#include "device.hpp"
#include "exchange.hpp"
#include "random.hpp"

namespace ferry::conformance {
namespace {

using namespace std::chrono_literals;

double seconds_since(std::int64_t ns) {
  return static_cast<double>(now_ns() - ns) * 1e-9;
}

/// A new group on the same GPUs works.
void use_again(Rank& rank, std::uint64_t seed) {
  rank.begin("a new group");
  const Case c = small_case(rank, seed);
  Group group(rank.bootstrap(), group_config(rank, c.experts()));
  Exchange(rank, group, c).run();
  group.barrier();
}

std::set<std::string> shared_names() {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    names.insert(entry.path().filename());
  }
  return names;
}

/// What is left of ranks that have ended: names in /dev/shm, memory of GPUs.
class Before {
 public:
  bool clean() const {
    constexpr auto kMost = std::size_t{64} << 20;
    bool ok = true;
    for (const std::string& name : shared_names()) {
      if (names_.contains(name)) continue;
      std::printf("FAILED: /dev/shm/%s is left\n", name.c_str());
      ok = false;
    }
    // The driver takes a moment to free what a killed process held.
    for (int tries = 0; tries < 20; ++tries, std::this_thread::sleep_for(250ms)) {
      const auto now = free_gpu_bytes();
      std::size_t gpu = 0;
      while (gpu < now.size() && now[gpu] + kMost >= free_[gpu]) ++gpu;
      if (gpu == now.size()) return ok;
    }
    std::printf("FAILED: memory of a GPU is left in use\n");
    return false;
  }

 private:
  std::set<std::string> names_ = shared_names();
  std::vector<std::size_t> free_ = free_gpu_bytes();
};

struct Kill {
  int victim;
  std::uint64_t seed;
  SharedNumber& at_ns;
  SharedNumber& slowest_ns;
};

void exchange_until_killed(Rank& rank, const Kill& kill) {
  const Case c = small_case(rank, kill.seed);
  Group group(rank.bootstrap(), group_config(rank, c.experts()));
  Exchange exchange(rank, group, c);
  exchange.run();
  rank.meet();
  if (rank.rank() == kill.victim) {
    std::thread([&kill] {
      std::this_thread::sleep_for(std::chrono::microseconds(20000 + kill.seed % 40000));
      *kill.at_ns = now_ns();
      std::raise(SIGKILL);
    }).detach();
  }
  try {
    const std::int64_t start = now_ns();
    for (std::uint64_t i = 0; seconds_since(start) < 25; ++i) exchange.run(i % 4);
    rank.fail("exchanges went on without rank " + std::to_string(kill.victim));
  } catch (const Error& error) {
    const std::int64_t taken = now_ns() - *kill.at_ns;
    rank.check(error.kind() == ErrorKind::peer_failed && error.peer() == kill.victim,
               std::string("names another rank: ") + error.what());
    rank.check(taken < 5'000'000'000, "took " + std::to_string(taken) + " ns");
    std::int64_t before = *kill.slowest_ns;
    while (before < taken && !(*kill.slowest_ns).compare_exchange_weak(before, taken)) {
    }
  }
}

}  // namespace

bool run_kill(const CudaOptions& options) {
  const std::int64_t start = now_ns();
  const Before before;
  const Layout layout = processes(options, 3);
  bool ok = true;
  SharedNumber slowest;
  for (const int victim : {1, 0, layout.ranks - 1}) {
    SharedNumber at;
    const Kill kill{victim, mix(options.seed, 501, static_cast<std::uint64_t>(victim)) >> 1, at,
                    slowest};
    ok &= passes(
        options, layout, "kill rank " + std::to_string(victim),
        [&](Rank& rank) {
          exchange_until_killed(rank, kill);
          Rank left = rank.without(kill.victim);
          use_again(left, kill.seed + 1);
        },
        victim);
  }
  ok &= before.clean();
  return conclude("kill", ok,
                  "survivors knew after at most " + std::to_string(*slowest / 1000000) + " ms",
                  start);
}

namespace {

enum class Missing { plan, dispatch, combine };

/// Rank `absent` does not come to one call; the others say so in time.
void miss_call(Rank& rank, Missing call, int absent, std::uint64_t seed) {
  constexpr auto kDeadline = 3s;
  const Case c = small_case(rank, seed);
  GroupConfig config = group_config(rank, c.experts());
  config.deadline = kDeadline;
  Group group(rank.bootstrap(), config);
  Exchange exchange(rank, group, c);
  exchange.run();
  rank.meet();
  const auto make_call = [&] {
    if (call == Missing::plan) Exchange(rank, group, c);
    if (call == Missing::dispatch) exchange.check(exchange.dispatch(1), 1);
    if (call == Missing::combine) exchange.combine_and_check(1);
  };
  if (rank.rank() == absent) rank.meet();  // until the others have given up
  const std::int64_t start = now_ns();
  try {
    make_call();
    group.barrier();  // the late rank's own call may find all that it needs
    rank.fail("a call without rank " + std::to_string(absent) + " ended well");
  } catch (const Error& error) {
    const double taken = seconds_since(start);
    if (rank.rank() == absent) {
      rank.check(taken < 5, "the late rank waited for " + std::to_string(taken) + " s");
    } else {
      // The first to give up tells the others.
      rank.check(error.kind() == ErrorKind::deadline || error.kind() == ErrorKind::peer_failed,
                 std::string("another kind of error: ") + error.what());
      rank.check(error.peer() == absent, std::string("names another rank: ") + error.what());
      rank.check(taken > 2 && taken < 6, "took " + std::to_string(taken) + " s of 3");
    }
  }
  if (rank.rank() != absent) rank.meet();
  group.destroy();
}

}  // namespace

bool run_deadline(const CudaOptions& options) {
  const std::int64_t start = now_ns();
  const Before before;
  bool ok = true;
  std::vector<Layout> all{processes(options, 2), processes(options, 3)};
  if (may_be_threads(options, all[0].ranks)) all.push_back({all[0].ranks, true});
  for (const Layout& layout : all) {
    ok &= passes(options, layout, "deadline", [&](Rank& rank) {
      for (const Missing call : {Missing::plan, Missing::dispatch, Missing::combine}) {
        rank.begin("missing call " + std::to_string(static_cast<int>(call)));
        miss_call(rank, call, rank.size() - 1, mix(options.seed, 502));
        rank.meet();
        use_again(rank, mix(options.seed, 503));
      }
    });
  }
  ok &= before.clean();
  return conclude("deadline", ok, "a rank that does not come", start);
}

bool run_leaks(const CudaOptions& options) {
  const std::int64_t start = now_ns();
  const Before before;
  constexpr int kGroups = 30;
  const bool ok = passes(options, processes(options, 2), "leaks", [&](Rank& rank) {
    const auto descriptors = [] {
      const std::filesystem::directory_iterator all("/proc/self/fd");
      return std::distance(begin(all), end(all));
    };
    std::ptrdiff_t files = 0;
    std::size_t free = 0;
    for (int i = 0; i < kGroups; ++i) {
      use_again(rank, mix(options.seed, 504, static_cast<std::uint64_t>(i)) >> 1);
      rank.meet();
      if (i == 4) {
        files = descriptors();
        free = free_bytes(rank.where());
      }
      rank.meet();
    }
    rank.check(descriptors() <= files, "descriptors: " + std::to_string(descriptors()) +
                                           ", after five groups " + std::to_string(files));
    const std::size_t now = free_bytes(rank.where());
    rank.check(now + (std::size_t{8} << 20) >= free, std::to_string(free - now) +
                                                         " bytes of the GPU are gone after " +
                                                         std::to_string(kGroups - 5) + " groups");
  });
  return conclude("leaks", before.clean() && ok, std::to_string(kGroups) + " groups one by one",
                  start);
}

}  // namespace ferry::conformance

// Many losses of ranks in throughput mode on GPUs: how long until the survivors have their error,
// and how long `regroup` takes from the last error on. Prints JSON.
//   regroup_trials [--kills 24] [--seconds 100] [--ranks 4]
// Ranks are processes, rank r on GPU r modulo their number. In each job two ranks are killed one
// after the other, each at another stage; everything that is received is checked.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "regroup_case.hpp"

namespace ferry::test {
namespace {

struct Times {
  std::vector<double> detected{};   ///< kill → error, of each survivor
  std::vector<double> regrouped{};  ///< the last error → the last regroup has returned
  /// → all have ended an exchange of each order; without what the trial takes for new tokens.
  std::vector<double> exchanged{};
  std::vector<double> usual{};     ///< the same barrier and exchanges before the kill
  std::vector<double> replayed{};  ///< kill → the first replay of the old graph has ended on all

  void add(const LossTimes& times, const std::vector<int>& survivors) {
    std::int64_t failed = 0, regrouped_at = 0, ready_at = 0, exchanged_at = 0, replayed_at = 0;
    for (const int rank : survivors) {
      const LossTimes::Survivor& one = times.ranks[static_cast<std::size_t>(rank)];
      detected.push_back(ms(one.failed - times.killed));
      usual.push_back(ms(one.usual));
      failed = std::max(failed, one.failed.load());
      regrouped_at = std::max(regrouped_at, one.regrouped.load());
      ready_at = std::max(ready_at, one.ready.load());
      exchanged_at = std::max(exchanged_at, one.exchanged.load());
      replayed_at = std::max(replayed_at, one.replayed.load());
    }
    regrouped.push_back(ms(regrouped_at - failed));
    exchanged.push_back(ms(regrouped_at - failed + exchanged_at - ready_at));
    replayed.push_back(ms(replayed_at - times.killed));
  }
  static double ms(std::int64_t ns) { return static_cast<double>(ns) * 1e-6; }
};

void print(const char* key, std::vector<double> values, const char* end) {
  std::sort(values.begin(), values.end());
  const auto at = [&](double q) {
    return values.empty()
               ? 0.0
               : values[static_cast<std::size_t>(q * static_cast<double>(values.size() - 1) + 0.5)];
  };
  std::printf("  \"%s\": {\"p50\": %.2f, \"p99\": %.2f, \"max\": %.2f, \"count\": %zu}%s\n", key,
              at(0.5), at(0.99), at(1), values.size(), end);
}

/// Two kills. False: something went wrong, and it was said.
bool run_job(int ranks, std::size_t number, Times& all) {
  const auto times = shared_times(2);
  const int first = static_cast<int>(number) % ranks;
  const int second = (first + 1 + static_cast<int>(number / 4) % (ranks - 1)) % ranks;
  const DiesAt deaths[] = {kDeaths[number % kDeaths.size()],
                           kDeaths[(number + number / kDeaths.size() + 1) % kDeaths.size()]};
  const auto problems = run_losses(
      ranks, {first, second},
      [&](Bootstrap& bootstrap) {
        RegroupingRank rank(bootstrap, 20261127 + number);
        rank.lose(first, deaths[0], *times[0]);
        rank.replay_after(*times[0]);
        rank.lose(second, deaths[1], *times[1]);
        rank.replay_after(*times[1]);
      },
      60);
  for (const std::string& problem : problems) {
    std::fprintf(stderr, "job %zu (%s, %s): %s\n", number, name_of(deaths[0]), name_of(deaths[1]),
                 problem.c_str());
  }
  std::vector<int> left;
  for (int r = 0; r < ranks; ++r) {
    if (r != first) left.push_back(r);
  }
  if (!problems.empty()) return false;
  all.add(*times[0], left);
  std::erase(left, second);
  all.add(*times[1], left);
  return true;
}

int run(int kills, double seconds, int ranks) {
  if (gpu_count() == 0) {
    std::printf("SKIPPED: NO GPU\n");
    return 77;
  }
  const std::int64_t start = time_now();
  Times all;
  std::size_t jobs = 0;
  while (static_cast<int>(2 * jobs) < kills &&
         static_cast<double>(time_now() - start) * 1e-9 < seconds) {
    if (!run_job(ranks, jobs, all)) return 1;
    ++jobs;
  }
  std::printf("{\"ranks\": %d, \"gpus\": %d, \"kills\": %zu,\n", ranks, gpu_count(), 2 * jobs);
  print("detect_ms", all.detected, ",");
  print("regroup_ms", all.regrouped, ",");
  print("exchanged_ms", all.exchanged, ",");
  print("usual_exchange_ms", all.usual, ",");
  print("replayed_ms", all.replayed, "}");
  return 0;
}

}  // namespace
}  // namespace ferry::test

int main(int argc, char** argv) {
  int kills = 24, ranks = 4;
  double seconds = 100;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--kills") kills = std::atoi(argv[i + 1]);
    if (name == "--seconds") seconds = std::atof(argv[i + 1]);
    if (name == "--ranks") ranks = std::atoi(argv[i + 1]);
  }
  if (ranks < 4 || ranks > 8) {
    return std::fprintf(stderr, "regroup_trials: --ranks: expected 4 … 8\n"), 2;
  }
  return ferry::test::run(kills, seconds, ranks);
}

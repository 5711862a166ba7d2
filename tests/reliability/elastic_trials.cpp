// Many losses of ranks in throughput mode: how long until the survivors have their error, and from
// the last error to the first exchange of the next epoch. Prints JSON.
// elastic_trials [KILLS_OF_EACH_CELL [RANKS [DEADLINE_MS_OF_STOPS [DOMAIN_SIZE [CELLS [SEED
// [cuda|host [SECONDS]]]]]]]] DOMAIN_SIZE: so many ranks are a domain each, and libfabric joins
// them. CELLS: those alone whose names contain it; =CELL: the one of that name. cuda: on the GPUs
// that are there. SECONDS: a cell that takes longer ends with fewer kills.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "conformance/device.hpp"
#include "elastic_load.hpp"

namespace ferry::test {
namespace {

/// A cell: who is lost how, again and again.
struct Cell {
  const char* name;
  Stage stage;
  int at_once;
  bool rank_0;
};
constexpr Cell kCells[] = {{"anywhere", Stage::anywhere, 1, false},
                           {"rank 0, anywhere", Stage::anywhere, 1, true},
                           {"before plan", Stage::plan, 1, false},
                           {"before dispatch", Stage::dispatch, 1, false},
                           {"before combine", Stage::combine, 1, false},
                           {"after combine", Stage::after, 1, false},
                           {"two at once", Stage::anywhere, 2, false},
                           {"another during regroup", Stage::regroup, 2, false}};

double quantile(std::vector<double> values, double q) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const auto last = static_cast<double>(values.size() - 1);
  return values[static_cast<std::size_t>(q * last + 0.5)];
}

void print(const char* key, const std::vector<double>& values, const char* end) {
  std::printf("\"%s\": {\"p50\": %.2f, \"p99\": %.2f, \"max\": %.2f}%s", key, quantile(values, 0.5),
              quantile(values, 0.99), quantile(values, 1), end);
}

class Trials {
 public:
  Trials(int ranks, int kills, std::chrono::seconds most, int domain_size, std::string cells,
         unsigned seed, int gpus)
      : ranks_(ranks),
        kills_(kills),
        most_(most),
        domain_size_(domain_size),
        cells_(std::move(cells)),
        gpus_(gpus),
        random_(seed) {}

  bool kill(const Cell& cell) {
    if (!wanted(cell.name)) return true;
    std::vector<double> detected, regrouped;
    std::optional<ElasticJob> job;
    int kills = 0;
    const auto start = Clock::now();
    while (goes_on(kills, start)) {
      if (!job || int(job->alive().size()) - cell.at_once < std::max(2, ranks_ / 2) ||
          (cell.rank_0 && job->alive().front() != 0)) {
        job.emplace(ranks_, std::chrono::seconds(30), domain_size_, gpus_);
      }
      any_moment();
      const Loss loss = job->lose(victims(*job, cell), cell.stage, SIGKILL);
      if (!ok(cell.name, *job)) return false;
      detected.insert(detected.end(), loss.detected.begin(), loss.detected.end());
      regrouped.push_back(loss.regrouped);
      kills += cell.at_once;
    }
    report(cell.name, kills, detected, regrouped);
    return true;
  }

  /// What happens while processes take the places of ranks that were killed.
  enum class Meanwhile { nothing, two_at_once, a_domain, joiner_dies, rank_dies };

  bool join(const char* name, Meanwhile meanwhile) {
    if (!wanted(name)) return true;
    std::vector<double> joined;
    ElasticJob job(ranks_, std::chrono::seconds(30), domain_size_, gpus_);
    int kills = 0;
    const auto start = Clock::now();
    while (goes_on(kills, start)) {
      any_moment();
      const int lost = meanwhile == Meanwhile::two_at_once ? 2 : 1;
      const std::vector<int> seats =
          meanwhile == Meanwhile::a_domain ? domain(job) : victims(job, lost);
      job.lose(seats, Stage::anywhere, SIGKILL);
      kills += int(seats.size());
      any_moment();
      // Longer than it takes to join, so that it ends at every stage.
      const std::chrono::microseconds after(random_() % (gpus_ > 0 ? 2'500'000 : 60'000));
      std::vector<int> missing = seats;
      if (job.wrong().empty() && meanwhile == Meanwhile::joiner_dies) {
        job.lose_joiner(seats.front(), after);
        ++kills;
      }
      if (job.wrong().empty() && meanwhile == Meanwhile::rank_dies) {
        const int victim = victims(job, 1).front();
        job.lose_beside_joiner(seats.front(), victim, after);
        missing = {victim};
        ++kills;
      }
      if (job.wrong().empty()) joined.push_back(job.join(missing));
      if (!ok(name, job)) return false;
    }
    begin_cell(name, kills);
    print("join_ms", joined, "}");
    std::fflush(stdout);
    return true;
  }

  bool stop(std::chrono::milliseconds deadline) {
    std::vector<double> detected, regrouped;
    const Cell cell{"stopped, anywhere", Stage::anywhere, 1, false};
    if (!wanted(cell.name)) return true;
    const int stops = std::max(1, kills_ / 10);
    int late = 0;  // jobs that were not made within the deadline, as on a busy machine
    for (int i = 0; i < stops; ++i) {
      ElasticJob job(ranks_, deadline, domain_size_, gpus_);
      if (!job.began() && ++late <= stops) {
        --i;
        continue;
      }
      any_moment();
      const std::vector<int> victim = victims(job, cell);
      const Loss loss = job.lose(victim, cell.stage, SIGSTOP);
      if (job.wrong().empty()) job.resume(victim);
      if (!ok(cell.name, job)) return false;
      detected.insert(detected.end(), loss.detected.begin(), loss.detected.end());
      regrouped.push_back(loss.regrouped);
    }
    report(cell.name, stops, detected, regrouped);
    return true;
  }

 private:
  using Clock = std::chrono::steady_clock;
  bool goes_on(int kills, Clock::time_point start) const {
    return kills < kills_ && Clock::now() - start < most_;
  }
  void any_moment() {
    std::this_thread::sleep_for(std::chrono::microseconds(2000 + random_() % 20'000));
  }
  std::vector<int> victims(const ElasticJob& job, const Cell& cell) {
    return cell.rank_0 ? std::vector<int>{0} : victims(job, cell.at_once);
  }
  std::vector<int> victims(const ElasticJob& job, int count) {
    std::vector<int> ranks = job.alive();
    std::shuffle(ranks.begin(), ranks.end(), random_);
    ranks.resize(static_cast<std::size_t>(count));
    return ranks;
  }
  /// All of one.
  std::vector<int> domain(const ElasticJob& job) {
    const int which = victims(job, 1).front() / domain_size_;
    std::vector<int> ranks = job.alive();
    std::erase_if(ranks, [&](int rank) { return rank / domain_size_ != which; });
    return ranks;
  }
  static bool ok(const char* name, const ElasticJob& job) {
    if (job.wrong().empty()) return true;
    std::fprintf(stderr, "%s: %s\n", name, job.wrong().c_str());
    return false;
  }
  void report(const char* name, int lost, const std::vector<double>& detected,
              const std::vector<double>& regrouped) {
    begin_cell(name, lost);
    print("detect_ms", detected, ", ");
    print("regroup_ms", regrouped, "}");
    std::fflush(stdout);
  }
  void begin_cell(const char* name, int lost) {
    std::printf("%s    \"%s\": {\"lost\": %d, ", first_ ? "" : ",\n", name, lost);
    first_ = false;
  }
  bool wanted(const char* name) const {
    return cells_.starts_with('=') ? name == cells_.substr(1)
                                   : std::string(name).find(cells_) != std::string::npos;
  }

  int ranks_;
  int kills_;
  std::chrono::seconds most_;  // of a cell
  int domain_size_;
  bool first_ = true;
  std::string cells_;
  int gpus_;
  std::mt19937 random_;
};

/// How busy the machine is: figures of a busy one say little.
double load() {
  double one_minute = 0;
  return getloadavg(&one_minute, 1) == 1 ? one_minute : -1;
}

int run(Trials& trials, int ranks, std::chrono::milliseconds deadline, int domain_size) {
  std::printf("{\"ranks\": %d, \"domain_size\": %d, \"stop_deadline_ms\": %d,\n", ranks,
              domain_size, int(deadline.count()));
  std::printf(" \"load_before\": %.1f, \"cells\": {\n", load());
  for (const Cell& cell : kCells) {
    if (!trials.kill(cell)) return 1;
  }
  if (!trials.stop(deadline)) return 1;
  using Meanwhile = Trials::Meanwhile;
  const bool joined = trials.join("a process joins", Meanwhile::nothing) &&
                      trials.join("two join at once", Meanwhile::two_at_once) &&
                      (domain_size == 0 || trials.join("a domain joins", Meanwhile::a_domain)) &&
                      trials.join("a joiner is killed", Meanwhile::joiner_dies) &&
                      trials.join("a rank is killed while one joins", Meanwhile::rank_dies);
  if (!joined) return 1;
  std::printf("\n  }\n}\n");
  return 0;
}

}  // namespace
}  // namespace ferry::test

int main(int argc, char** argv) {
  const auto argument = [&](int i, int otherwise) {
    return argc > i ? std::atoi(argv[i]) : otherwise;
  };
  const int ranks = argument(2, 8), domain_size = argument(4, 0);
  const bool cuda = argc > 7 && std::string(argv[7]) == "cuda";
  const int gpus = cuda ? ferry::conformance::gpu_count() : 0;
  if (cuda && gpus == 0) return std::printf("SKIPPED: NO GPU\n"), 77;
  ferry::test::Trials trials(ranks, argument(1, 200), std::chrono::seconds(argument(8, 86400)),
                             domain_size, argc > 5 ? argv[5] : "", unsigned(argument(6, 20261126)),
                             gpus);
  return ferry::test::run(trials, ranks, std::chrono::milliseconds(argument(3, 1000)), domain_size);
}

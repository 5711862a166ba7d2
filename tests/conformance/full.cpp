// The full product of the matrix.
//
//   conformance_full [--every N] [--only TEXT] [--case NUMBER] [--deadline SECONDS]
//
// --every N: only every Nth case. --only TEXT: only cases whose line contains TEXT. --case NUMBER:
// one case. FERRY_TEST_SEED sets the seed. Without arguments and without FERRY_CONFORMANCE=full,
// as in `make test`, it runs one case in 400: a check of this program itself.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <tuple>

#include "case.hpp"
#include "fleet.hpp"
#include "random.hpp"
#include "session.hpp"

namespace ferry::conformance {
namespace {

struct Options {
  std::int64_t every = 1;
  std::int64_t only_case = -1;
  std::string only{};
  std::chrono::seconds deadline{40};
};

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Cases that share their ranks, in order; a fleet runs all of them.
using Batch = std::vector<std::pair<std::int64_t, Case>>;
using BatchKey = std::tuple<FabricKind, int, std::int64_t, int>;

int run(const Options& options) {
  const std::uint64_t seed = base_seed();
  std::map<BatchKey, Batch> batches;
  std::int64_t number = 0, total = 0;
  for (Mode mode : {Mode::throughput, Mode::latency}) {
    for (std::int64_t i = 0; i < product(mode); ++i, ++number) {
      if (options.only_case >= 0 ? number != options.only_case : number % options.every != 0) {
        continue;
      }
      const Case c = numbered_case(mode, i, seed);
      if (c.fabric == FabricKind::shm && only_threads()) continue;
      if (to_string(c).find(options.only) == std::string::npos) continue;
      batches[{c.fabric, c.ranks, c.hidden, c.topk}].emplace_back(number, c);
      ++total;
    }
  }
  std::printf("conformance: %lld of %lld cases, FERRY_TEST_SEED=%llu\n",
              static_cast<long long>(total), static_cast<long long>(number),
              static_cast<unsigned long long>(seed));
  const auto start = std::chrono::steady_clock::now();
  auto said = start;
  std::int64_t done = 0, failed = 0;
  for (auto& [key, batch] : batches) {
    std::stable_sort(batch.begin(), batch.end(), [](const auto& a, const auto& b) {
      return shares_before(a.second, b.second);
    });
    const auto failures =
        run_fleet({std::get<0>(key), std::get<1>(key), options.deadline}, [&](Rank& rank) {
          Session session(rank);
          for (const auto& [n, c] : batch) {
            run_case(session, c, "case " + std::to_string(n) + ": ");
          }
        });
    done += static_cast<std::int64_t>(batch.size());
    if (!failures.empty()) {
      failed += static_cast<std::int64_t>(failures.size());
      std::printf("FAILED:\n%s", joined(failures).c_str());
    }
    if (seconds_since(said) > 10 || done == total) {
      said = std::chrono::steady_clock::now();
      std::printf("%lld of %lld cases (%.0f %%), %.0f s, %lld failures\n",
                  static_cast<long long>(done), static_cast<long long>(total),
                  100.0 * static_cast<double>(done) / static_cast<double>(total),
                  seconds_since(start), static_cast<long long>(failed));
    }
    std::fflush(stdout);
  }
  std::printf("%s: %lld cases, %.1f s\n", failed == 0 ? "PASSED" : "FAILED",
              static_cast<long long>(done), seconds_since(start));
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace ferry::conformance

int main(int argc, char** argv) {
  ferry::conformance::Options options;
  const char* mode = std::getenv("FERRY_CONFORMANCE");
  if (argc == 1 && (mode == nullptr || std::strcmp(mode, "full") != 0)) options.every = 400;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--every")
      options.every = std::atoll(argv[i + 1]);
    else if (name == "--only")
      options.only = argv[i + 1];
    else if (name == "--case")
      options.only_case = std::atoll(argv[i + 1]);
    else if (name == "--deadline")
      options.deadline = std::chrono::seconds(std::atoll(argv[i + 1]));
    else
      return std::fprintf(stderr, "unknown option %s\n", argv[i]), 2;
  }
  return ferry::conformance::run(options);
}

// The full product of the matrix, in one domain and in several.
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
#include <functional>
#include <map>
#include <tuple>

#include "case.hpp"
#include "domain_cases.hpp"
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
using BatchKey = std::tuple<Wires, int, std::int64_t, int>;

/// A case of the product, and what joins its ranks.
struct Numbered {
  std::int64_t number;
  Wires wires;
  Case c;
};

std::string line_of(const Numbered& each) {
  const std::string line = to_string(each.c);
  if (each.wires.domain_size == 0) return line;
  return to_string(DomainCell{each.c.ranks, each.wires}) + ": " + line;
}

/// Each case of the product over the other axes runs in so many cells of domains, dealt in turn.
constexpr std::int64_t kCellsOfACase = 5;

/// The cases that `wanted` numbers name: first those of one domain, then those of several.
std::vector<Numbered> chosen(const std::function<bool(std::int64_t)>& wanted, std::uint64_t seed,
                             std::int64_t& total) {
  std::vector<Numbered> all;
  std::int64_t number = 0;
  for (Mode mode : {Mode::throughput, Mode::latency}) {
    for (std::int64_t i = 0; i < product(mode); ++i, ++number) {
      if (!wanted(number)) continue;
      const Case c = numbered_case(mode, i, seed);
      all.push_back({number, c.fabric, c});
    }
  }
  for (Mode mode : {Mode::throughput, Mode::latency}) {
    // The first two axes, fabric and ranks, are the cell's.
    const std::int64_t fixed = axes(mode)[0].choices * axes(mode)[1].choices;
    for (std::int64_t i = 0; i < product(mode) / fixed * kCellsOfACase; ++i, ++number) {
      if (!wanted(number)) continue;
      const Case c =
          numbered_case(mode, i / kCellsOfACase * fixed, mix(seed, static_cast<std::uint64_t>(i)));
      const DomainCell cell = domain_cell(static_cast<std::size_t>(i));
      all.push_back({number, cell.wires, placed(c, cell)});
    }
  }
  total = number;
  return all;
}

int run(const Options& options) {
  const std::uint64_t seed = base_seed();
  std::map<BatchKey, Batch> batches;
  std::int64_t number = 0, total = 0;
  const auto wanted = [&](std::int64_t n) {
    return options.only_case >= 0 ? n == options.only_case : n % options.every == 0;
  };
  for (const Numbered& each : chosen(wanted, seed, number)) {
    const Case& c = each.c;
    if (c.fabric == FabricKind::shm && only_threads()) continue;
    if (line_of(each).find(options.only) == std::string::npos) continue;
    // Fleets of domains have few cases each; they share one whatever the size of their rows.
    const bool domains = each.wires.domain_size > 0;
    batches[{each.wires, c.ranks, domains ? 0 : c.hidden, domains ? 0 : c.topk}].emplace_back(
        each.number, c);
    ++total;
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

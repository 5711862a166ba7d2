// The pairwise cover of the matrix, and more cases at random.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "case.hpp"
#include "fleet.hpp"
#include "random.hpp"
#include "session.hpp"

namespace ferry::conformance {
namespace {

/// Returns the hash of all results.
std::uint64_t run_all(Mode mode, const std::vector<std::vector<int>>& choices, std::uint64_t seed) {
  std::uint64_t results = 0;
  std::map<std::pair<FabricKind, int>, std::vector<Case>> batches;
  std::uint64_t number = 0;
  for (const auto& choice : choices) {
    Case c = make_case(mode, choice);
    size_case(c, mix(seed, ++number));
    batches[{c.fabric, c.ranks}].push_back(c);
  }
  for (auto& [key, cases] : batches) {
    std::stable_sort(cases.begin(), cases.end(), shares_before);
    FabricKind fabric = key.first;
    if (fabric == FabricKind::shm && only_threads()) {
      if (can_fork()) continue;  // the thread sanitizer: local has the same code
      fabric = FabricKind::local;
    }
    const Fleet fleet{.wires = fabric, .ranks = key.second, .results = &results};
    const auto failures = run_fleet(fleet, [&](Rank& rank) {
      rank.hash_results();
      Session session(rank);
      for (const Case& c : cases) run_case(session, c);
    });
    EXPECT_TRUE(failures.empty()) << "FERRY_TEST_SEED=" << seed << "\n" << joined(failures);
  }
  return results;
}

std::string label_of(Mode mode) {
  return mode == Mode::throughput ? "Throughput" : "Latency";
}

class Matrix : public ::testing::TestWithParam<Mode> {};

TEST_P(Matrix, PairwiseCover) {
  const std::uint64_t seed = base_seed();
  const auto cover = pairwise_cover(GetParam(), seed);
  std::printf("FERRY_TEST_SEED=%llu, %zu cases\n", static_cast<unsigned long long>(seed),
              cover.size());
  const std::uint64_t results = run_all(GetParam(), cover, seed);
  if (std::getenv("FERRY_TEST_SEED") != nullptr || (only_threads() && can_fork())) return;
  const std::string name = "cover " + label_of(GetParam());
  EXPECT_EQ(results, golden::hash_of(name))
      << "{\"" << name << "\", 0x" << std::hex << results << "},";
}

TEST_P(Matrix, AtRandom) {
  const std::uint64_t seed = mix(base_seed(), 1);
  std::printf("FERRY_TEST_SEED=%llu\n", static_cast<unsigned long long>(base_seed()));
  run_all(GetParam(), random_choices(GetParam(), sanitized() ? 30 : 120, seed), seed);
}

TEST_P(Matrix, CoverHoldsEveryPair) {
  if (sanitized()) GTEST_SKIP() << "one thread computes: nothing for a sanitizer";
  const auto cover = pairwise_cover(GetParam(), base_seed());
  const auto& all = axes(GetParam());
  for (std::size_t a = 0; a < all.size(); ++a) {
    for (std::size_t b = a + 1; b < all.size(); ++b) {
      for (int i = 0; i < all[a].choices; ++i) {
        for (int j = 0; j < all[b].choices; ++j) {
          bool found = excluded(GetParam(), static_cast<int>(a), i, static_cast<int>(b), j);
          for (const auto& choice : cover) found = found || (choice[a] == i && choice[b] == j);
          ASSERT_TRUE(found) << all[a].name << "=" << i << " with " << all[b].name << "=" << j;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, Matrix, ::testing::Values(Mode::throughput, Mode::latency),
                         [](const auto& test) { return label_of(test.param); });

}  // namespace
}  // namespace ferry::conformance

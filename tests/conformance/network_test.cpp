// Ranks joined by libfabric over TCP, as processes (threads under the thread sanitizer): the same
// results as anywhere.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "domain_cases.hpp"
#include "engine/test_network.hpp"
#include "fleet_test.hpp"
#include "random.hpp"
#include "session.hpp"

namespace ferry::conformance {
namespace {

using engine::test::has_network;

class Network : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_network()) GTEST_SKIP() << "no libfabric in this build or on this machine";
  }
};

std::vector<DomainCell> cells() {
  std::vector<DomainCell> all{{2, FabricKind::ofi}, {3, FabricKind::ofi}, {4, FabricKind::ofi}};
  if (only_threads()) return all;
  for (const auto& [ranks, domain_size] : {std::pair{4, 2}, std::pair{3, 2}}) {
    all.push_back({ranks, {FabricKind::shm, domain_size, FabricKind::ofi, Crossing::direct}});
  }
  return all;
}

/// Every pair of choices of the other axes, dealt out to the cells; without FERRY_CONFORMANCE=full
/// every third case of them.
void run_cover(Mode mode) {
  const std::uint64_t seed = mix(base_seed(), 301);
  auto cover = pairwise_cover(mode, seed);
  const char* text = std::getenv("FERRY_CONFORMANCE");
  if (text == nullptr || std::string(text) != "full") cover.resize((cover.size() + 2) / 3);
  const std::vector<DomainCell> all = cells();
  std::vector<std::vector<Case>> dealt(all.size());
  for (std::size_t i = 0; i < cover.size(); ++i) {
    Case c = placed(make_case(mode, cover[i]), all[i % all.size()]);
    size_case(c, mix(seed, i));
    dealt[i % all.size()].push_back(c);
  }
  std::printf("FERRY_TEST_SEED=%llu, %zu cases\n", static_cast<unsigned long long>(base_seed()),
              cover.size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    std::stable_sort(dealt[i].begin(), dealt[i].end(), shares_before);
    const auto failures = run_fleet({all[i].wires, all[i].ranks}, [&](Rank& rank) {
      Session session(rank);
      for (const Case& c : dealt[i]) run_case(session, c, to_string(all[i]) + ": ");
    });
    EXPECT_TRUE(failures.empty()) << to_string(all[i]) << "\n" << joined(failures);
  }
}

TEST_F(Network, Throughput) {
  run_cover(Mode::throughput);
}

TEST_F(Network, Latency) {
  run_cover(Mode::latency);
}

}  // namespace
}  // namespace ferry::conformance

// Groups of more ranks than know all counts (core/pair_counts.hpp): what they exchange, and how
// much control memory they take.
#include <fstream>
#include <string>

#include "core/layout.hpp"
#include "core/pair_counts.hpp"
#include "engine/test_groups.hpp"
#include "host/throughput/engine.hpp"

namespace ferry::host::test {

using namespace engine::test;
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

/// Each expert, one a rank, gets as many tokens: 7 and the number of ranks have no common divisor.
Batch spread(const Group& group, int tokens, int hidden) {
  Batch batch(group.rank(), tokens, hidden, 0);
  for (int t = 0; t < tokens; ++t) {
    batch.routes[static_cast<std::size_t>(t)] = (group.rank() * 7 + t * 101) % group.size();
  }
  return batch;
}

TEST(ManyRanks, ExchangeOverDomains) {
  constexpr int kRanks = kMatrixRanks + 4, kHidden = 4, kTokens = 3;
  GroupConfig config;
  config.memory_bytes = 64 << 10;
  config.deadline = 100s;
  config.experts = kRanks;
  config.domain_size = 52;
  with_groups(kRanks, config, [&](Group& group) {
    const Batch batch = spread(group, kTokens, kHidden);
    const Plan plan = group.plan(batch.ids());
    EXPECT_EQ(plan.recv_rows(), kTokens) << group.rank();
    for (const Crossing crossing : {Crossing::direct, Crossing::hierarchical}) {
      const Received got = group.dispatch(batch.x(), plan, {.crossing = crossing});
      const Combined back = group.combine(got.x, plan, {.crossing = crossing});
      EXPECT_TRUE(same_rows(back.x, batch)) << group.rank() << name_of(crossing);
    }
    expect_error(ErrorKind::unsupported, {"260 ranks", "at most 256"},
                 [&] { (void)plan.rank_rows(); });
  });
}

/// Of the whole process, at its most.
std::size_t resident_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    std::size_t kib = 0;
    if (word == "VmHWM:" && status >> kib) return kib * 1024;
  }
  return 0;
}

// Ranks that are threads of one process. A sanitizer keeps memory of its own for each, and takes a
// minute for what the exchange above shows, too.
TEST(ManyRanks, AProcessHolds512) {
  if (kSanitized) GTEST_SKIP();
  constexpr int kRanks = 512, kHidden = 64, kTokens = 8;
  GroupConfig config;
  config.memory_bytes = 16 << 20;  // of which this exchange uses little
  config.deadline = 100s;
  config.experts = kRanks;
  config.domain_size = 8;
  with_groups(kRanks, config, [&](Group& group) {
    const Batch batch = spread(group, kTokens, kHidden);
    const Received got = group.dispatch(batch.x(), batch.ids());
    EXPECT_EQ(got.x.rows(), kTokens) << group.rank();
    EXPECT_TRUE(same_rows(group.combine(got.x, got.plan).x, batch)) << group.rank();
    group.barrier();
  });
  EXPECT_GT(resident_bytes(), 100'000'000u);  // it is the right number
  EXPECT_LE(resident_bytes(), 1'000'000'000u);
}

TEST(ManyRanks, ControlMemoryGrowsWithRanksAlone) {
  GroupConfig config;
  for (const int domain : {8, 72}) {
    config.domain_size = domain;
    config.experts = 2048;
    EXPECT_LE(host_memory_hint(config, 2048).control_bytes, 4'000'000u) << domain;
  }
  config.experts = 256;
  config.domain_size = 8;
  EXPECT_LE(host_memory_hint(config, 512).control_bytes, 1'000'000u);
}

}  // namespace
}  // namespace ferry::host::test

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

/// Of the whole process, at its most since `forget_resident_bytes`.
std::size_t resident_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    std::size_t kib = 0;
    if (word == "VmHWM:" && status >> kib) return kib * 1024;
  }
  return 0;
}

void forget_resident_bytes() {
  std::ofstream("/proc/self/clear_refs") << 5;
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
  forget_resident_bytes();
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

// Both buffers are used: rows of all sources have places of their own in each.
TEST(ManyRanks, AProcessHolds512InLatencyMode) {
  if (kSanitized) GTEST_SKIP();
  constexpr int kRanks = 512, kHidden = 32, kTokens = 8, kTopk = 8;
  GroupConfig config;
  config.memory_bytes = 1 << 20;
  config.deadline = 100s;
  config.experts = kRanks;
  for (const int domain : {kRanks, 8}) {
    config.domain_size = domain;
    forget_resident_bytes();
    with_groups(kRanks, config, [&](Group& group) {
      const Batch batch(group.rank(), kTokens, kHidden, 0);
      std::vector<std::int64_t> routes;
      for (int i = 0; i < kTokens * kTopk; ++i) {
        routes.push_back((group.rank() * 7 + i * 101) % kRanks);
      }
      const std::vector<float> ones(routes.size(), 1.0f);
      const Extents shape{kTokens, kTopk};
      LatencyDispatchOptions options;
      options.topk_weights = ConstTensorView(ones.data(), Dtype::f32, shape);
      LatencyExchange exchange(
          group, {.capacity = kTokens, .hidden = kHidden, .topk = kTopk, .dtype = Dtype::f32});
      for (int round = 0; round < 2; ++round) {
        const LatencyReceived got =
            exchange.dispatch(batch.x(), {routes.data(), Dtype::i64, shape}, options);
        EXPECT_TRUE(same_rows(exchange.combine(got.x, got).x, batch, kTopk)) << group.rank();
      }
      group.barrier();
    });
    EXPECT_GT(resident_bytes(), 100'000'000u) << domain;
    EXPECT_LE(resident_bytes(), 1'000'000'000u) << domain;
    RecordProperty(domain == 8 ? "domains" : "one_domain", std::to_string(resident_bytes()));
  }
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

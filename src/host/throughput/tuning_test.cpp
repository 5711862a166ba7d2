// Tuned calls of the host engine: all ranks choose alike, and what comes is what comes without.
#include <cstring>
#include <mutex>
#include <set>

#include "engine/test_groups.hpp"

namespace ferry::host::test {

using namespace engine::test;
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kTuningHidden = 128;  // rows are filled and compared slowly there
#else
constexpr int kTuningHidden = 1024;
#endif
constexpr int kTuningRanks = 6, kTuningTopk = 4;
constexpr std::int64_t kTuningTokens = 96;

GroupConfig domains_of(int size, std::optional<bool> tune, FabricKind network) {
  GroupConfig config;
  config.experts = 2 * kTuningRanks;
  config.deadline = 60s;
  config.domain_size = size;
  config.network = network;
  config.tune = tune;
  return config;
}

struct TuningBatch {
  std::vector<float> rows;
  std::vector<std::int64_t> routes;

  TuningBatch(int rank, std::uint32_t seed, std::int64_t tokens) {
    std::uint32_t state = kSeed + seed * 131 + static_cast<std::uint32_t>(rank) * 7919;
    const auto random = [&] { return state = state * 1664525 + 1013904223; };
    rows.resize(static_cast<std::size_t>(tokens) * kTuningHidden);
    for (float& value : rows) value = static_cast<float>(random() >> 8) / (1 << 20) - 8;
    routes.resize(static_cast<std::size_t>(tokens) * kTuningTopk);
    for (std::int64_t& id : routes) id = (random() >> 10) % (2 * kTuningRanks);
  }
  ConstTensorView x() const {
    const auto tokens = static_cast<std::int64_t>(rows.size()) / kTuningHidden;
    return {rows.data(), Dtype::f32, {tokens, kTuningHidden}};
  }
  ConstTensorView ids() const {
    const auto tokens = static_cast<std::int64_t>(rows.size()) / kTuningHidden;
    return {routes.data(), Dtype::i64, {tokens, kTuningTopk}};
  }
};

/// Of a call's results, all bytes.
void add_bytes(std::vector<std::byte>& all, const Tensor& tensor) {
  const auto* data = static_cast<const std::byte*>(tensor.data());
  all.insert(all.end(), data, data + tensor.view().bytes());
}

struct TunedRun {
  std::vector<std::vector<std::byte>> results{};  // of each rank
  std::vector<std::vector<TunedCall>> tuned{};
};

/// Steps of a training run: a plan, its dispatch, one more, a combine.
TunedRun train(const GroupConfig& config, int steps) {
  TunedRun run;
  run.results.resize(kTuningRanks);
  run.tuned.resize(kTuningRanks);
  with_groups(kTuningRanks, config, [&](Group& group) {
    auto& results = run.results[static_cast<std::size_t>(group.rank())];
    for (int step = 0; step < steps; ++step) {
      const std::int64_t tokens = kTuningTokens - group.rank() * 16;
      const TuningBatch batch(group.rank(), static_cast<std::uint32_t>(step), tokens);
      const Received first = group.dispatch(batch.x(), batch.ids());
      const Received again = group.dispatch(batch.x(), first.plan);
      const Combined back = group.combine(again.x, first.plan);
      if (step % 4 != 0) continue;
      add_bytes(results, first.x);
      add_bytes(results, first.topk_idx);
      add_bytes(results, again.x);
      add_bytes(results, back.x);
    }
    run.tuned[static_cast<std::size_t>(group.rank())] = group.tuning();
  });
  return run;
}

void expect_the_same_bits(int domain_size, FabricKind network) {
  constexpr int kSteps = 20;
  const TunedRun plain = train(domains_of(domain_size, false, network), kSteps);
  const TunedRun tuned = train(domains_of(domain_size, true, network), kSteps);
  EXPECT_EQ(plain.results, tuned.results);
  EXPECT_TRUE(plain.tuned.front().empty());
  ASSERT_EQ(tuned.tuned.front().size(), 3u);  // first dispatch, later ones, combine
  for (const auto& of_rank : tuned.tuned) {
    ASSERT_EQ(of_rank.size(), tuned.tuned.front().size());
    for (std::size_t i = 0; i < of_rank.size(); ++i) {
      const TunedCall &one = of_rank[i], &zero = tuned.tuned.front()[i];
      EXPECT_EQ(one.call, zero.call);
      EXPECT_EQ(one.crossing, zero.crossing);
      EXPECT_EQ(one.chunk_bytes, zero.chunk_bytes);
      EXPECT_EQ(one.probes, zero.probes);
      EXPECT_EQ(one.seconds, zero.seconds);
      EXPECT_EQ(one.tokens, 64);  // of the rank that has most: 96
      EXPECT_GT(one.probes, 5);   // more than the start
      EXPECT_FALSE(one.why.empty());
    }
  }
}

TEST(HostTuning, SameBitsOverCopies) {
  expect_the_same_bits(3, FabricKind::automatic);
}
TEST(HostTuning, SameBitsInUnevenDomains) {
  expect_the_same_bits(4, FabricKind::automatic);
}
TEST(HostTuning, SameBitsOverANetwork) {
  expect_the_same_bits(2, FabricKind::sim);
}

TEST(HostTuning, NothingToChooseInOneDomain) {
  const TunedRun run = train(domains_of(0, true, FabricKind::automatic), 2);
  EXPECT_TRUE(run.tuned.front().empty());
}

// Combines keep to what the plan says although its dispatches try the other crossing.
TEST(HostTuning, DispatchesTryTheOtherCrossing) {
  std::mutex mutex;
  std::set<std::uint64_t> crossed;  // bytes between domains
  with_groups(kTuningRanks, domains_of(3, true, FabricKind::automatic), [&](Group& group) {
    const TuningBatch batch(group.rank(), 1, kTuningTokens);
    const Received first = group.dispatch(batch.x(), batch.ids());
    for (int call = 0; call < 30; ++call) {
      const std::uint64_t before = group.network().put_bytes;
      const Received got = group.dispatch(batch.x(), first.plan);
      const std::uint64_t bytes = group.network().put_bytes - before;
      std::scoped_lock lock(mutex);
      if (group.rank() == 0) crossed.insert(bytes);
    }
  });
  EXPECT_GT(crossed.size(), 1u);
}

TEST(HostTuning, RanksMustStartAlike) {
  const auto bootstraps = thread_bootstrap(2);
  on_ranks(2, [&](int rank) {
    GroupConfig config = domains_of(1, rank == 0, FabricKind::automatic);
    expect_error(ErrorKind::mismatch, {"tuning is", "off"},
                 [&] { Group group(bootstraps[static_cast<std::size_t>(rank)], config); });
  });
}

}  // namespace
}  // namespace ferry::host::test

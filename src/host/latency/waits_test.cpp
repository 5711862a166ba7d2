// Latency mode: how long a call says that it waited for each source.
#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "host/latency/exchange.hpp"
#include "host/latency/test_masked_load.hpp"

namespace ferry::host::test {
namespace {

void slow_rank(bool masks) {
  constexpr int kSlow = 2;
  constexpr auto kPause = 30ms;
  constexpr int kRounds = 5;
  with_groups(kRanks, with_deadline(30s), [&](Group& group) {
    LatencyConfig config = masked_config();
    config.masks = masks;
    LatencyExchange latency(group, config);
    Load load(group, latency);
    std::vector<std::int64_t> waits(kRanks, 0), sums(kRanks, 0);
    LatencyDispatchOptions dispatch;
    dispatch.wait_ns = TensorView(waits.data(), Dtype::i64, {kRanks});
    LatencyCombineOptions combine;
    combine.path = CombinePath::per_rank;
    combine.wait_ns = TensorView(sums.data(), Dtype::i64, {kRanks});
    for (int round = 0; round < kRounds; ++round) {
      if (group.rank() == kSlow) std::this_thread::sleep_for(kPause);
      const LatencyReceived received = latency.dispatch(load.x(round), load.ids(), dispatch);
      latency.combine(received.x, received, load.weights(), combine);
    }
    // Whoever else was on time, this rank waited for the slow one longest.
    if (group.rank() != kSlow) {
      EXPECT_EQ(std::max_element(waits.begin(), waits.end()) - waits.begin(), kSlow);
      EXPECT_GT(waits[kSlow], kPause.count() * kRounds * 1'000'000 / 2);
    }
    EXPECT_GE(*std::min_element(sums.begin(), sums.end()), 0);
    EXPECT_GT(*std::max_element(sums.begin(), sums.end()), 0);
    waits.resize(1);
    dispatch.wait_ns = TensorView(waits.data(), Dtype::i64, {1});
    expect_error(ErrorKind::invalid_argument, {"wait_ns", "[4]"},
                 [&] { latency.dispatch(load.x(0), load.ids(), dispatch); });
  });
}

TEST(HostWaits, SayForWhomTheReceiveWaited) {
  slow_rank(false);
  slow_rank(true);
}

/// Rank 2 comes late to combine: the others waited for it, not for one another. Without `ahead` the
/// weights come with the combine, and the sending waits for those of rank 2.
void late_to_combine(bool masks, bool ahead, bool hook) {
  constexpr int kLate = 2;
  constexpr auto kPause = 200ms;
  std::barrier all(kRanks);
  with_groups(kRanks, with_deadline(30s), [&](Group& group) {
    LatencyConfig config = masked_config();
    config.masks = masks;
    LatencyExchange latency(group, config);
    Load load(group, latency);
    std::vector<std::int64_t> waits(kRanks, 0);
    LatencyDispatchOptions dispatch;
    if (ahead) dispatch.topk_weights = load.weights();
    const LatencyReceived received = latency.dispatch(load.x(1), load.ids(), dispatch);
    LatencyCombineOptions options;
    options.path = CombinePath::per_rank;
    options.wait_ns = TensorView(waits.data(), Dtype::i64, {kRanks});
    options.hook = hook;
    all.arrive_and_wait();
    const auto begin = std::chrono::steady_clock::now();
    if (group.rank() == kLate) std::this_thread::sleep_for(kPause);
    LatencyCombined combined = ahead
                                   ? latency.combine(received.x, received, options)
                                   : latency.combine(received.x, received, load.weights(), options);
    if (hook) combined.receive();
    const std::chrono::nanoseconds took = std::chrono::steady_clock::now() - begin;
    load.expect_sums(combined.x, 1, {});
    // No nanosecond is counted twice.
    for (const std::int64_t wait : waits) EXPECT_LE(wait, took.count());
    if (group.rank() == kLate) return;
    EXPECT_GT(waits[kLate], std::chrono::nanoseconds(kPause).count() / 2);
    EXPECT_LT(2 * waits[static_cast<std::size_t>(group.rank())], waits[kLate]);
  });
}

TEST(HostWaits, OfACombineAreOfEachSourceItsOwn) {
  for (const bool masks : {false, true}) late_to_combine(masks, true, false);
}

TEST(HostWaits, OfACombineAreAlsoForWeights) {
  for (const bool masks : {false, true}) {
    for (const bool hook : {false, true}) late_to_combine(masks, false, hook);
  }
}

TEST(HostWaits, LeaveOutWhatIsDoneMeanwhile) {
  std::int64_t wait = 0;
  SourceClock clock(TensorView(&wait, Dtype::i64, {1}));
  clock.apart_from([] { std::this_thread::sleep_for(200ms); });
  clock.charge(0);
  EXPECT_LT(wait, std::chrono::nanoseconds(200ms).count());
  std::this_thread::sleep_for(1ms);
  clock.charge(0);
  EXPECT_GT(wait, std::chrono::nanoseconds(1ms).count());
}

TEST(HostWaits, EndWhenTheSourceIsMasked) {
  constexpr int kAbsent = 3;
  constexpr std::chrono::nanoseconds kShort = 400ms;
  std::barrier all(kRanks);
  with_groups(kRanks, with_deadline(kShort), [&](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    load.round(1, {});
    std::vector<std::int64_t> waits(kRanks, 0);
    LatencyDispatchOptions options;
    options.wait_ns = TensorView(waits.data(), Dtype::i64, {kRanks});
    if (group.rank() != kAbsent) {
      const LatencyReceived received = latency.dispatch(load.x(2), load.ids(), options);
      load.expect_received(received, 2, {kAbsent});
      EXPECT_GT(waits[kAbsent], kShort.count() / 2);
      EXPECT_EQ(std::max_element(waits.begin(), waits.end()) - waits.begin(), kAbsent);
    }
    all.arrive_and_wait();
  });
}

}  // namespace
}  // namespace ferry::host::test

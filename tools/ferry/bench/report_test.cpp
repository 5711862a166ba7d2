#include "bench/report.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace ferry::cli {
namespace {

TEST(Percentile, IsLinearInBetween) {
  const std::vector<double> values = {1, 2, 3, 4, 5};
  EXPECT_DOUBLE_EQ(percentile(values, 0.0), 1);
  EXPECT_DOUBLE_EQ(percentile(values, 0.5), 3);
  EXPECT_DOUBLE_EQ(percentile(values, 0.95), 4.8);
  EXPECT_DOUBLE_EQ(percentile(values, 1.0), 5);
  EXPECT_DOUBLE_EQ(percentile({7}, 0.5), 7);
}

TEST(Results, TakeTheSlowestRankOfEverySample) {
  BenchSettings settings;
  settings.ranks = 2;
  settings.iterations = 3;
  settings.mode = BenchMode::throughput;
  settings.hidden = 8;
  settings.dtype = Dtype::f32;
  const BenchBoard board(settings);
  const double samples[2][3] = {{1000, 9000, 2000}, {4000, 3000, 2000}};
  for (int r = 0; r < 2; ++r) {
    for (int i = 0; i < 3; ++i) board.sample(BenchCase::dispatch_cached, r, i) = samples[r][i];
    board.rows(false, r) = {100, 40, 0, 0};
  }
  const std::vector<BenchResult> results = results_of(settings, board);
  ASSERT_EQ(results.size(), 5u);
  const BenchResult& cached = results[2];
  EXPECT_EQ(cached.which, BenchCase::dispatch_cached);
  EXPECT_DOUBLE_EQ(cached.min_us, 2);
  EXPECT_DOUBLE_EQ(cached.p50_us, 4);
  EXPECT_DOUBLE_EQ(cached.mean_us, 5);
  EXPECT_EQ(cached.rows, 200);
  EXPECT_EQ(cached.row_bytes, 32u);
  EXPECT_EQ(cached.logical_bytes, 200u * 32);
  EXPECT_EQ(cached.wire_bytes, 120u * 32);
  EXPECT_DOUBLE_EQ(cached.logical_gbps(), 200 * 32 / 4e-6 / 1e9);
  EXPECT_EQ(results[0].row_bytes, 0u);
}

}  // namespace
}  // namespace ferry::cli

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>

#include "bench_gpu.hpp"

namespace ferry::cli {
namespace {

GpuBenchSettings small() {
  GpuBenchSettings s;
  s.shape.ranks = 2;
  s.shape.iterations = 3;
  s.shape.hidden = 256;
  s.tokens = {64, 128};
  s.sms = {4, 16};
  return s;
}

TEST(GpuLines, MeasureEverythingOnceForEachConfiguration) {
  const GpuBenchSettings s = small();
  const auto lines = lines_of(s);
  // Each number of tokens: a plan; five kinds of dispatch less plan on two dtypes and two numbers
  // of SMs; a quantising one beside e4m3; combine in bf16 alone.
  EXPECT_EQ(lines.size(), 2u * (1 + 2 * 2 * 4 + 2 + 2 * 3));
  std::set<std::string> seen;
  for (const GpuLine& line : lines) {
    EXPECT_FALSE(is_combine(line.which) && line.dtype == Dtype::e4m3);
    EXPECT_TRUE(seen.insert(std::string(name_of(line.which)) + std::to_string(line.tokens) +
                            std::to_string(line.sms) + std::string(ferry::name_of(line.dtype)))
                    .second);
  }
  // Configurations follow each other without a break: ranks prepare each once.
  EXPECT_TRUE(std::is_sorted(lines.begin(), lines.end(), [](const auto& a, const auto& b) {
    return a.tokens_index < b.tokens_index;
  }));
}

TEST(GpuLines, CombineIsMeasuredBesideE4m3Alone) {
  GpuBenchSettings s = small();
  s.dtypes = {Dtype::e4m3};
  const auto lines = lines_of(s);
  EXPECT_EQ(std::count_if(lines.begin(), lines.end(),
                          [](const auto& line) { return is_combine(line.which); }),
            2 * 2 * 3);
}

TEST(GpuResults, AreAGpuAndOfTheSlowestRank) {
  const GpuBenchSettings s = small();
  const GpuBoard board(s);
  std::size_t cached = 0;
  while (board.lines[cached].which != GpuCase::dispatch_cached) ++cached;
  const double samples[2][3] = {{10, 90, 20}, {40, 30, 20}};
  for (int r = 0; r < 2; ++r) {
    for (int i = 0; i < 3; ++i) {
      board.sample(cached, false, r, i) = samples[r][i];
      board.sample(cached, true, r, i) = 2 * samples[r][i];
    }
    board.rows(0, r) = {100, 40, 0, 0};
  }
  const GpuResult result = results_of(s, board)[cached];
  EXPECT_DOUBLE_EQ(result.chained.min, 20);
  EXPECT_DOUBLE_EQ(result.chained.p50, 40);
  EXPECT_DOUBLE_EQ(result.alone.p50, 80);
  EXPECT_EQ(result.rows, 200);
  EXPECT_EQ(result.row_bytes, 512u);
  EXPECT_EQ(result.logical_bytes, 200u * 512);
  EXPECT_EQ(result.wire_bytes, 120u * 512);
  EXPECT_DOUBLE_EQ(result.logical_gbps(), 100 * 512 / 40e-6 / 1e9);
  EXPECT_EQ(to_json(s, {result}, {"ferry"})["results"][0]["name"], "dispatch, cached");
}

}  // namespace
}  // namespace ferry::cli

#include "bench/report.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
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
  const double samples[2][3] = {{1, 9, 2}, {4, 3, 2}};
  for (int r = 0; r < 2; ++r) {
    for (int i = 0; i < 3; ++i) board.sample(2, r, i) = samples[r][i];
    board.rows(0, r) = {100, 40, 0, 0};
  }
  const std::vector<BenchResult> results = results_of(settings, board);
  ASSERT_EQ(results.size(), 5u);
  const BenchResult& cached = results[2];
  EXPECT_EQ(cached.line.which, BenchCase::dispatch_cached);
  EXPECT_DOUBLE_EQ(cached.times.min, 2);
  EXPECT_DOUBLE_EQ(cached.times.p50, 4);
  EXPECT_DOUBLE_EQ(cached.times.mean, 5);
  EXPECT_EQ(cached.rows, 200);
  EXPECT_EQ(cached.row_bytes, 32u);
  EXPECT_EQ(cached.logical_bytes, 200u * 32);
  EXPECT_EQ(cached.wire_bytes, 120u * 32);
  EXPECT_DOUBLE_EQ(cached.logical_gbps(), 200 * 32 / 4e-6 / 1e9);
  EXPECT_EQ(results[0].row_bytes, 0u);
}

TEST(Results, OfALatencyCombineOnGpusAreThePairLessTheDispatch) {
  BenchSettings settings;
  settings.ranks = settings.iterations = 1;
  settings.backend = Backend::cuda;
  settings.mode = BenchMode::latency;
  const BenchBoard board(settings);
  board.sample(board.line_of(BenchCase::latency_dispatch), 0, 0) = 8;
  board.sample(board.line_of(BenchCase::latency_pair_ranks), 0, 0) = 15;
  const auto results = results_of(settings, board);
  EXPECT_EQ(results.size(), 10u);
  EXPECT_DOUBLE_EQ(results[board.line_of(BenchCase::latency_combine_ranks)].times.p50, 7);
  EXPECT_DOUBLE_EQ(results[board.line_of(BenchCase::latency_combine_slots)].times.p50, 0);
}

BenchSettings sweep() {
  BenchSettings s;
  s.backend = Backend::cuda;
  s.mode = BenchMode::throughput;
  s.ranks = 2;
  s.iterations = 3;
  s.hidden = 256;
  s.token_sweep = {64, 128};
  s.dtypes = {Dtype::bf16, Dtype::e4m3};
  s.num_sms = {4, 16};
  return s;
}

TEST(GpuLines, MeasureEverythingOnceForEachConfiguration) {
  const BenchSettings s = sweep();
  const auto lines = lines_of(s);
  // Each number of tokens: a plan; five kinds of dispatch less plan on two dtypes and two numbers
  // of SMs; a quantising one beside e4m3; combine in bf16 alone.
  EXPECT_EQ(lines.size(), 2u * (1 + 2 * 2 * 4 + 2 + 2 * 3));
  std::set<std::string> seen;
  for (const BenchLine& line : lines) {
    EXPECT_FALSE(is_combine(line.which) && line.dtype == Dtype::e4m3);
    EXPECT_TRUE(seen.insert(std::string(traits(line.which).name) + std::to_string(line.tokens) +
                            std::to_string(line.num_sms) + std::string(ferry::name_of(line.dtype)))
                    .second);
  }
  // Configurations follow each other without a break: ranks prepare each once.
  EXPECT_TRUE(std::is_sorted(lines.begin(), lines.end(), [](const auto& a, const auto& b) {
    return a.tokens_index < b.tokens_index;
  }));
}

TEST(GpuLines, CombineIsMeasuredBesideE4m3Alone) {
  BenchSettings s = sweep();
  s.dtypes = {Dtype::e4m3};
  const auto lines = lines_of(s);
  EXPECT_EQ(std::count_if(lines.begin(), lines.end(),
                          [](const auto& line) { return is_combine(line.which); }),
            2 * 2 * 3);
}

TEST(GpuLines, TakeAnyNumbersOfSms) {
  BenchSettings s = sweep();
  s.num_sms = {1, 3, 7};
  std::set<int> seen;
  for (const BenchLine& line : lines_of(s)) {
    if (has_sms(line.which)) seen.insert(line.num_sms);
  }
  EXPECT_EQ(seen, (std::set<int>{1, 3, 7}));
}

TEST(GpuLines, NcclIsThereOnceForEachConfigurationIfThereIsALibrary) {
  BenchSettings s = sweep();
  const auto is_nccl = [](const BenchLine& line) {
    return line.which == BenchCase::nccl_all_to_all;
  };
  auto lines = lines_of(s);
  EXPECT_EQ(std::count_if(lines.begin(), lines.end(), is_nccl), 0);
  s.nccl = {"libnccl.so.2", "2.28.9", ""};
  lines = lines_of(s);
  EXPECT_EQ(std::count_if(lines.begin(), lines.end(), is_nccl), 2 * 2);
  // Last of its configuration, and on no number of SMs.
  for (std::size_t i = 0; i < lines.size(); ++i) {
    if (!is_nccl(lines[i])) continue;
    EXPECT_EQ(lines[i].num_sms, 0);
    EXPECT_TRUE(i + 1 == lines.size() || lines[i + 1].dtype != lines[i].dtype ||
                lines[i + 1].tokens != lines[i].tokens);
  }
}

TEST(GpuResults, OfNcclAreTheBytesOfADispatch) {
  BenchSettings s = sweep();
  s.dtypes = {Dtype::e4m3};
  s.nccl = {"libnccl.so.2", "2.28.9", ""};
  const BenchBoard board(s);
  for (int r = 0; r < 2; ++r) board.rows(0, r) = {100, 40, 0, 0};
  const auto results = results_of(s, board);
  const auto named = [&](BenchCase which) {
    return *std::find_if(results.begin(), results.end(),
                         [&](const BenchResult& result) { return result.line.which == which; });
  };
  const BenchResult nccl = named(BenchCase::nccl_all_to_all);
  EXPECT_EQ(nccl.row_bytes, 256u + 2 * 4);
  EXPECT_EQ(nccl.logical_bytes, named(BenchCase::dispatch_cached).logical_bytes);
  EXPECT_EQ(nccl.wire_bytes, 120u * (256 + 2 * 4));
  const auto json = to_json(s, {nccl}, {"ferry"});
  EXPECT_EQ(json["results"][0]["name"], "NCCL all-to-all alone");
  EXPECT_EQ(json["results"][0]["dtype"], "e4m3");
  EXPECT_EQ(json["settings"]["nccl"], "2.28.9");
}

TEST(GpuTable, SaysWhyNcclIsNotThere) {
  BenchSettings s = sweep();
  s.nccl.reason = "libnccl.so.2: no such file";
  EXPECT_NE(table(s, {}).find("NCCL is not in the table: libnccl.so.2: no such file"),
            std::string::npos);
  s.nccl = {"libnccl.so.2", "2.28.9", ""};
  EXPECT_NE(table(s, {}).find("NCCL 2.28.9: grouped sends"), std::string::npos);
}

TEST(GpuResults, AreAGpuAndOfTheSlowestRank) {
  const BenchSettings s = sweep();
  const BenchBoard board(s);
  std::size_t cached = 0;
  while (board.lines[cached].which != BenchCase::dispatch_cached) ++cached;
  const double samples[2][3] = {{10, 90, 20}, {40, 30, 20}};
  for (int r = 0; r < 2; ++r) {
    for (int i = 0; i < 3; ++i) {
      board.sample(cached, r, i) = samples[r][i];
      board.sample(cached, r, i, true) = 2 * samples[r][i];
    }
    board.rows(0, r) = {100, 40, 0, 0};
  }
  const BenchResult result = results_of(s, board)[cached];
  EXPECT_DOUBLE_EQ(result.times.min, 20);
  EXPECT_DOUBLE_EQ(result.times.p50, 40);
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

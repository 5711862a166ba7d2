#include "bench/memory.hpp"

#include <gtest/gtest.h>

#include <regex>

namespace ferry::cli {
namespace {

constexpr double kGib = 1 << 30;

BenchSettings run_of(BenchMode mode, int ranks, std::int64_t tokens) {
  BenchSettings run;
  run.mode = mode;
  run.ranks = ranks;
  run.tokens = run.latency_tokens = tokens;
  run.processes = false;
  return run;
}

// What 64 ranks of one process were seen to take at most, 2026-11-28.
TEST(BenchMemory, IsAboutWhatIsTaken) {
  EXPECT_NEAR(bench_memory(run_of(BenchMode::latency, 64, 16)), 1.29e9, 0.2e9);
  EXPECT_NEAR(bench_memory(run_of(BenchMode::throughput, 64, 64)), 0.98e9, 0.2e9);
}

TEST(BenchMemory, SharedMemoryCountsInWhole) {
  for (const BenchMode mode : {BenchMode::latency, BenchMode::throughput}) {
    BenchSettings run = run_of(mode, 64, 64);
    const double touched = bench_memory(run);
    run.processes = true;
    EXPECT_GT(bench_memory(run), 1.5 * touched);
  }
}

TEST(BenchMemory, RefusesWithWhatIsThereAndEachOptionThatSuffices) {
  SystemFacts::Memory here{.total_bytes = 32ull << 30, .available_bytes = 24ull << 30};
  const std::vector<BenchSettings> small = {run_of(BenchMode::throughput, 4, 1024),
                                            run_of(BenchMode::latency, 4, 128)};
  EXPECT_EQ(too_large(small, here), "");
  EXPECT_EQ(too_large({}, here), "");
  const std::vector<BenchSettings> large = {run_of(BenchMode::throughput, 512, 1024),
                                            run_of(BenchMode::latency, 4, 128)};
  const std::string text = too_large(large, here);
  EXPECT_NE(text.find("throughput mode on 512 ranks takes about 1"), std::string::npos) << text;
  EXPECT_NE(text.find("here are 24.0 GiB. Less: "), std::string::npos) << text;
  std::smatch found;
  ASSERT_TRUE(std::regex_search(text, found,
                                std::regex(R"(--tokens (\d+).*--hidden (\d+).*--ranks (\d+))")))
      << text;
  BenchSettings one = large[0];
  one.tokens = std::stoll(found[1]);
  EXPECT_LE(bench_memory(one), 24 * kGib);
  one = large[0];
  one.hidden = std::stoll(found[2]);
  EXPECT_LE(bench_memory(one), 24 * kGib);
  one = large[0];
  one.ranks = std::stoi(found[3]);
  EXPECT_LE(bench_memory(one), 24 * kGib);
}

TEST(BenchMemory, TheControlGroupLimitsIt) {
  SystemFacts::Memory here{.total_bytes = 32ull << 30, .available_bytes = 24ull << 30};
  const std::vector<BenchSettings> runs = {run_of(BenchMode::throughput, 64, 256)};
  EXPECT_EQ(too_large(runs, here), "");
  here.limit_bytes = 1ull << 30;
  EXPECT_NE(too_large(runs, here).find("of which the control group may have 1.0 GiB"),
            std::string::npos);
}

}  // namespace
}  // namespace ferry::cli

#include "self_test.hpp"

#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include "ferry/group.hpp"
#include "ranks.hpp"

namespace ferry::cli {
namespace {

constexpr int kRanks = 2;
constexpr std::int64_t kTokens = 3;
constexpr std::int64_t kHidden = 64;
constexpr auto kDeadline = std::chrono::seconds(10);

float value_of(int rank, std::int64_t token, std::int64_t column) {
  return static_cast<float>(1000 * rank + 100 * token + column);
}

void expect(bool same, const char* where, std::int64_t row, float got, float expected) {
  if (same) return;
  throw std::runtime_error(
      fmt::format("{}: row {}: got {}, expected {}", where, row, got, expected));
}

// Every token goes to both ranks, so rank r receives the rows of rank 0, then those of rank 1, and
// with experts that change nothing every token comes back doubled.
void exchange(const std::shared_ptr<Bootstrap>& bootstrap, FabricKind fabric) {
  GroupConfig config;
  config.experts = kRanks;
  config.deadline = kDeadline;
  config.memory_bytes = std::size_t{1} << 20;
  config.fabric = fabric;
  Group group(bootstrap, config);

  std::vector<std::int64_t> routes;
  std::vector<float> tokens;
  for (std::int64_t t = 0; t < kTokens; ++t) {
    routes.insert(routes.end(), {t % 2, (t + 1) % 2});
    for (std::int64_t c = 0; c < kHidden; ++c) tokens.push_back(value_of(group.rank(), t, c));
  }
  const Plan plan = group.plan({routes.data(), Dtype::i64, {kTokens, kRanks}});
  const Received received = group.dispatch({tokens.data(), Dtype::f32, {kTokens, kHidden}}, plan);
  if (received.x.rows() != kRanks * kTokens) {
    throw std::runtime_error(
        fmt::format("dispatch: got {} rows, expected {}", received.x.rows(), kRanks * kTokens));
  }
  for (std::int64_t i = 0; i < kRanks * kTokens * kHidden; ++i) {
    const std::int64_t row = i / kHidden;
    const float expected = value_of(static_cast<int>(row / kTokens), row % kTokens, i % kHidden);
    const float got = received.x.as<float>()[i];
    expect(got == expected, "dispatch", row, got, expected);
  }
  const Combined combined = group.combine(received.x, plan);
  for (std::int64_t i = 0; i < kTokens * kHidden; ++i) {
    const float expected = 2 * value_of(group.rank(), i / kHidden, i % kHidden);
    const float got = combined.x.as<float>()[i];
    expect(got == expected, "combine", i / kHidden, got, expected);
  }
  group.barrier();  // nobody leaves while the other still reads
}

SelfTest run_one(bool processes) {
  SelfTest test;
  test.name = fmt::format("{} ranks as {}", kRanks, processes ? "processes" : "threads");
  test.fabric = processes ? "shm" : "local";
  const auto begin = std::chrono::steady_clock::now();
  RankRun run;
  run.ranks = kRanks;
  run.processes = processes;
  run.limit = 2 * kDeadline;
  try {
    const auto failures = run_ranks(run, [&](int, const std::shared_ptr<Bootstrap>& bootstrap) {
      exchange(bootstrap, processes ? FabricKind::shm : FabricKind::local);
    });
    test.failure = summary(failures);
  } catch (const std::exception& error) {
    test.failure = error.what();
  }
  test.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return test;
}

}  // namespace

std::vector<SelfTest> run_self_tests() {
  // Processes first: after a fork of a process with threads little is allowed.
  SelfTest processes = run_one(true);
  return {std::move(processes), run_one(false)};
}

}  // namespace ferry::cli

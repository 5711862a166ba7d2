#include "doctor/self_test.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include "ferry/group.hpp"
#include "run/ranks.hpp"

namespace ferry::cli {
namespace {

constexpr int kRanks = 2;
constexpr std::int64_t kTokens = 3;
constexpr std::int64_t kHidden = 64;
constexpr auto kDeadline = std::chrono::seconds(10);
constexpr auto kGpuDeadline = std::chrono::seconds(30);  // drivers start slowly

float value_of(int rank, std::int64_t token, std::int64_t column) {
  return static_cast<float>(1000 * rank + 100 * token + column);
}

void expect(bool same, const char* where, std::int64_t row, float got, float expected) {
  if (same) return;
  throw std::runtime_error(
      fmt::format("{}: row {}: got {}, expected {}", where, row, got, expected));
}

/// Values where the engine wants them: here, or in the memory of a GPU.
template <class T>
class Placed {
 public:
  Placed(const std::vector<T>& values, int gpu) : values_(values) {
    if (gpu >= 0) copy_ = on_gpu(values.data(), values.size() * sizeof(T), gpu);
  }
  const void* data() const { return copy_ ? copy_.get() : values_.data(); }

 private:
  const std::vector<T>& values_;
  std::shared_ptr<void> copy_{};
};

std::vector<float> values_of(const Tensor& tensor, std::int64_t count, int gpu) {
  if (gpu < 0) return {tensor.as<float>(), tensor.as<float>() + count};
  std::vector<float> values(static_cast<std::size_t>(count));
  from_gpu(values.data(), tensor.data(), values.size() * sizeof(float), gpu);
  return values;
}

// Every token goes to both ranks, so rank r receives the rows of rank 0, then those of rank 1, and
// with experts that change nothing every token comes back doubled.
// `gpu` −1: in CPU memory.
void exchange(const std::shared_ptr<Bootstrap>& bootstrap, FabricKind fabric, int gpu) {
  GroupConfig config;
  config.experts = kRanks;
  config.deadline = gpu < 0 ? kDeadline : kGpuDeadline;
  config.backend = gpu < 0 ? Backend::host : Backend::cuda;
  config.device = gpu;
  config.memory_bytes = std::size_t{1} << 20;
  config.fabric = fabric;
  Group group(bootstrap, config);

  std::vector<std::int64_t> routes;
  std::vector<float> tokens;
  for (std::int64_t t = 0; t < kTokens; ++t) {
    routes.insert(routes.end(), {t % 2, (t + 1) % 2});
    for (std::int64_t c = 0; c < kHidden; ++c) tokens.push_back(value_of(group.rank(), t, c));
  }
  const Device device = gpu < 0 ? Device{} : Device{DeviceKind::cuda, gpu};
  const Placed<std::int64_t> ids(routes, gpu);
  const Placed<float> x(tokens, gpu);
  const Plan plan = group.plan({ids.data(), Dtype::i64, {kTokens, kRanks}, device});
  const Received received =
      group.dispatch({x.data(), Dtype::f32, {kTokens, kHidden}, device}, plan);
  if (received.x.rows() != kRanks * kTokens) {
    throw std::runtime_error(
        fmt::format("dispatch: got {} rows, expected {}", received.x.rows(), kRanks * kTokens));
  }
  const std::vector<float> rows = values_of(received.x, kRanks * kTokens * kHidden, gpu);
  for (std::int64_t i = 0; i < kRanks * kTokens * kHidden; ++i) {
    const std::int64_t row = i / kHidden;
    const float expected = value_of(static_cast<int>(row / kTokens), row % kTokens, i % kHidden);
    const float got = rows[static_cast<std::size_t>(i)];
    expect(got == expected, "dispatch", row, got, expected);
  }
  const Combined combined = group.combine(received.x, plan);
  const std::vector<float> sums = values_of(combined.x, kTokens * kHidden, gpu);
  for (std::int64_t i = 0; i < kTokens * kHidden; ++i) {
    const float expected = 2 * value_of(group.rank(), i / kHidden, i % kHidden);
    const float got = sums[static_cast<std::size_t>(i)];
    expect(got == expected, "combine", i / kHidden, got, expected);
  }
  group.barrier();  // nobody leaves while the other still reads
}

SelfTest run_one(bool processes, int gpus) {
  SelfTest test;
  test.name = fmt::format("{} ranks as {}", kRanks, processes ? "processes" : "threads");
  if (gpus > 0) test.name += fmt::format(", {} GPU{}", std::min(gpus, kRanks), gpus > 1 ? "s" : "");
  test.fabric = processes ? "shm" : "local";
  const auto begin = std::chrono::steady_clock::now();
  RankRun run;
  run.ranks = kRanks;
  run.processes = processes;
  run.limit = 2 * (gpus > 0 ? kGpuDeadline : kDeadline);
  try {
    const auto failures =
        run_ranks(run, [&](int rank, const std::shared_ptr<Bootstrap>& bootstrap) {
          exchange(bootstrap, processes ? FabricKind::shm : FabricKind::local,
                   gpus > 0 ? rank % gpus : -1);
        });
    test.failure = summary(failures);
  } catch (const std::exception& error) {
    test.failure = error.what();
  }
  test.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return test;
}

}  // namespace

std::vector<SelfTest> run_self_tests(int gpus) {
  // Processes first: after a fork of a process with threads little is allowed.
  std::vector<SelfTest> tests;
  tests.push_back(run_one(true, 0));
  if (gpus > 0) tests.push_back(run_one(true, gpus));
  tests.push_back(run_one(false, 0));
  return tests;
}

}  // namespace ferry::cli

// Groups come and go: no descriptor, mapping, thread or name stays behind.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>

#include "processes.hpp"

namespace ferry::test {
namespace {

constexpr int kCycles = 200;

struct Counts {
  std::ptrdiff_t descriptors = 0;
  std::ptrdiff_t threads = 0;
  std::ptrdiff_t shared_mappings = 0;
  std::ptrdiff_t mappings = 0;
};

Counts count() {
  const auto entries = [](const char* folder) {
    const auto all = std::filesystem::directory_iterator(folder);
    return std::distance(begin(all), end(all));
  };
  Counts counts;
  counts.descriptors = entries("/proc/self/fd");
  counts.threads = entries("/proc/self/task");
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    ++counts.mappings;
    if (line.find("ferry") != std::string::npos) ++counts.shared_mappings;
  }
  return counts;
}

void use(Group& group) {
  const std::int64_t routes[] = {0, 1};
  float x[2][4] = {};
  const Plan plan = group.plan({routes, Dtype::i64, {2, 1}});
  const Received received = group.dispatch({x, Dtype::f32, {2, 4}}, plan);
  group.combine(received.x, plan);
  LatencyExchange latency(group, {4, 8, 1, Dtype::bf16});
}

/// The counts once they no longer change.
Counts quiet_count() {
  Counts last = count();
  for (int equal = 0; equal < 5;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    const Counts next = count();
    equal = next.descriptors == last.descriptors && next.threads == last.threads ? equal + 1 : 0;
    last = next;
  }
  return last;
}

bool no_more(const Counts& a, const Counts& b) {
  return a.descriptors <= b.descriptors && a.threads == b.threads &&
         a.shared_mappings == b.shared_mappings;
}

/// The counts when they are as before, or after two seconds: a peer's goodbye may be under way.
Counts settled(const Counts& before) {
  const double end = now() + 2;
  while (!no_more(count(), before) && now() < end)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  return count();
}

void expect_same(const Counts& before) {
  const Counts after = settled(before);
  EXPECT_LE(after.descriptors, before.descriptors);
  EXPECT_EQ(after.threads, before.threads);
  EXPECT_EQ(after.shared_mappings, before.shared_mappings);
  // The allocator may keep a few mappings; two hundred leaked ones would show.
  EXPECT_LT(after.mappings - before.mappings, kCycles / 4);
}

void cycle_threads(FabricKind fabric) {
  auto meeting = thread_bootstrap(2);
  std::vector<std::thread> ranks;
  for (auto& bootstrap : meeting) {
    ranks.emplace_back([&bootstrap, fabric] {
      Stream stream;
      Group group(bootstrap, {.experts = 2, .memory_bytes = 4096, .fabric = fabric});
      use(group);
    });
  }
  for (auto& rank : ranks) rank.join();
}

TEST(Leaks, TwoHundredGroupsOfThreads) {
  for (FabricKind fabric : {FabricKind::local, FabricKind::sim}) {
    for (int i = 0; i < 5; ++i) cycle_threads(fabric);
    const Counts before = count();
    for (int i = 0; i < kCycles; ++i) cycle_threads(fabric);
    expect_same(before);
  }
}

TEST(Leaks, TwoHundredGroupsOfProcesses) {
  Ranks ranks(2, [](int, std::shared_ptr<Bootstrap> bootstrap, const Reporter& reporter) {
    Counts before;
    for (int i = 0; i < kCycles + 5; ++i) {
      if (i == 5) before = quiet_count();
      Group group(bootstrap, {.experts = 2, .memory_bytes = 4096});
      use(group);
      group.barrier();
    }
    const Counts after = settled(before);
    std::ostringstream text;
    // Fewer is no leak: the store may have closed a connection of its start meanwhile.
    text << std::max<std::ptrdiff_t>(0, after.descriptors - before.descriptors) << " "
         << after.threads - before.threads << " " << after.shared_mappings - before.shared_mappings
         << " " << (after.mappings - before.mappings < kCycles / 4 ? 0 : 1);
    reporter.line(text.str());
  });
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(ranks.line(rank, 120), "0 0 0 0");
    EXPECT_EQ(ranks.join(rank, 10), 0);
  }
  EXPECT_EQ(shared_memory_names(), std::vector<std::string>{});
}

TEST(Leaks, TwoHundredStoresAndGroups) {
  const Counts before = count();
  for (int i = 0; i < kCycles; ++i) {
    TcpOptions options;
    options.port = free_port();
    options.secret = "s";
    Group group(tcp_bootstrap(options), {.experts = 2, .memory_bytes = 4096});
    group.destroy();
  }
  expect_same(before);
}

}  // namespace
}  // namespace ferry::test

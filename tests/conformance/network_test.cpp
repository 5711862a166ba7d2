// Ranks joined by libfabric over TCP, as processes (threads under the thread sanitizer): the same
// results as anywhere.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>

#include "domain_cases.hpp"
#include "engine/test_network.hpp"
#include "fleet_test.hpp"
#include "platform/posix/process_group.hpp"
#include "platform/process.hpp"
#include "random.hpp"
#include "session.hpp"

namespace ferry::conformance {
namespace {

using engine::test::has_network;

class Network : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_network()) GTEST_SKIP() << "no libfabric in this build or on this machine";
  }
};

std::vector<DomainCell> cells() {
  std::vector<DomainCell> all{{2, FabricKind::ofi}, {3, FabricKind::ofi}, {4, FabricKind::ofi}};
  if (only_threads()) return all;
  for (const auto& [ranks, domain_size] : {std::pair{4, 2}, std::pair{3, 2}}) {
    all.push_back({ranks, {FabricKind::shm, domain_size, FabricKind::ofi, Crossing::direct}});
  }
  return all;
}

/// Every pair of choices of the other axes, dealt out to the cells; without FERRY_CONFORMANCE=full
/// every third case of them.
void run_cover(Mode mode) {
  const std::uint64_t seed = mix(base_seed(), 301);
  auto cover = pairwise_cover(mode, seed);
  const char* text = std::getenv("FERRY_CONFORMANCE");
  if (text == nullptr || std::string(text) != "full") cover.resize((cover.size() + 2) / 3);
  const std::vector<DomainCell> all = cells();
  std::vector<std::vector<Case>> dealt(all.size());
  for (std::size_t i = 0; i < cover.size(); ++i) {
    Case c = placed(make_case(mode, cover[i]), all[i % all.size()]);
    size_case(c, mix(seed, i));
    dealt[i % all.size()].push_back(c);
  }
  std::printf("FERRY_TEST_SEED=%llu, %zu cases\n", static_cast<unsigned long long>(base_seed()),
              cover.size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    std::stable_sort(dealt[i].begin(), dealt[i].end(), shares_before);
    const auto failures = run_fleet({all[i].wires, all[i].ranks}, [&](Rank& rank) {
      Session session(rank);
      for (const Case& c : dealt[i]) run_case(session, c, to_string(all[i]) + ": ");
    });
    EXPECT_TRUE(failures.empty()) << to_string(all[i]) << "\n" << joined(failures);
  }
}

TEST_F(Network, Throughput) {
  run_cover(Mode::throughput);
}

TEST_F(Network, Latency) {
  run_cover(Mode::latency);
}

struct Stopped {};

// More is to be sent than the network and the sockets hold, to a rank that takes nothing: the call
// ends when its caller wants it to, long before the deadline.
TEST_F(Network, AWriteThatWaitsForRoomHeedsTheCaller) {
  if (only_threads()) GTEST_SKIP() << "a thread cannot be stopped";
  Fleet fleet{FabricKind::ofi, 2};
  fleet.victim = 1;
  const auto failures = run_fleet(fleet, [](Rank& rank) {
    constexpr std::int64_t kTokens = 64, kHidden = 128 << 10;  // 16 MiB
    std::atomic<bool> stop{false};
    GroupConfig config = group_config(rank, 2);
    config.deadline = std::chrono::seconds(30);
    config.on_wait = [&] {
      if (stop) throw Stopped{};
    };
    const std::int64_t mine = process_id();
    const auto pids =
        rank.bootstrap()->all_gather(std::as_bytes(std::span(&mine, 1)), std::chrono::seconds(10));
    Group group(rank.bootstrap(), config);
    LatencyExchange exchange(group, {kTokens, kHidden, 1, Dtype::bf16});
    group.barrier();
    if (rank.rank() == 1) std::raise(SIGSTOP);
    std::int64_t other = 0;
    std::memcpy(&other, pids[1].data(), sizeof other);
    const std::vector<std::uint16_t> x(kTokens * kHidden);
    const std::vector<std::int64_t> ids(kTokens, 1);
    stop = true;
    const auto start = std::chrono::steady_clock::now();
    bool stopped = false;
    try {
      LatencyDispatchOptions options;
      options.hook = true;  // sends, and waits for nothing but room
      (void)exchange.dispatch({x.data(), Dtype::bf16, {kTokens, kHidden}},
                              {ids.data(), Dtype::i64, {kTokens, 1}}, options);
    } catch (const Stopped&) {
      stopped = true;
    }
    rank.check(stopped, "what on_wait threw did not leave the call");
    rank.check(std::chrono::steady_clock::now() - start < std::chrono::seconds(15),
               "the call went on");
    kill_process(other);
  });
  EXPECT_TRUE(failures.empty()) << joined(failures);
}

}  // namespace
}  // namespace ferry::conformance

// A rank is killed or stopped among collectives: every other one names it, whatever the call, the
// algorithm and what joins the ranks.
#include <gtest/gtest.h>

#include <csignal>
#include <random>
#include <sstream>
#include <thread>

#include "engine/test_network.hpp"
#include "processes.hpp"

namespace ferry::test {
namespace {

using engine::test::has_network;

constexpr int kMembers = 4;
constexpr unsigned kFaultSeed = 20261126;

/// What joins the ranks: memory, two domains of memory with copies between them, or libfabric.
enum class Joined { memory, domains, network };

GroupConfig config_of(Joined joined, std::chrono::nanoseconds deadline) {
  GroupConfig config{.experts = 1, .deadline = deadline, .memory_bytes = 4 << 20};
  if (joined == Joined::domains) config.domain_size = kMembers / 2;
  if (joined == Joined::network) config.fabric = FabricKind::ofi;
  return config;
}

using Values = std::vector<std::int32_t>;

TensorView view(Values& values) {
  return {values.data(), Dtype::i32, {std::ssize(values)}};
}

void expect(const Reporter& reporter, bool right, const char* call) {
  if (right) return;
  reporter.line(std::string("wrong values of ") + call);
  std::_Exit(4);
}

/// Calls of every kind, of short and of long tensors.
void call_all(Collectives& all, const Reporter& reporter) {
  const int sum = kMembers * (kMembers + 1) / 2;
  for (const std::int64_t count : {200, 60'000}) {
    const auto n = static_cast<std::size_t>(count);
    for (const Algorithm algorithm :
         {Algorithm::automatic, Algorithm::direct, Algorithm::ring, Algorithm::tree}) {
      Values x(n, all.rank() + 1);
      all.all_reduce(view(x), {.algorithm = algorithm});
      expect(reporter, x == Values(n, sum), "all_reduce");
    }
    std::vector<float> coded(n, 1.0F);
    all.all_reduce({coded.data(), Dtype::f32, {count}}, {.format = ReduceFormat::e4m3});
    expect(reporter, coded == std::vector<float>(n, kMembers), "all_reduce in e4m3");
    Tensor registered = all.empty({count}, Dtype::i32);
    std::fill_n(registered.as<std::int32_t>(), n, 1);
    all.all_reduce(registered);
    expect(reporter, registered.as<std::int32_t>()[n - 1] == kMembers, "all_reduce, registered");
    Values mine(n, all.rank() + 1), every(n * kMembers), block(n);
    all.all_gather(view(mine), view(every));
    expect(reporter, every.back() == kMembers, "all_gather");
    all.reduce_scatter(view(every), view(block));
    expect(reporter, block == Values(n, kMembers * (all.rank() + 1)), "reduce_scatter");
    Values out(every.size());
    all.all_to_all(view(every), view(out));
    expect(reporter, out == Values(every.size(), all.rank() + 1), "all_to_all");
    all.broadcast(view(mine), 1);
    expect(reporter, mine == Values(n, 2), "broadcast");
    Stream stream;
    Values got(n);
    all.send(view(block), (all.rank() + 1) % kMembers, 0, {&stream});
    all.recv(view(got), (all.rank() + kMembers - 1) % kMembers, 0, {&stream}).wait();
    expect(reporter, got == Values(n, kMembers * ((all.rank() + kMembers - 1) % kMembers + 1)),
           "recv");
    stream.synchronize();
  }
  all.barrier();
}

/// Calls until one throws; reports "kind peer seconds message".
Ranks::Body calling(Joined joined, std::chrono::nanoseconds deadline) {
  return [=](int, std::shared_ptr<Bootstrap> bootstrap, const Reporter& reporter) {
    Collectives all(std::move(bootstrap), config_of(joined, deadline));
    try {
      for (int round = 0;; ++round) {
        call_all(all, reporter);
        if (round == 1) reporter.line("going");
      }
    } catch (const Error& error) {
      reporter.line(std::to_string(static_cast<int>(error.kind())) + " " +
                    std::to_string(error.peer()) + " " + std::to_string(now()) + " " +
                    error.what());
    }
  };
}

class CollectiveFaults : public testing::TestWithParam<Joined> {
 protected:
  void SetUp() override {
    if (GetParam() == Joined::network && !has_network()) GTEST_SKIP() << "no libfabric here";
  }
  /// Signals a rank somewhere in its calls; each other one must report `kind` and the victim.
  /// Returns the seconds that the last one took.
  static double fault(Ranks& ranks, int victim, int number, ErrorKind kind, unsigned delay_us) {
    for (int rank = 0; rank < kMembers; ++rank) {
      if (ranks.line(rank, 60) != "going") ADD_FAILURE() << "rank " << rank << " did not begin";
    }
    std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
    const double start = now();
    ranks.signal(victim, number);
    double latest = 0;
    for (int rank = 0; rank < kMembers; ++rank) {
      if (rank == victim) continue;
      int got = -1, peer = -1;
      double when = 0;
      const std::string text = ranks.line(rank, 30);
      std::istringstream(text) >> got >> peer >> when;
      EXPECT_EQ(got, static_cast<int>(kind)) << text;
      EXPECT_EQ(peer, victim) << text;
      EXPECT_EQ(ranks.join(rank, 10), 0) << text;
      latest = std::max(latest, when - start);
    }
    return latest;
  }
};

TEST_P(CollectiveFaults, EverySurvivorNamesTheKilledRank) {
  std::mt19937 random(kFaultSeed);
  SCOPED_TRACE(kFaultSeed);
  for (const int victim : {0, kMembers - 1}) {
    Ranks ranks(kMembers, calling(GetParam(), std::chrono::seconds(60)));
    const double took = fault(ranks, victim, SIGKILL, ErrorKind::peer_failed, random() % 30'000);
    EXPECT_LT(took, 20) << "not at the deadline";
    EXPECT_EQ(ranks.join(victim, 5), 128 + SIGKILL);
  }
  EXPECT_EQ(shared_memory_names(), std::vector<std::string>{});
}

TEST_P(CollectiveFaults, EverySurvivorNamesTheStoppedRankAtTheDeadline) {
  std::mt19937 random(kFaultSeed);
  SCOPED_TRACE(kFaultSeed);
  for (const int victim : {2, 1}) {
    Ranks ranks(kMembers, calling(GetParam(), std::chrono::seconds(2)));
    const double took = fault(ranks, victim, SIGSTOP, ErrorKind::deadline, random() % 30'000);
    EXPECT_GT(took, 1.8);
    ranks.signal(victim, SIGCONT);  // it learns that the others went on without it
    EXPECT_EQ(ranks.join(victim, 20), 0);
  }
  EXPECT_EQ(shared_memory_names(), std::vector<std::string>{});
}

INSTANTIATE_TEST_SUITE_P(Every, CollectiveFaults,
                         testing::Values(Joined::memory, Joined::domains, Joined::network),
                         [](const auto& test) {
                           return std::string(test.param == Joined::memory    ? "Memory"
                                              : test.param == Joined::domains ? "Domains"
                                                                              : "Network");
                         });

}  // namespace
}  // namespace ferry::test

// A rank is killed or stopped in the middle of an exchange, or leaves: every survivor names it.
#include <gtest/gtest.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <sstream>
#include <thread>

#include "engine/test_network.hpp"
#include "processes.hpp"

namespace ferry::test {
namespace {

using engine::test::has_network;

constexpr int kRanks = 4;
constexpr std::int64_t kTokens = 200, kHidden = 512, kExperts = 8;

std::uint64_t base_seed() {
  const char* text = std::getenv("FERRY_TEST_SEED");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : 20261121;
}

/// across: hierarchical throughput mode over two domains. latency_across: latency mode over them.
/// network, latency_network: over libfabric.
enum class Mode { throughput, latency, across, latency_across, network, latency_network };

bool is_latency(Mode mode) {
  return mode == Mode::latency || mode == Mode::latency_across || mode == Mode::latency_network;
}

bool is_network(Mode mode) {
  return mode == Mode::network || mode == Mode::latency_network;
}

/// Exchanges for ever, checking every sum; returns only by an exception.
void exchange(Group& group, Mode mode, const Reporter& reporter) {
  std::mt19937 random(static_cast<unsigned>(group.rank()));
  std::vector<std::int64_t> routes(kTokens * 2);
  for (auto& id : routes) id = static_cast<std::int64_t>(random() % kExperts);
  const ConstTensorView ids{routes.data(), Dtype::i64, {kTokens, 2}};
  std::vector<float> x(kTokens * kHidden);
  for (auto& value : x) value = static_cast<float>(random() % 1000);
  const ConstTensorView view{x.data(), Dtype::f32, {kTokens, kHidden}};
  const std::vector<float> weights(kTokens * 2, 1.0F);
  std::optional<LatencyExchange> latency;
  if (is_latency(mode)) {
    latency.emplace(group, LatencyConfig{kTokens, kHidden, 2, Dtype::f32});
  }
  for (int round = 0;; ++round) {
    Tensor sums;
    if (latency) {
      const LatencyReceived received = latency->dispatch(view, ids);
      sums = latency->combine(received.x, received, {weights.data(), Dtype::f32, {kTokens, 2}}).x;
    } else {
      const Plan plan = group.plan(ids);
      sums = group.combine(group.dispatch(view, plan).x, plan).x;
    }
    for (std::int64_t t = 0; t < kTokens; ++t) {
      const auto at = static_cast<std::size_t>(t) * 2;
      const bool same = group.size() == kRanks && routes[at] / 2 == routes[at + 1] / 2;
      const float times = latency || !same ? 2.0F : 1.0F;
      for (std::int64_t h = 0; h < kHidden; ++h) {
        if (sums.as<float>()[t * kHidden + h] !=
            times * x[static_cast<std::size_t>(t * kHidden + h)]) {
          reporter.line("wrong sum");
          std::_Exit(4);
        }
      }
    }
    if (round == 5) reporter.line("going");
  }
}

/// Reports "kind peer seconds message" of the error that ends the exchanges.
Ranks::Body exchanging(Mode mode, std::chrono::nanoseconds deadline) {
  return [=](int, std::shared_ptr<Bootstrap> bootstrap, const Reporter& reporter) {
    GroupConfig config{.experts = kExperts, .deadline = deadline, .memory_bytes = 1 << 20};
    if (mode == Mode::across || mode == Mode::latency_across) config.domain_size = kRanks / 2;
    config.crossing = Crossing::hierarchical;
    if (is_network(mode)) config.fabric = FabricKind::ofi;
    Group group(std::move(bootstrap), config);
    try {
      exchange(group, mode, reporter);
    } catch (const Error& error) {
      reporter.line(std::to_string(static_cast<int>(error.kind())) + " " +
                    std::to_string(error.peer()) + " " + std::to_string(now()) + " " +
                    error.what());
    }
  };
}

struct Verdict {
  int kind = -1;
  int peer = -1;
  double when = 0;
  std::string text{};
};

Verdict read_verdict(Ranks& ranks, int rank, double seconds) {
  Verdict verdict;
  std::istringstream line(ranks.line(rank, seconds));
  line >> verdict.kind >> verdict.peer >> verdict.when;
  std::getline(line, verdict.text);
  return verdict;
}

class Faults : public testing::TestWithParam<Mode> {
 protected:
  void SetUp() override {
    if (is_network(GetParam()) && !has_network()) GTEST_SKIP() << "no libfabric on this machine";
  }
  /// Over a network, where each takes longer, only one of them.
  static std::vector<int> victims(const std::vector<int>& all) {
    if (!is_network(GetParam())) return all;
    return {GetParam() == Mode::network ? all.back() : all.front()};
  }
};

TEST_P(Faults, EverySurvivorNamesTheKilledRankSoon) {
  std::mt19937_64 random(base_seed());
  std::printf("seed %llu\n", static_cast<unsigned long long>(base_seed()));
  // A network tells nobody that a process has ended: silence has to.
  const double limit = is_network(GetParam()) ? 3.0 : 1.0;
  for (int victim : victims({0, 1, 2, 3})) {
    Ranks ranks(kRanks, exchanging(GetParam(), std::chrono::seconds(30)));
    for (int rank = 0; rank < kRanks; ++rank) ASSERT_EQ(ranks.line(rank, 30), "going");
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 30000));
    const double killed = now();
    ranks.signal(victim, SIGKILL);
    for (int rank = 0; rank < kRanks; ++rank) {
      if (rank == victim) continue;
      const Verdict verdict = read_verdict(ranks, rank, 10);
      EXPECT_EQ(verdict.kind, static_cast<int>(ErrorKind::peer_failed)) << verdict.text;
      EXPECT_EQ(verdict.peer, victim) << verdict.text;
      EXPECT_LT(verdict.when - killed, limit) << verdict.text;
      EXPECT_NE(verdict.text.find("rank " + std::to_string(victim)), std::string::npos);
      EXPECT_EQ(ranks.join(rank, 5), 0);
    }
    EXPECT_EQ(ranks.join(victim, 5), 128 + SIGKILL);
  }
  EXPECT_EQ(shared_memory_names(), std::vector<std::string>{});
}

TEST_P(Faults, EverySurvivorNamesTheStoppedRankAtTheDeadline) {
  constexpr double kDeadline = 1.5;
  const bool domains = GetParam() == Mode::across || GetParam() == Mode::latency_across;
  for (int victim : victims({domains ? 3 : 0, domains ? 1 : 2})) {
    Ranks ranks(kRanks, exchanging(GetParam(), std::chrono::milliseconds(1500)));
    for (int rank = 0; rank < kRanks; ++rank) ASSERT_EQ(ranks.line(rank, 30), "going");
    const double stopped = now();
    ranks.signal(victim, SIGSTOP);
    for (int rank = 0; rank < kRanks; ++rank) {
      if (rank == victim) continue;
      const Verdict verdict = read_verdict(ranks, rank, 10);
      EXPECT_EQ(verdict.kind, static_cast<int>(ErrorKind::deadline)) << verdict.text;
      EXPECT_EQ(verdict.peer, victim) << verdict.text;
      EXPECT_GT(verdict.when - stopped, kDeadline * 0.9) << verdict.text;
      EXPECT_LT(verdict.when - stopped, kDeadline + 1.0) << verdict.text;
      EXPECT_EQ(ranks.join(rank, 5), 0);
    }
    // Woken up, the stopped rank learns that the others went on without it.
    ranks.signal(victim, SIGCONT);
    const Verdict verdict = read_verdict(ranks, victim, 10);
    EXPECT_GE(verdict.kind, 0);
    EXPECT_EQ(ranks.join(victim, 5), 0);
  }
  EXPECT_EQ(shared_memory_names(), std::vector<std::string>{});
}

std::string mode_name(const testing::TestParamInfo<Mode>& mode) {
  switch (mode.param) {
    case Mode::throughput: return "Throughput";
    case Mode::latency: return "Latency";
    case Mode::across: return "Across";
    case Mode::latency_across: return "LatencyAcross";
    case Mode::network: return "Network";
    default: return "LatencyNetwork";
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, Faults,
                         testing::Values(Mode::throughput, Mode::latency, Mode::across,
                                         Mode::latency_across, Mode::network,
                                         Mode::latency_network),
                         mode_name);

class Leaving : public testing::TestWithParam<FabricKind> {
 protected:
  void SetUp() override {
    if (GetParam() == FabricKind::ofi && !has_network()) {
      GTEST_SKIP() << "no libfabric on this machine";
    }
  }
  static GroupConfig config() {
    return {.experts = 3, .memory_bytes = 1 << 16, .fabric = GetParam()};
  }
};

INSTANTIATE_TEST_SUITE_P(Fabrics, Leaving, testing::Values(FabricKind::automatic, FabricKind::ofi),
                         [](const auto& test) {
                           return test.param == FabricKind::ofi ? "OverNetwork" : "InMemory";
                         });

TEST_P(Leaving, ARankThatLeavesIsNamedAndOneThatIsDoneMayGo) {
  Ranks ranks(3, [](int rank, std::shared_ptr<Bootstrap> bootstrap, const Reporter& reporter) {
    Group group(std::move(bootstrap), config());
    const std::int64_t route = 0;
    const ConstTensorView ids{&route, Dtype::i64, {1, 1}};
    group.plan(ids);
    if (rank == 1) return;  // done: destroys its group at once
    try {
      group.plan(ids);
      reporter.line("no error");
    } catch (const Error& error) {
      reporter.line(std::to_string(static_cast<int>(error.kind())) + " " +
                    std::to_string(error.peer()) + " 0 " + error.what());
    }
  });
  for (int rank : {0, 2}) {
    const Verdict verdict = read_verdict(ranks, rank, 10);
    EXPECT_EQ(verdict.kind, static_cast<int>(ErrorKind::peer_left)) << verdict.text;
    EXPECT_EQ(verdict.peer, 1) << verdict.text;
  }
}

TEST_P(Leaving, TheLastExchangeEndsWellForAllWhenTheFirstToFinishExits) {
  for (int round = 0; round < 20; ++round) {
    Ranks ranks(3, [](int, std::shared_ptr<Bootstrap> bootstrap, const Reporter&) {
      Group group(std::move(bootstrap), config());
      group.barrier();
    });
    for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(ranks.join(rank, 20), 0) << ranks.line(rank, 0);
  }
}

TEST(Creation, ARankKilledBeforeTheGroupIsMadeIsNamed) {
  for (int victim : {0, 1}) {
    Ranks ranks(3, [=](int rank, std::shared_ptr<Bootstrap> bootstrap, const Reporter& reporter) {
      reporter.line("going");  // it has met rank 0
      if (rank == victim) std::this_thread::sleep_for(std::chrono::hours(1));
      try {
        Group group(std::move(bootstrap), {.experts = 3, .memory_bytes = 1 << 16});
      } catch (const Error& error) {
        reporter.line(std::to_string(static_cast<int>(error.kind())) + " " +
                      std::to_string(error.peer()) + " " + std::to_string(now()) + " " +
                      error.what());
      }
    });
    for (int rank = 0; rank < 3; ++rank) ASSERT_EQ(ranks.line(rank, 30), "going");
    const double killed = now();
    ranks.signal(victim, SIGKILL);
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == victim) continue;
      const Verdict verdict = read_verdict(ranks, rank, 10);
      EXPECT_EQ(verdict.peer, victim) << verdict.text;
      EXPECT_LT(verdict.when - killed, 1.0) << verdict.text;
    }
  }
  EXPECT_EQ(shared_memory_names(), std::vector<std::string>{});
}

TEST(Jobs, TwoAtOnceDoNotMeet) {
  const auto job = [](int marker) {
    return [marker](int rank, std::shared_ptr<Bootstrap> bootstrap, const Reporter& reporter) {
      Group group(std::move(bootstrap), {.experts = 3, .memory_bytes = 1 << 16});
      std::vector<float> x(16, static_cast<float>(marker * 10 + rank));
      const std::int64_t route[] = {0, 1, 2};
      for (int round = 0; round < 200; ++round) {
        const Plan plan = group.plan({route, Dtype::i64, {1, 3}});
        const Received received = group.dispatch({x.data(), Dtype::f32, {1, 16}}, plan);
        for (int source = 0; source < 3; ++source) {
          if (received.x.as<float>()[source * 16] != static_cast<float>(marker * 10 + source)) {
            reporter.line("a row of another job");
            std::_Exit(5);
          }
        }
      }
    };
  };
  Ranks first(3, job(1));
  Ranks second(3, job(2));
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(first.join(rank, 30), 0) << first.line(rank, 0);
    EXPECT_EQ(second.join(rank, 30), 0) << second.line(rank, 0);
  }
}

}  // namespace
}  // namespace ferry::test

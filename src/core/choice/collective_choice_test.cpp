// The choice against links that are simulated: how much longer its calls take than the best of all
// algorithms and shares.
#include "core/choice/collective_choice.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>

namespace ferry {
namespace {

constexpr unsigned kSeed = 20;

LinkTable table_of(const std::vector<double>& rates, double latency = 1e-4) {
  LinkTable links(static_cast<int>(rates.size()));
  for (int d = 0; d < links.domains(); ++d) links.set_port(d, {latency, rates[index(d)]});
  return links;
}

TEST(LinkFit, FindsTheCostAndFollowsAChange) {
  std::mt19937 random(kSeed);
  LinkFit fit({1e-3, 1e9});  // wrong by ten
  std::normal_distribution<double> noise(1.0, 0.05);
  const auto observe = [&](const LinkCost& real, int times) {
    for (int i = 0; i < times; ++i) {
      const double bytes = 1e4 * static_cast<double>(1 + random() % 1000);
      const double spike = random() % 50 == 0 ? 5 : 1;
      fit.observe(bytes, real.seconds(bytes) * noise(random) * spike);
    }
  };
  observe({1e-4, 1e8}, 60);
  EXPECT_NEAR(fit.cost().bytes_per_s, 1e8, 1e7);
  EXPECT_NEAR(fit.cost().latency_s, 1e-4, 1e-4);
  observe({1e-4, 2.5e7}, 30);
  EXPECT_NEAR(fit.cost().bytes_per_s, 2.5e7, 2.5e6);
}

TEST(LinkFit, OneOddObservationChangesNothing) {
  LinkFit fit({1e-4, 1e8});
  fit.observe(1e6, 1.0);
  fit.observe(1e6, 1e-6);
  fit.observe(0, 1.0);
  EXPECT_EQ(fit.cost().bytes_per_s, 1e8);
}

TEST(BestShares, ASlowHostOwnsNothing) {
  EXPECT_EQ(best_shares(table_of({1e8, 1e8})), std::vector<int>{});  // nothing depends on it
  EXPECT_EQ(best_shares(table_of({1e8, 1e8, 1e8, 1e8})), (std::vector<int>(4, 250)));
  const std::vector<int> slow = best_shares(table_of({1e8, 25e6, 1e8, 1e8}));
  EXPECT_EQ(slow[1], 0);
  for (const int d : {0, 2, 3}) EXPECT_NEAR(slow[index(d)], 333, 1);
  const std::vector<int> little = best_shares(table_of({1e8, 9e7, 1e8, 1e8}));
  EXPECT_GT(little[1], 150);
  EXPECT_LT(little[1], 250);
}

TEST(BestShares, AreTheBestOfAll) {
  std::mt19937 random(kSeed);
  const Domains domains = Domains::blocks(4, 1);
  const ReduceVolume volume{1e8, 1e8};
  for (int i = 0; i < 50; ++i) {
    std::vector<double> rates;
    for (int d = 0; d < 4; ++d) rates.push_back(1e7 * static_cast<double>(1 + random() % 10));
    const LinkTable links = table_of(rates, 1e-6);
    const auto seconds = [&](const std::vector<int>& shares) {
      return predicted_seconds({Algorithm::direct, shares}, volume, links, domains);
    };
    double best = 1e9;
    for (int a = 0; a <= 20; ++a) {
      for (int b = 0; a + b <= 20; ++b) {
        for (int c = 0; a + b + c <= 20; ++c) {
          best = std::min(best, seconds({a, b, c, 20 - a - b - c}));
        }
      }
    }
    EXPECT_LE(seconds(best_shares(links)), best * 1.01);
  }
}

/// Hosts of one rank each with a network interface each, and how long a call really takes.
struct World {
  std::vector<double> rates{};
  double latency = 1e-4;
  double bytes = 32 << 20;
  double tree_overhead = 1.2, ring_overhead = 1.1;  // that no model knows
  std::mt19937 random{kSeed};
  int made = 0;

  int hosts() const { return static_cast<int>(rates.size()); }
  std::vector<double> parts(const ReduceWay& way) const {
    std::vector<double> parts(rates.size(), 1.0 / hosts());
    const double all = std::accumulate(way.shares.begin(), way.shares.end(), 0.0);
    for (std::size_t d = 0; d < way.shares.size(); ++d) parts[d] = way.shares[d] / all;
    return parts;
  }
  double seconds(const ReduceWay& way) const {
    const int n = hosts();
    double longest = 0;
    if (way.algorithm == Algorithm::ring) {
      const double slowest = *std::min_element(rates.begin(), rates.end());
      return ring_overhead * (2.0 * (n - 1) / n * bytes / slowest + 2 * (n - 1) * latency);
    }
    const std::vector<double> part = parts(way);
    for (int h = 0; h < n; ++h) {
      double carries = 1 + (n - 2) * part[index(h)];
      if (way.algorithm == Algorithm::tree) carries = (h > 0) + (2 * h + 1 < n) + (2 * h + 2 < n);
      longest = std::max(longest, carries * bytes / rates[index(h)]);
    }
    if (way.algorithm == Algorithm::tree) return tree_overhead * longest + 4 * latency;
    return longest + 2 * latency + bytes / 1e6 * latency / 4;
  }
  double oracle() const {
    double best = std::min(seconds({Algorithm::ring, {}}), seconds({Algorithm::tree, {}}));
    std::vector<int> shares(rates.size());
    const auto sweep = [&](auto&& self, std::size_t at, int left) -> void {
      if (at + 1 == shares.size()) {
        shares[at] = left;
        best = std::min(best, seconds({Algorithm::direct, shares}));
        return;
      }
      for (shares[at] = 0; shares[at] <= left; ++shares[at]) {
        const int mine = shares[at];
        self(self, at + 1, left - mine);
        shares[at] = mine;
      }
    };
    sweep(sweep, 0, 12);
    return best;
  }
  double noise() {
    std::normal_distribution<double> normal(1.0, 0.04);
    return std::max(0.5, normal(random)) * (random() % 40 == 0 ? 3 : 1);
  }

  /// A call as the engine makes it: what ranks waited for, and how long it took. Returns what it
  /// would take without noise.
  double call(CollectiveChoice& choice) {
    const ReduceVolume volume{bytes, bytes};
    const ReduceWay way = choice.next(volume, true).way;
    const double up = std::min(bytes, 1e6);
    const std::vector<double> part = parts(way);
    std::vector<Flow> told;
    ++made;
    for (int to = 0; to < hosts() && way.algorithm == Algorithm::direct; ++to) {
      if (part[index(to)] <= 0) continue;
      const std::vector<int> equal(rates.size(), 1);
      std::vector<Flow> waits;
      double now = 0;
      for (int i = 0; i + 1 < hosts(); ++i) {  // in turn, another first each time
        const int from = (to + 1 + (made + i) % (hosts() - 1)) % hosts();
        Flow flow = partials_flow(way.shares.empty() ? equal : way.shares, up, from, to);
        const double came = (latency + std::max(flow.sent_bytes / rates[index(from)],
                                                flow.got_bytes / rates[index(to)])) *
                            noise();
        flow.waited = came > now;
        now = flow.seconds = std::max(now, came);
        waits.push_back(flow);
      }
      told.push_back(waits.front());
      if (waits.size() > 1) {
        for (Flow& flow : waits) {
          if (flow.waited) waits.front() = flow;
        }
        if (waits.front().from != told.back().from) told.push_back(waits.front());
      }
    }
    choice.count(volume);
    choice.observe(way, volume, seconds(way) * noise());
    choice.links().observe(told);
    return seconds(way);
  }

  /// How much longer than the best calls take, on average.
  double regret(CollectiveChoice& choice, int calls) {
    const double best = oracle();
    double all = 0;
    for (int i = 0; i < calls; ++i) all += call(choice);
    return all / calls / best - 1;
  }
};

std::vector<World> simulated() {
  std::vector<World> all{{.rates = {1e8, 1e8, 1e8, 1e8}},
                         {.rates = {25e6, 1e8, 1e8, 1e8}},
                         {.rates = {1e8, 1e8, 1e8, 25e6}},
                         {.rates = {1e8, 1e8}},
                         {.rates = {1e9, 1e8, 3e8}},
                         {.rates = {5e7, 1e8, 2e8, 1e8, 1e8}},
                         {.rates = {1e8, 1e8, 1e8, 1e8}, .bytes = 1 << 20},
                         {.rates = {1e8, 1e8, 1e8, 25e6}, .tree_overhead = 0.8},
                         {.rates = {1e8, 1e8, 1e8, 1e8}, .ring_overhead = 0.7}};
  std::mt19937 random(kSeed);
  for (int i = 0; i < 12; ++i) {
    World world{.rates = {}, .random = std::mt19937(random())};
    for (int h = 0; h < 4; ++h) {
      world.rates.push_back(1e7 * static_cast<double>(1 + random() % 12));
    }
    all.push_back(world);
  }
  return all;
}

std::string to_string(const World& world) {
  std::string text = "seed " + std::to_string(kSeed) + ", MB/s";
  for (const double rate : world.rates) text += " " + std::to_string(rate / 1e6);
  return text;
}

std::string to_string(const World& world, const CollectiveChoice& choice) {
  const auto best = choice.best({world.bytes, world.bytes}, true);
  std::string text = to_string(world) + ", found";
  for (int d = 0; d < world.hosts(); ++d) {
    text += " " + std::to_string(choice.links().port(d).bytes_per_s / 1e6);
  }
  text += ", " + std::string(name_of(best.way.algorithm));
  for (const int share : best.way.shares) text += " " + std::to_string(share);
  return text + ": " + std::to_string(best.predicted_s) + " s, really " +
         std::to_string(world.seconds(best.way)) + " s, best " + std::to_string(world.oracle());
}

TEST(CollectiveChoice, ComesWithinFivePercentOfTheBestIn50Calls) {
  for (const double first : {2e7, 1e8, 3e9}) {
    for (World world : simulated()) {
      const Domains domains = Domains::blocks(world.hosts(), 1);
      CollectiveChoice choice(domains, {2e-4, first});
      world.regret(choice, 50);
      EXPECT_LE(world.regret(choice, 128), 0.05) << to_string(world, choice) << ", first " << first;
    }
  }
}

TEST(CollectiveChoice, FollowsALinkThatBecomesFourTimesSlower) {
  for (World world : simulated()) {
    for (int slow = 0; slow < world.hosts(); ++slow) {
      World changed = world;
      const Domains domains = Domains::blocks(world.hosts(), 1);
      CollectiveChoice choice(domains, {2e-4, 1e8});
      changed.regret(choice, 100);
      changed.rates[index(slow)] /= 4;
      changed.regret(choice, 48);
      EXPECT_LE(changed.regret(choice, 64), 0.10)
          << to_string(changed, choice) << ", slower " << slow;
    }
  }
}

TEST(CollectiveChoice, FollowsALinkThatRecovers) {
  World world{.rates = {1e8, 25e6, 1e8, 1e8}};
  const Domains domains = Domains::blocks(4, 1);
  CollectiveChoice choice(domains, {2e-4, 1e8});
  world.regret(choice, 100);
  EXPECT_EQ(choice.best({world.bytes, world.bytes}, true).way.shares[1], 0);
  world.rates[1] = 1e8;
  world.regret(choice, 64);
  EXPECT_LE(world.regret(choice, 64), 0.10);
}

TEST(CollectiveChoice, KeepsTheOrderUnlessAnyWillDo) {
  const Domains domains = Domains::blocks(4, 2);
  CollectiveChoice choice(domains, {1e-4, 1e8});
  const ReduceVolume volume{32 << 20, 32 << 20};
  for (int i = 0; i < 200; ++i) {
    const ReduceWay way = choice.next(volume, false).way;
    ASSERT_EQ(way.algorithm, Algorithm::hierarchical);
    choice.count(volume);
    choice.observe(way, volume, 10);
  }
}

TEST(CollectiveChoice, TriesAnotherNowAndThen) {
  const Domains domains = Domains::blocks(4, 1);
  CollectiveChoice choice(domains, {1e-4, 1e8});
  const ReduceVolume volume{32 << 20, 32 << 20};
  int others = 0;
  for (int i = 0; i < 640; ++i) {
    const ReduceWay best = choice.best(volume, true).way, next = choice.next(volume, true).way;
    if (next.algorithm != best.algorithm) ++others;
    choice.count(volume);
    choice.observe(next, volume, next.algorithm == Algorithm::direct ? 1 : 2);
  }
  EXPECT_GE(others, 9);
  EXPECT_LE(others, 13);
}

}  // namespace
}  // namespace ferry

// The choice against links that are simulated: how much longer its calls take than the best of all
// algorithms and shares.
#include "core/choice/collective_choice.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <string>

namespace ferry {
namespace {

constexpr unsigned kChoiceSeed = 20;

LinkTable table_of(const std::vector<double>& rates, double latency = 1e-4) {
  LinkTable links(static_cast<int>(rates.size()));
  for (int d = 0; d < links.domains(); ++d) links.set_port(d, {latency, rates[index(d)]});
  return links;
}

TEST(LinkTable, TakesTheRatesThatPeersDidNotHoldUp) {
  LinkTable links(4, {1e-3, 1e9});
  std::vector<LinkProbe> probes;
  for (int distance = 1; distance < 4; ++distance) {
    for (int to = 0; to < 4; ++to) {
      const int from = (to + distance) % 4;
      const double rate = from == 2 || to == 2 ? 25e6 : 100e6;
      probes.push_back({from, to, 1e-4, rate});
    }
  }
  probes[0].bytes_per_s = std::nan("");
  probes[1].bytes_per_s = -1;
  probes[4].latency_s = 0;
  EXPECT_TRUE(links.measured(probes));
  for (const int d : {0, 1, 3}) EXPECT_EQ(links.port(d).bytes_per_s, 100e6);
  EXPECT_EQ(links.port(2).bytes_per_s, 25e6);
  EXPECT_EQ(links.largest_latency(), 1e-4);
  for (LinkProbe& probe : probes) probe.bytes_per_s *= 1.1;
  EXPECT_FALSE(links.measured(probes));
  EXPECT_EQ(links.port(2).bytes_per_s, 25e6);
}

TEST(LinkTable, BytesThatWereSeenLateCountForTheirPart) {
  const double whole = kProbeDrain + kProbeBytes;
  EXPECT_NEAR(probed_rate(kProbeDrain / 1e8, whole / 1e8), 1e8, 1);
  EXPECT_NEAR(probed_rate((kProbeDrain - (256 << 10)) / 1e8, (whole - (256 << 10)) / 1e8), 1e8, 1);
  EXPECT_NEAR(probed_rate(whole / 1e8, whole / 1e8), 1e8, 1);
  constexpr std::size_t kMore = 4 << 20;  // of which a bucket of 256 KiB lets none through at once
  constexpr double kBurst = (256 << 10) / 1e8, kAll = (kProbeDrain + kMore) / 1e8 - kBurst;
  EXPECT_NEAR(probed_rate(kProbeDrain / 1e8 - kBurst, kAll, kMore), 1e8, 1);
  EXPECT_NEAR(probed_rate(kAll, kAll, kMore), (kProbeDrain + kMore) / kAll, 1);
}

/// Of four domains with 100 MB/s, but `rate` from 0 to 1; one flow may have been held up.
std::vector<LinkProbe> probes_of_a_pair(double rate, bool both_ways = true) {
  std::vector<LinkProbe> probes;
  for (int distance = 1; distance < 4; ++distance) {
    for (int from = 0; from < 4; ++from) {
      const int to = (from + distance) % 4;
      const bool slow = (from == 0 && to == 1) || (both_ways && from == 1 && to == 0);
      probes.push_back({from, to, 1e-4, slow ? rate : 100e6});
    }
  }
  return probes;
}

TEST(LinkTable, KnowsASlowPairFromASlowHost) {
  LinkTable links(4, {1e-4, 1e9});
  EXPECT_TRUE(links.measured(probes_of_a_pair(10e6)));
  for (int d = 0; d < 4; ++d) EXPECT_EQ(links.port(d).bytes_per_s, 100e6);
  ASSERT_EQ(links.slow_pairs().size(), 1u);
  EXPECT_EQ(links.link(0, 1).bytes_per_s, 10e6);
  EXPECT_EQ(links.link(1, 0).bytes_per_s, 10e6);
  EXPECT_EQ(links.link(1, 2).bytes_per_s, 100e6);
  EXPECT_FALSE(links.measured(probes_of_a_pair(11e6)));  // within 15 %
  EXPECT_EQ(links.link(0, 1).bytes_per_s, 10e6);
  std::vector<LinkProbe> others = probes_of_a_pair(100e6);
  std::erase_if(others, [](const LinkProbe& p) { return p.from + p.to == 1; });
  EXPECT_FALSE(links.measured(others));  // what was not probed stays
  EXPECT_EQ(links.link(0, 1).bytes_per_s, 10e6);
  EXPECT_TRUE(links.measured(probes_of_a_pair(100e6)));
  EXPECT_TRUE(links.slow_pairs().empty());
}

TEST(LinkTable, DoubtsWhatASingleFlowSaid) {
  LinkTable links(4, {1e-4, 100e6});
  EXPECT_FALSE(links.doubtful(probes_of_a_pair(80e6)));
  std::vector<LinkProbe> probes = probes_of_a_pair(10e6, false);
  EXPECT_TRUE(links.doubtful(probes));
  for (const LinkProbe& probe : probes_of_a_pair(100e6)) probes.push_back(probe);
  EXPECT_FALSE(links.doubtful(probes));
  EXPECT_FALSE(links.measured(probes));
  EXPECT_TRUE(links.slow_pairs().empty());
  links.measured(probes_of_a_pair(10e6));
  EXPECT_FALSE(links.doubtful(probes_of_a_pair(10e6)));  // it is known
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

TEST(BestShares, ASlowPairCarriesLittle) {
  LinkTable links = table_of({1e8, 1e8, 1e8, 1e8});
  links.set_slow_pair(1, 0, 1e7);
  const std::vector<int> shares = best_shares(links);
  for (const int d : {0, 1}) EXPECT_NEAR(shares[index(d)], 91, 1);
  for (const int d : {2, 3}) EXPECT_NEAR(shares[index(d)], 409, 1);
  // A domain that is far from all others finishes nothing.
  for (const int d : {2, 3}) links.set_slow_pair(0, d, 1e7);
  const std::vector<int> far = best_shares(links);
  const Domains domains = Domains::blocks(4, 1);
  const ReduceVolume volume{1e8, 1e8};
  EXPECT_LT(far[0], 20);
  EXPECT_LT(predicted_seconds({Algorithm::direct, far}, volume, links, domains),
            0.8 * predicted_seconds({Algorithm::direct, {}}, volume, links, domains));
}

TEST(BestShares, AreTheBestOfAll) {
  std::mt19937 random(kChoiceSeed);
  const Domains domains = Domains::blocks(4, 1);
  const ReduceVolume volume{1e8, 1e8};
  for (int i = 0; i < 50; ++i) {
    std::vector<double> rates;
    for (int d = 0; d < 4; ++d) rates.push_back(1e7 * static_cast<double>(1 + random() % 10));
    LinkTable links = table_of(rates, 1e-6);
    double near = 1.01;  // with slow pairs shares are nearly the best
    if (i % 2 == 1) {
      const int a = static_cast<int>(random() % 4), b = static_cast<int>(random() % 3);
      links.set_slow_pair(a, b < a ? b : b + 1, links.link(a, b < a ? b : b + 1).bytes_per_s / 5);
      near = 1.03;
    }
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
    EXPECT_LE(seconds(best_shares(links)), best * near) << "seed " << kChoiceSeed << ", case " << i;
  }
}

/// Hosts of one rank each with a network interface each, and how long a call really takes.
struct World {
  std::vector<double> rates{};
  std::vector<SlowPair> slow{};
  double latency = 1e-4;
  double bytes = 32 << 20;
  double tree_overhead = 1.2, ring_overhead = 1.1;  // that no model knows
  double burst = 256 << 10;
  double probe_noise = 0.04;
  std::mt19937 random{kChoiceSeed};
  int measurements = 0;

  int hosts() const { return static_cast<int>(rates.size()); }
  double rate(int a, int b) const {
    double rate = std::min(rates[index(a)], rates[index(b)]);
    for (const SlowPair& pair : slow) {
      if (std::min(a, b) == pair.a && std::max(a, b) == pair.b) {
        rate = std::min(rate, pair.bytes_per_second);
      }
    }
    return rate;
  }
  /// Nobody is faster than all others, which measurements of pairs would not show.
  void level() {
    const auto fastest = std::max_element(rates.begin(), rates.end());
    double second = 0;
    for (auto at = rates.begin(); at != rates.end(); ++at) {
      if (at != fastest) second = std::max(second, *at);
    }
    *fastest = second;
  }
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
      double slowest = rates[0];
      for (int h = 0; h < n; ++h) slowest = std::min(slowest, rate(h, (h + 1) % n));
      return ring_overhead * (2.0 * (n - 1) / n * bytes / slowest + 2 * (n - 1) * latency);
    }
    const std::vector<double> part = parts(way);
    for (int h = 0; h < n; ++h) {
      double carries = 1 + (n - 2) * part[index(h)];
      if (way.algorithm == Algorithm::tree) carries = (h > 0) + (2 * h + 1 < n) + (2 * h + 2 < n);
      longest = std::max(longest, carries * bytes / rates[index(h)]);
    }
    for (const SlowPair& pair : slow) {
      double carries = part[index(pair.a)] + part[index(pair.b)];
      if (way.algorithm == Algorithm::tree) carries = pair.a == (pair.b - 1) / 2;
      longest = std::max(longest, carries * bytes / pair.bytes_per_second);
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
  double noise(double usual = 0.04) {
    std::normal_distribution<double> normal(1.0, usual);
    return std::max(0.5, normal(random)) * (random() % 40 == 0 ? 3 : 1);
  }

  /// A call as the engine makes it. Returns what it would take without noise, with a measurement
  /// where one is due.
  double call(CollectiveChoice& choice, bool any_order = true) {
    const ReduceVolume volume{bytes, bytes};
    const ReduceWay way = choice.next(volume, any_order).way;
    choice.count(volume);
    choice.observe(way, volume, seconds(way) * noise());
    double took = seconds(way);
    if (choice.measure_due()) took += measure(choice);
    return took;
  }
  /// Token buckets let the first bytes of a flow through at once, its measured ones at the rate of
  /// the link. Returns what it takes.
  double measure(CollectiveChoice& choice) {
    std::vector<LinkProbe> probes;
    double took = 0;
    for (int phase = 0; phase < 6; ++phase) {
      if (phase == 3 && !choice.doubtful(probes)) break;
      double longest = 0;
      for (int to = 0; to < hosts(); ++to) {
        const int from = (to + hosts() - 1 - phase % (hosts() - 1)) % hosts();
        const double rate_here = rate(from, to);
        const auto arrives = [&](double first) { return std::max(0.0, first - burst) / rate_here; };
        const double drained = arrives(kProbeDrain);
        const double all =
            drained + (arrives(kProbeDrain + kProbeBytes) - drained) * noise(probe_noise);
        probes.push_back({from, to, latency, probed_rate(drained, all)});
        longest = std::max(longest, all + latency);
      }
      took += longest;
    }
    choice.measured(probes);
    ++measurements;
    return took;
  }

  /// How much longer than the best calls take, on average.
  double regret(CollectiveChoice& choice, int calls, bool any_order = true) {
    const double best = oracle();
    double all = 0;
    for (int i = 0; i < calls; ++i) all += call(choice, any_order);
    return all / calls / best - 1;
  }
};

std::vector<World> simulated() {
  std::vector<World> all{{.rates = {1e8, 1e8, 1e8, 1e8}},
                         {.rates = {25e6, 1e8, 1e8, 1e8}},
                         {.rates = {1e8, 1e8, 1e8, 25e6}},
                         {.rates = {1e8, 1e8}},
                         {.rates = {3e8, 1e8, 3e8}},
                         {.rates = {5e7, 1e8, 2e8, 1e8, 1e8}},
                         {.rates = {1e8, 1e8, 1e8, 1e8}, .bytes = 1 << 20},
                         {.rates = {1e8, 1e8, 1e8, 25e6}, .tree_overhead = 0.8},
                         {.rates = {1e8, 1e8, 1e8, 1e8}, .ring_overhead = 0.7},
                         {.rates = {1e8, 1e8, 1e8, 1e8}, .slow = {{0, 1, 1e7}}},
                         {.rates = {1e8, 1e8, 1e8, 1e8}, .slow = {{1, 3, 25e6}, {2, 3, 1e7}}},
                         {.rates = {1e8, 5e7, 1e8, 1e8}, .slow = {{0, 2, 1e7}}}};
  std::mt19937 random(kChoiceSeed);
  for (int i = 0; i < 12; ++i) {
    World world{.rates = {}, .random = std::mt19937(random())};
    for (int h = 0; h < 4; ++h) {
      world.rates.push_back(1e7 * static_cast<double>(1 + random() % 12));
    }
    all.push_back(world);
  }
  for (World& world : all) world.level();
  return all;
}

std::string to_string(const World& world) {
  std::string text = "seed " + std::to_string(kChoiceSeed) + ", MB/s";
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
  for (World world : simulated()) {
    const Domains domains = Domains::blocks(world.hosts(), 1);
    CollectiveChoice choice(domains);
    world.measure(choice);
    world.regret(choice, 50);
    EXPECT_LE(world.regret(choice, 128), 0.05) << to_string(world, choice);
  }
}

TEST(CollectiveChoice, KeepsEqualSharesOfEqualLinks) {
  std::mt19937 random(kChoiceSeed);
  for (int i = 0; i < 50; ++i) {
    World world{
        .rates = {1e8, 1e8, 1e8, 1e8}, .probe_noise = 0.08, .random = std::mt19937(random())};
    const Domains domains = Domains::blocks(4, 2);
    CollectiveChoice choice(domains);
    world.measure(choice);
    for (int call = 0; call < 200; ++call) {
      const ReduceVolume volume{world.bytes, world.bytes};
      if (call < 7) {
        EXPECT_TRUE(choice.best(volume, false).way.shares.empty())
            << to_string(world, choice) << ", call " << call;
      }
      world.call(choice, false);
    }
    EXPECT_LE(world.regret(choice, 64, false), 0.05) << to_string(world, choice);
  }
}

TEST(CollectiveChoice, KnowsASlowHostInItsFirstCall) {
  for (int slow = 0; slow < 4; ++slow) {
    World world{.rates = {1e8, 1e8, 1e8, 1e8}, .probe_noise = 0.08};
    world.rates[index(slow)] /= 4;
    const Domains domains = Domains::blocks(4, 1);
    CollectiveChoice choice(domains);
    world.measure(choice);
    const ReduceWay way = choice.next({world.bytes, world.bytes}, false).way;
    ASSERT_EQ(way.shares.size(), 4u) << to_string(world, choice);
    EXPECT_EQ(way.shares[index(slow)], 0);
    EXPECT_LE(world.seconds(way), 1.05 * world.oracle()) << to_string(world, choice);
  }
}

// Which domain owns an element decides what of it is rounded: bits must not follow measured times.
TEST(CollectiveChoice, KeepsEqualSharesOfCodes) {
  World world{.rates = {2.5e7, 1e8, 1e8, 1e8}};
  const Domains domains = Domains::blocks(4, 1);
  CollectiveChoice choice(domains);
  world.measure(choice);
  ReduceVolume volume{world.bytes, world.bytes};
  ASSERT_FALSE(choice.next(volume, false).way.shares.empty());
  volume.coded = true;
  for (int call = 0; call < 200; ++call) {
    ASSERT_TRUE(choice.next(volume, false).way.shares.empty()) << "call " << call;
    choice.count(volume);
  }
}

// A busy machine makes calls slow; measuring finds nothing, so it becomes rare.
TEST(CollectiveChoice, MeasuresRarelyWhereItFindsNothing) {
  World world{.rates = {1e8, 1e8, 1e8, 1e8}};
  const Domains domains = Domains::blocks(4, 1);
  CollectiveChoice choice(domains);
  world.measure(choice);
  const ReduceVolume volume{world.bytes, world.bytes};
  for (int call = 0; call < 640; ++call) {
    choice.count(volume);
    choice.observe({Algorithm::direct, {}}, volume, call % 16 < 8 ? 1 : 3);
    if (choice.measure_due()) world.measure(choice);
  }
  EXPECT_GE(world.measurements, 1 + 640 / 64 / 2);
  EXPECT_LE(world.measurements, 1 + 640 / 24);
}

TEST(CollectiveChoice, TellsTheLastTimeWhereTheWayIsNew) {
  World world{.rates = {1e8, 1e8, 1e8, 1e8}};
  const Domains domains = Domains::blocks(4, 1);
  CollectiveChoice choice(domains);
  world.measure(choice);
  const ReduceVolume volume{world.bytes, world.bytes};
  choice.observe({Algorithm::direct, {}}, volume, 2);
  choice.observe({Algorithm::direct, {}}, volume, 2.4);
  EXPECT_NEAR(choice.observed_s({Algorithm::direct, {}}, volume), 2.1, 1e-9);
  world.rates[2] /= 4;
  world.measure(choice);
  const ReduceWay other = choice.best(volume, false).way;
  EXPECT_EQ(other.shares[2], 0);
  EXPECT_EQ(choice.observed_s(other, volume), 2.4);
  EXPECT_EQ(choice.observed_s(other, {1 << 20, 1 << 20}), 0);
}

TEST(CollectiveChoice, FollowsALinkThatBecomesFourTimesSlower) {
  for (World world : simulated()) {
    for (int slow = 0; slow < world.hosts(); ++slow) {
      World changed = world;
      const Domains domains = Domains::blocks(world.hosts(), 1);
      CollectiveChoice choice(domains);
      changed.measure(choice);
      changed.regret(choice, 100);
      changed.rates[index(slow)] /= 4;
      changed.level();
      changed.regret(choice, 48);
      EXPECT_LE(changed.regret(choice, 64), 0.10)
          << to_string(changed, choice) << ", slower " << slow;
    }
  }
}

TEST(CollectiveChoice, FollowsAPairThatBecomesSlowAndRecovers) {
  World world{.rates = {1e8, 1e8, 1e8, 1e8}};
  const Domains domains = Domains::blocks(4, 1);
  CollectiveChoice choice(domains);
  world.measure(choice);
  world.regret(choice, 100);
  for (const auto& [a, b] : {std::pair(0, 1), std::pair(1, 3)}) {
    world.slow = {{a, b, 1e7}};
    world.regret(choice, 48);
    EXPECT_LE(world.regret(choice, 64), 0.10) << to_string(world, choice);
    ASSERT_EQ(choice.links().slow_pairs().size(), 1u);
    EXPECT_EQ(choice.links().slow_pairs()[0].b, b);
  }
  world.slow = {};
  world.regret(choice, 64);
  EXPECT_LE(world.regret(choice, 64), 0.10) << to_string(world, choice);
  EXPECT_TRUE(choice.links().slow_pairs().empty());
}

TEST(CollectiveChoice, FollowsALinkThatRecovers) {
  World world{.rates = {1e8, 25e6, 1e8, 1e8}};
  const Domains domains = Domains::blocks(4, 1);
  CollectiveChoice choice(domains);
  world.measure(choice);
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

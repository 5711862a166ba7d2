// What `ferry doctor --net` finds odd.
#include "doctor/net.hpp"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>

namespace ferry::cli {
namespace {

/// Hosts with so many ranks each; every link a little different, as measured.
Links usual(int hosts, int each) {
  std::mt19937 random(20261121);
  std::uniform_real_distribution<double> some(0.8, 1.2);
  Links links;
  const int ranks = hosts * each;
  for (int rank = 0; rank < ranks; ++rank) links.domains.push_back(rank / each);
  links.latency_ns.resize(static_cast<std::size_t>(ranks * ranks));
  links.bytes_per_s = links.latency_ns;
  for (int a = 0; a < ranks; ++a) {
    for (int b = 0; b < ranks; ++b) {
      if (a == b) continue;
      const bool inside = a / each == b / each;
      const auto at = static_cast<std::size_t>(a * ranks + b);
      links.bytes_per_s[at] = some(random) * (inside ? 10e9 : 1e9);
      const auto back = static_cast<std::size_t>(b * ranks + a);
      links.latency_ns[at] = b < a ? links.latency_ns[back] : some(random) * (inside ? 1e3 : 20e3);
    }
  }
  return links;
}

void slow(Links& links, int from, int to, double times) {
  links.bytes_per_s[static_cast<std::size_t>(from * links.ranks() + to)] /= times;
}

void late(Links& links, int a, int b, double more_ns) {
  links.latency_ns[static_cast<std::size_t>(a * links.ranks() + b)] += more_ns;
  links.latency_ns[static_cast<std::size_t>(b * links.ranks() + a)] += more_ns;
}

/// The sentences alone.
std::vector<std::string> odd(const Links& links) {
  return to_json(links)["odd"].get<std::vector<std::string>>();
}

using Words = std::vector<std::string>;

void expect_one(const Links& links, const std::string& beginning) {
  const Words found = odd(links);
  ASSERT_EQ(found.size(), 1u) << describe_links(links);
  EXPECT_TRUE(found[0].starts_with(beginning)) << found[0];
  EXPECT_NE(describe_links(links).find(found[0]), std::string::npos);
}

TEST(Net, WhatIsUsualIsNotOdd) {
  for (const int hosts : {1, 2, 3, 4}) {
    for (const int each : {1, 2, 4}) {
      const Links links = usual(hosts, each);
      EXPECT_EQ(odd(links), Words{}) << hosts << " hosts, " << each << " ranks each";
      EXPECT_NE(describe_links(links).find("Nothing odd."), std::string::npos);
    }
  }
}

TEST(Net, TellsWhatRanksHaveTogether) {
  Links links = usual(2, 2);
  EXPECT_EQ(describe_links(links).find("at once"), std::string::npos);
  links.together_bytes_per_s = {4e8, 5e8, 4.5e8, 5e8};
  EXPECT_NE(describe_links(links).find("each rank sends 400.0 MB/s to 500.0 MB/s to other hosts"),
            std::string::npos);
  EXPECT_EQ(to_json(links)["together_bytes_per_s"][2], 4.5e8);
}

TEST(Net, AHostIsNamedBeforeItsRanksAndLinks) {
  Links sends = usual(4, 2), receives = usual(4, 2), both = usual(4, 2);
  for (const int mine : {2, 3}) {
    for (int other = 0; other < 8; ++other) {
      if (other / 2 == 1) continue;
      slow(sends, mine, other, 5);
      slow(receives, other, mine, 5);
      slow(both, mine, other, 5);
      slow(both, other, mine, 5);
    }
  }
  expect_one(sends, "The host of ranks 2 and 3 sends slowly to all others: ");
  expect_one(receives, "The host of ranks 2 and 3 receives slowly from all others: ");
  expect_one(both, "The host of ranks 2 and 3 is slow both ways, ");
}

TEST(Net, ARankIsNamedBeforeItsLinks) {
  Links links = usual(3, 2);
  for (const int other : {0, 1, 2, 3}) slow(links, 5, other, 5);
  expect_one(links, "Rank 5 sends slowly to all others: ");
  Links inside = usual(1, 4);
  for (const int other : {0, 2, 3}) slow(inside, other, 1, 5);
  expect_one(inside, "Rank 1 receives slowly from all others: ");
}

TEST(Net, ALinkMayBeSlowOneWayOrBoth) {
  Links one = usual(4, 1), both = usual(4, 1);
  slow(one, 1, 3, 10);
  slow(both, 1, 3, 10);
  slow(both, 3, 1, 10);
  expect_one(one, "The way from rank 1 to rank 3 is slow: ");
  expect_one(both, "The link between rank 1 and rank 3 is slow both ways: ");
}

TEST(Net, OfTwoHostsOneWayCanBeSlow) {
  Links links = usual(2, 2);
  for (const int from : {0, 1}) {
    for (const int to : {2, 3}) slow(links, from, to, 5);
  }
  expect_one(links, "The way from the host of ranks 0 and 1 to the host of ranks 2 and 3 is slow");
  Links two = usual(2, 1);
  slow(two, 1, 0, 5);
  expect_one(two, "The way from rank 1 to rank 0 is slow: ");
}

TEST(Net, LatencyIsJudgedToo) {
  Links link = usual(4, 1), host = usual(3, 2);
  late(link, 0, 2, 500e3);
  expect_one(link, "A flag between rank 0 and rank 2 takes ");
  for (const int other : {0, 1, 2, 3}) {
    for (const int mine : {4, 5}) late(host, mine, other, 500e3);
  }
  expect_one(host, "A flag between the host of ranks 4 and 5 and all others takes ");
}

TEST(Net, TwoThingsAreTwoSentences) {
  Links links = usual(4, 1);
  slow(links, 1, 3, 10);
  late(links, 0, 2, 500e3);
  EXPECT_EQ(odd(links).size(), 2u) << describe_links(links);
}

TEST(Net, NicsAreToldByRankAndWhy) {
  const std::vector<NicStats> one{{"mlx5_0", "", "shares a PCI switch with the GPU 0000:17:00.0"}};
  const std::vector<NicStats> two{{"eth0", "10.0.0.1", "on NUMA node 0, like this rank's CPUs"},
                                  {"eth1", "10.1.0.1", "of unknown place"}};
  const std::string text = describe_nics({one, two});
  EXPECT_EQ(text,
            "NICs\n"
            "  rank 0: mlx5_0, shares a PCI switch with the GPU 0000:17:00.0\n"
            "  rank 1: eth0 (10.0.0.1), on NUMA node 0, like this rank's CPUs\n"
            "  rank 1: eth1 (10.1.0.1), of unknown place\n");
  EXPECT_EQ(describe_nics({{}, {}}), "");
  EXPECT_EQ(nics_from(to_json(two)), two);
  EXPECT_THROW(nics_from(nlohmann::json::parse("[{}]")), nlohmann::json::exception);
}

}  // namespace
}  // namespace ferry::cli

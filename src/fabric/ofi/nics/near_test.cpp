// Which NICs a rank uses, on machines that are made up.
#include "fabric/ofi/nics/near.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "fabric/ofi/nics/sysfs.hpp"

namespace ferry::fabric::ofi {
namespace {

using Indices = std::vector<std::size_t>;

/// A device behind switch `unit` of node `node`; a host bridge for each switch.
Place device_at(int node, int unit, const std::string& address) {
  const std::string bus = std::to_string(unit);
  return {{"pci0000:" + bus + "0", "0000:" + bus + "0:01.0", address}, node};
}

const NodeDistances kTwoNodes{{10, 21}, {21, 10}};

/// What every rank of one machine uses. As `exchange_handshakes` does it: ranks with the same
/// nearest NICs share.
std::vector<Indices> use_of(const std::vector<Place>& nics, const std::vector<RankPlace>& ranks,
                            std::size_t count = 0, std::size_t most = 8) {
  std::vector<std::vector<Distance>> distances;
  for (const RankPlace& rank : ranks) {
    distances.emplace_back();
    for (const Place& nic : nics) distances.back().push_back(distance(nic, rank, kTwoNodes));
  }
  std::vector<Indices> all;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    Share share{0, 0};
    for (std::size_t other = 0; other < ranks.size(); ++other) {
      if (nearest(distances[other]) != nearest(distances[r])) continue;
      share.index += other < r ? 1 : 0;
      ++share.ranks;
    }
    all.push_back(choose_nics(distances[r], share, count, most));
  }
  return all;
}

/// How many ranks use each NIC.
std::vector<int> loads(const std::vector<Indices>& use, std::size_t nics) {
  std::vector<int> all(nics);
  for (const Indices& of_rank : use) {
    EXPECT_EQ(std::set<std::size_t>(of_rank.begin(), of_rank.end()).size(), of_rank.size());
    for (const std::size_t nic : of_rank) ++all[nic];
  }
  return all;
}

TEST(NearNics, OneNicIsForAll) {
  for (const int node : {-1, 0, 1}) {
    const Place nic{{}, node};
    EXPECT_EQ(use_of({nic}, {4, RankPlace{{}, {0}}}), std::vector<Indices>(4, {0}));
    EXPECT_EQ(use_of({nic}, {2, RankPlace{}}, 3), std::vector<Indices>(2, {0}));
  }
}

TEST(NearNics, EightGpusAndEightNicsEachItsOwn) {
  std::vector<Place> nics;
  std::vector<RankPlace> ranks;
  for (int unit = 0; unit < 8; ++unit) {
    nics.push_back(device_at(unit / 4, unit, "0000:" + std::to_string(unit) + "2:00.0"));
    ranks.push_back({device_at(unit / 4, unit, "0000:" + std::to_string(unit) + "3:00.0"), {0, 1}});
  }
  // Whatever order the kernel numbered them in.
  const std::vector<std::size_t> order{3, 6, 0, 5, 7, 1, 4, 2};
  std::vector<Place> mixed;
  for (const std::size_t i : order) mixed.push_back(nics[i]);
  const auto use = use_of(mixed, ranks);
  for (std::size_t rank = 0; rank < 8; ++rank) {
    ASSERT_EQ(use[rank].size(), 1u);
    EXPECT_EQ(order[use[rank][0]], rank);
  }
  // Two each: its own, then one of the same node.
  for (std::size_t rank = 0; rank < 8; ++rank) {
    const Indices two = use_of(mixed, ranks, 2)[rank];
    ASSERT_EQ(two.size(), 2u);
    EXPECT_EQ(order[two[0]], rank);
    EXPECT_EQ(mixed[two[1]].node, ranks[rank].gpu->node);
  }
}

TEST(NearNics, GpusThatShareASwitchShareItsNics) {
  const std::vector<Place> nics{device_at(0, 1, "0000:12:00.0"), device_at(0, 1, "0000:13:00.0"),
                                device_at(0, 2, "0000:22:00.0"), device_at(0, 2, "0000:23:00.0")};
  std::vector<RankPlace> ranks;
  for (const int unit : {1, 1, 2, 2}) {
    ranks.push_back({device_at(0, unit, "0000:" + std::to_string(unit) + "5:00.0"), {}});
  }
  EXPECT_EQ(use_of(nics, ranks), (std::vector<Indices>{{0}, {1}, {2}, {3}}));
  // One rank alone takes both of its switch, none of the other.
  EXPECT_EQ(use_of(nics, {ranks[2]}), (std::vector<Indices>{{2, 3}}));
}

TEST(NearNics, TwoSocketsWithANicEach) {
  const std::vector<Place> nics{device_at(1, 8, "0000:82:00.0"), device_at(0, 1, "0000:12:00.0")};
  const RankPlace zero{{}, {0}}, one{{}, {1}}, both{{}, {0, 1}};
  EXPECT_EQ(use_of(nics, {zero, zero, one, one}), (std::vector<Indices>{{1}, {1}, {0}, {0}}));
  // Ranks that run anywhere are as near to both: one alone has both, four share them out.
  EXPECT_EQ(use_of(nics, {both}), (std::vector<Indices>{{0, 1}}));
  EXPECT_EQ(loads(use_of(nics, {4, both}), 2), (std::vector<int>{2, 2}));
  EXPECT_EQ(use_of(nics, {zero, one}, 2), (std::vector<Indices>{{1, 0}, {0, 1}}));
  EXPECT_EQ(use_of(nics, {both}, 0, 1), (std::vector<Indices>{{0}}));
}

TEST(NearNics, OfUnknownPlaceIsBetterThanFar) {
  const Place here = device_at(0, 1, "0000:12:00.0"), far = device_at(1, 8, "0000:82:00.0");
  const RankPlace rank{{}, {0}};
  EXPECT_EQ(use_of({Place{}, far}, {rank}), (std::vector<Indices>{{0}}));
  EXPECT_EQ(use_of({Place{}, far, here}, {rank}), (std::vector<Indices>{{2}}));
  EXPECT_EQ(use_of({Place{}, far, here}, {rank}, 3), (std::vector<Indices>{{2, 0, 1}}));
  EXPECT_EQ(use_of({Place{}, Place{}}, {rank}), (std::vector<Indices>{{0, 1}}));
  EXPECT_EQ(use_of({here, far}, {RankPlace{}}), (std::vector<Indices>{{0, 1}}));
  // A GPU whose place is unknown: by the CPUs.
  EXPECT_EQ(use_of({far, here}, {RankPlace{Place{}, {0}}}), (std::vector<Indices>{{1}}));
  EXPECT_TRUE(use_of({}, {rank})[0].empty());
}

TEST(NearNics, RanksThatShareSpreadEvenly) {
  for (std::size_t nics = 1; nics <= 9; ++nics) {
    for (std::size_t ranks = 1; ranks <= 17; ++ranks) {
      for (std::size_t count = 0; count <= 3; ++count) {
        const std::vector<Place> all(nics);
        const auto use = use_of(all, std::vector<RankPlace>(ranks), count);
        std::size_t fewest = nics, most = 0;
        for (const Indices& of_rank : use) {
          fewest = std::min(fewest, of_rank.size());
          most = std::max(most, of_rank.size());
        }
        const std::vector<int> load = loads(use, nics);
        const auto [low, high] = std::minmax_element(load.begin(), load.end());
        EXPECT_GE(fewest, 1u);
        EXPECT_LE(most, count == 0 ? 8u : count);
        EXPECT_LE(most - fewest, 1u) << nics << " NICs, " << ranks << " ranks";
        if (nics <= 8 || ranks > 1) {
          EXPECT_LE(*high - *low, 1) << nics << " NICs, " << ranks << " ranks, " << count;
        }
      }
    }
  }
}

TEST(NearNics, NearnessSaysWhy) {
  const RankPlace gpu{device_at(0, 1, "0000:15:00.0"), {0, 1}};
  const auto words = [&](const Place& nic, const RankPlace& rank) {
    return describe(distance(nic, rank, kTwoNodes), nic, rank);
  };
  EXPECT_EQ(words(device_at(0, 1, "0000:12:00.0"), gpu),
            "shares a PCI switch with the GPU 0000:15:00.0");
  EXPECT_EQ(words({{"pci0000:10", "0000:10:02.0"}, 0}, gpu),
            "shares a host bridge with the GPU 0000:15:00.0");
  EXPECT_EQ(words(device_at(0, 3, "0000:32:00.0"), gpu),
            "on NUMA node 0, like the GPU 0000:15:00.0");
  EXPECT_EQ(words(device_at(1, 3, "0000:32:00.0"), gpu),
            "on NUMA node 1, unlike the GPU 0000:15:00.0");
  EXPECT_EQ(words(device_at(1, 3, "0000:32:00.0"), {{}, {1}}),
            "on NUMA node 1, like this rank's CPUs");
  EXPECT_EQ(words({}, gpu), "of unknown place");
}

using Pairs = std::vector<NicPair>;

Pairs pairs(int a, const std::vector<std::string>& of_a, int b,
            const std::vector<std::string>& of_b) {
  const Pairs there = pair_nics({a, of_a}, {b, of_b});
  Pairs back = pair_nics({b, of_b}, {a, of_a});
  for (NicPair& pair : back) std::swap(pair.mine, pair.theirs);
  EXPECT_EQ(there, back);  // both ranks must find the same
  return there;
}

TEST(NicPairs, NicsOfOneNetworkMeet) {
  EXPECT_EQ(pairs(0, {"a", "b"}, 1, {"a", "b"}), (Pairs{{0, 0}, {1, 1}}));
  EXPECT_EQ(pairs(0, {"a", "b"}, 1, {"b", "a"}), (Pairs{{0, 1}, {1, 0}}));
  EXPECT_EQ(pairs(0, {"a", "b"}, 1, {"b"}), (Pairs{{1, 0}}));
  EXPECT_EQ(pairs(0, {"a", "b"}, 1, {"c", "b"}), (Pairs{{1, 1}}));
  EXPECT_EQ(pairs(0, {"a"}, 1, {"b", "c"}).size(), 1u);  // by a router
  EXPECT_EQ(pairs(0, {"a", "b"}, 1, {"c", "d"}), (Pairs{{0, 0}, {1, 1}}));
  EXPECT_EQ(pairs(0, {"a", "a", "b"}, 1, {"a", "b", "a"}), (Pairs{{0, 0}, {1, 2}, {2, 1}}));
}

TEST(NicPairs, RanksWithOneNicUseDifferentOnesOfTheOther) {
  const std::vector<std::string> three(3, "net"), one(1, "net");
  std::map<std::size_t, int> used;
  for (int peer = 1; peer <= 6; ++peer) {
    const Pairs all = pairs(0, three, peer, one);
    ASSERT_EQ(all.size(), 1u);
    ++used[all[0].mine];
  }
  EXPECT_EQ(used, (std::map<std::size_t, int>{{0, 2}, {1, 2}, {2, 2}}));
}

/// A folder that looks like /sys.
class MadeUpSysfs : public ::testing::Test {
 protected:
  MadeUpSysfs() {
    for (const int node : {0, 1}) {
      const std::string folder = "devices/system/node/node" + std::to_string(node);
      write(folder + "/cpulist", node == 0 ? "0-1,8-9" : "2-3,10");
      write(folder + "/distance", node == 0 ? "10 21" : "21 10");
    }
    device("pci0000:16/0000:16:01.0/0000:17:00.0", "0");
    device("pci0000:80/0000:80:02.0", "1");
    device("pci0000:80/0000:80:03.0", "-1");
    link("class/net/eth0/device", "devices/pci0000:16/0000:16:01.0/0000:17:00.0");
    std::filesystem::create_directories(root_ / "devices/pci0000:80/0000:80:02.0/virtio3");
    link("class/net/eth1/device", "devices/pci0000:80/0000:80:02.0/virtio3");
    link("class/infiniband/mlx5_0/device", "devices/pci0000:80/0000:80:03.0");
    std::filesystem::create_directories(root_ / "class/net/veth0");
  }
  ~MadeUpSysfs() override { std::filesystem::remove_all(root_); }

  void write(const std::string& file, const std::string& text) {
    std::filesystem::create_directories((root_ / file).parent_path());
    std::ofstream(root_ / file) << text << "\n";
  }
  void link(const std::string& from, const std::string& to) {
    std::filesystem::create_directories((root_ / from).parent_path());
    std::filesystem::create_symlink(root_ / to, root_ / from);
  }
  void device(const std::string& way, const std::string& node) {
    write("devices/" + way + "/numa_node", node);
    link("bus/pci/devices/" + std::filesystem::path(way).filename().string(), "devices/" + way);
  }

  std::filesystem::path root_ =
      std::filesystem::temp_directory_path() / ("ferry-sysfs-" + std::to_string(getpid()));
  Sysfs sysfs_{root_};
};

TEST_F(MadeUpSysfs, TellsPlaces) {
  const Place eth0 = sysfs_.nic("eth0");
  EXPECT_EQ(eth0.way, (std::vector<std::string>{"pci0000:16", "0000:16:01.0", "0000:17:00.0"}));
  EXPECT_EQ(eth0.node, 0);
  // A virtual device is where its PCI device is.
  EXPECT_EQ(sysfs_.nic("eth1").way, (std::vector<std::string>{"pci0000:80", "0000:80:02.0"}));
  EXPECT_EQ(sysfs_.nic("eth1").node, 1);
  EXPECT_EQ(sysfs_.nic("mlx5_0").way.back(), "0000:80:03.0");
  EXPECT_EQ(sysfs_.nic("mlx5_0").node, -1);
  EXPECT_EQ(sysfs_.pci_device("0000:17:00.0").way, eth0.way);
  EXPECT_EQ(sysfs_.pci_device("00000000:17:00.0").way, eth0.way);
  for (const char* name : {"veth0", "nothing", "", "../net/eth0"}) {
    EXPECT_TRUE(sysfs_.nic(name).way.empty()) << name;
    EXPECT_TRUE(sysfs_.pci_device(name).way.empty()) << name;
  }
}

TEST_F(MadeUpSysfs, TellsNodes) {
  EXPECT_EQ(sysfs_.node_distances(), (NodeDistances{{10, 21}, {21, 10}}));
  EXPECT_EQ(sysfs_.nodes_of(std::vector{3, 10}), (std::vector{1}));
  EXPECT_EQ(sysfs_.nodes_of(std::vector{9, 2}), (std::vector{0, 1}));
  EXPECT_TRUE(sysfs_.nodes_of(std::vector{99}).empty());
  const Sysfs nothing(root_ / "nothing");
  EXPECT_TRUE(nothing.node_distances().empty());
  EXPECT_TRUE(nothing.nodes_of(std::vector{0}).empty());
  EXPECT_TRUE(nothing.nic("eth0").way.empty());
}

TEST_F(MadeUpSysfs, MachinesOfOneNodeNeedNotSayIt) {
  std::filesystem::remove_all(root_ / "devices/system/node/node1");
  EXPECT_EQ(sysfs_.nic("mlx5_0").node, 0);
}

TEST(Sysfs, ThisThreadMayRunSomewhere) {
  EXPECT_FALSE(allowed_cpus().empty());
}

}  // namespace
}  // namespace ferry::fabric::ofi

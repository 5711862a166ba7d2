#include "fabric/ofi/nics/near.hpp"

#include <algorithm>
#include <utility>

namespace ferry::fabric::ofi {
namespace {

constexpr int kOtherNode = 20;  // where firmware tells no distance

/// Of two different nodes.
int node_distance(const NodeDistances& nodes, int a, int b) {
  const auto row = static_cast<std::size_t>(a), column = static_cast<std::size_t>(b);
  return row < nodes.size() && column < nodes[row].size() ? nodes[row][column] : kOtherNode;
}

std::vector<int> nodes_of(const RankPlace& rank) {
  std::vector<int> nodes = rank.nodes;
  if (rank.gpu && rank.gpu->node >= 0) nodes = {rank.gpu->node};
  return nodes;
}

Distance by_node(const Place& nic, const RankPlace& rank, const NodeDistances& nodes) {
  const std::vector<int> near = nodes_of(rank);
  if (nic.node < 0 || near.empty()) return {Nearness::unknown, 0};
  if (std::find(near.begin(), near.end(), nic.node) != near.end()) return {Nearness::node, 0};
  int least = node_distance(nodes, nic.node, near.front());
  for (const int node : near) least = std::min(least, node_distance(nodes, nic.node, node));
  return {Nearness::other_node, least};
}

/// Positions of `networks` that have this name.
std::vector<std::size_t> of_network(std::span<const std::string> networks,
                                    const std::string& name) {
  std::vector<std::size_t> found;
  for (std::size_t i = 0; i < networks.size(); ++i) {
    if (networks[i] == name) found.push_back(i);
  }
  return found;
}

/// As many pairs as the shorter list is long. The longer one begins where the other rank says.
void add_pairs(std::vector<NicPair>& pairs, const std::vector<std::size_t>& mine, int my_rank,
               const std::vector<std::size_t>& theirs, int their_rank) {
  const std::size_t count = std::min(mine.size(), theirs.size());
  const auto start = [count](const std::vector<std::size_t>& list, int other) {
    return list.size() > count ? static_cast<std::size_t>(other) % list.size() : 0;
  };
  const std::size_t a = start(mine, their_rank), b = start(theirs, my_rank);
  for (std::size_t i = 0; i < count; ++i) {
    pairs.push_back({mine[(a + i) % mine.size()], theirs[(b + i) % theirs.size()]});
  }
}

std::vector<std::size_t> all_of(std::span<const std::string> networks) {
  std::vector<std::size_t> all(networks.size());
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = i;
  return all;
}

}  // namespace

Distance distance(const Place& nic, const RankPlace& rank, const NodeDistances& nodes) {
  if (!rank.gpu || rank.gpu->way.empty() || nic.way.empty()) return by_node(nic, rank, nodes);
  const auto& a = nic.way;
  const auto& b = rank.gpu->way;
  const auto parts = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
  const auto common = parts.first - a.begin();
  if (common == 0) return by_node(nic, rank, nodes);
  if (common == 1) return {Nearness::host_bridge, 0};
  return {Nearness::pci_switch,
          static_cast<int>((a.end() - parts.first) + (b.end() - parts.second))};
}

std::string describe(const Distance& distance, const Place& nic, const RankPlace& rank) {
  const std::string who =
      rank.gpu && !rank.gpu->way.empty() ? "the GPU " + rank.gpu->way.back() : "this rank's CPUs";
  const std::string node = "on NUMA node " + std::to_string(nic.node);
  switch (distance.nearness) {
    case Nearness::pci_switch: return "shares a PCI switch with " + who;
    case Nearness::host_bridge: return "shares a host bridge with " + who;
    case Nearness::node: return node + ", like " + who;
    case Nearness::unknown: break;
    case Nearness::other_node: return node + ", unlike " + who;
  }
  return "of unknown place";
}

std::vector<std::size_t> nearest(std::span<const Distance> distances) {
  std::vector<std::size_t> found;
  if (distances.empty()) return found;
  const Distance least = *std::min_element(distances.begin(), distances.end());
  for (std::size_t i = 0; i < distances.size(); ++i) {
    if (distances[i] == least) found.push_back(i);
  }
  return found;
}

std::vector<std::size_t> choose_nics(std::span<const Distance> distances, const Share& share,
                                     std::size_t count, std::size_t most) {
  std::vector<std::size_t> near = nearest(distances);
  if (near.empty()) return near;
  if (count == 0) {
    // Parts of a list of NICs: none in two of them while there are enough for all.
    const std::size_t first = share.index * near.size() / share.ranks;
    const std::size_t end = (share.index + 1) * near.size() / share.ranks;
    count = std::max<std::size_t>(1, end - first);
    std::rotate(near.begin(), near.begin() + static_cast<std::ptrdiff_t>(first), near.end());
  } else {
    const std::size_t first = share.index * count % near.size();
    std::rotate(near.begin(), near.begin() + static_cast<std::ptrdiff_t>(first), near.end());
    std::vector<std::size_t> rest;
    for (std::size_t i = 0; i < distances.size(); ++i) {
      if (std::find(near.begin(), near.end(), i) == near.end()) rest.push_back(i);
    }
    std::stable_sort(rest.begin(), rest.end(),
                     [&](std::size_t a, std::size_t b) { return distances[a] < distances[b]; });
    near.insert(near.end(), rest.begin(), rest.end());
  }
  near.resize(std::min({near.size(), count, most}));
  return near;
}

std::vector<NicPair> pair_nics(const Side& mine, const Side& theirs) {
  if (mine.rank > theirs.rank) {
    std::vector<NicPair> pairs = pair_nics(theirs, mine);
    for (NicPair& pair : pairs) std::swap(pair.mine, pair.theirs);
    return pairs;
  }
  std::vector<NicPair> pairs;
  for (std::size_t i = 0; i < mine.networks.size(); ++i) {
    const auto here = of_network(mine.networks, mine.networks[i]);
    if (here.front() != i) continue;  // a network that was looked at
    add_pairs(pairs, here, mine.rank, of_network(theirs.networks, mine.networks[i]), theirs.rank);
  }
  if (pairs.empty()) {
    add_pairs(pairs, all_of(mine.networks), mine.rank, all_of(theirs.networks), theirs.rank);
  }
  return pairs;
}

}  // namespace ferry::fabric::ofi

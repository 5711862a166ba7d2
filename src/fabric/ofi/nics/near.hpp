// Which NICs a rank uses, and which of them meet those of a peer. Pure: what it is told of the
// machine (sysfs.hpp), of NICs and of ranks is all that it knows.
#pragma once
#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace ferry::fabric::ofi {

/// Where a PCI device is. What is unknown stays as it is here.
struct Place {
  /// From the host bridge down to the device: {"pci0000:16", "0000:16:01.0", "0000:17:00.0"}.
  std::vector<std::string> way{};
  int node = -1;  ///< NUMA
};

/// Where a rank is: by its GPU if it has one, else by the CPUs that it may run on.
struct RankPlace {
  std::optional<Place> gpu{};
  std::vector<int> nodes{};  ///< NUMA nodes of the CPUs; empty: unknown
};

/// [nodes][nodes], as firmware tells it: 10 inside a node, more between two.
using NodeDistances = std::vector<std::vector<int>>;

/// How near a NIC is to a rank, the nearest first. Of unknown place is better than known to be far.
enum class Nearness : std::uint8_t { pci_switch, host_bridge, node, unknown, other_node };

struct Distance {
  Nearness nearness = Nearness::unknown;
  int more = 0;  ///< below a switch: steps between the two; on another node: its distance
  friend auto operator<=>(const Distance&, const Distance&) = default;
};

Distance distance(const Place& nic, const RankPlace& rank, const NodeDistances& nodes);

/// "shares a PCI switch with the GPU 0000:17:00.0", "on NUMA node 0, like this rank's CPUs".
std::string describe(const Distance& distance, const Place& nic, const RankPlace& rank);

/// The indices of the least distances.
std::vector<std::size_t> nearest(std::span<const Distance> distances);

/// Of the ranks of a machine that have the same nearest NICs: which one this is.
struct Share {
  std::size_t index = 0;
  std::size_t ranks = 1;
};

/// Indices of the NICs that a rank uses, at most `most`. `count` 0: its part of the nearest ones,
/// one at least, so that ranks that share them take as many each, and none of another's while there
/// are enough. Otherwise so many, nearest first, and ranks that share them begin at different ones.
std::vector<std::size_t> choose_nics(std::span<const Distance> distances, const Share& share,
                                     std::size_t count, std::size_t most);

/// A rank as its peers see it: the networks of its NICs.
struct Side {
  int rank = 0;
  std::span<const std::string> networks{};
};
/// NIC `mine` of this rank and NIC `theirs` of the peer carry what goes between the two.
struct NicPair {
  std::size_t mine = 0;
  std::size_t theirs = 0;
  friend bool operator==(const NicPair&, const NicPair&) = default;
};

/// Each NIC at most once; both ranks find the same pairs in the same order. NICs of one network
/// meet; if the two ranks have none in common, routers are taken to join all. Of whom has more NICs
/// than the other uses, ranks use different ones.
std::vector<NicPair> pair_nics(const Side& mine, const Side& theirs);

}  // namespace ferry::fabric::ofi

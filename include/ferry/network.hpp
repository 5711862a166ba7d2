// Groups whose ranks are in several domains, joined by a network.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ferry {

/// How tokens cross from one domain to another. Within one domain it makes no difference.
enum class Crossing : std::uint8_t {
  automatic,     ///< by a cost model, alike on all ranks (docs/design/domains_network.md)
  direct,        ///< one copy of a token for each destination rank
  hierarchical,  ///< one copy for each destination domain, to the rank on the same rail, which
                 ///< spreads it inside; sums inside a domain come back as one row
};

/// "automatic", "direct", "hierarchical".
constexpr std::string_view name_of(Crossing crossing) {
  switch (crossing) {
    case Crossing::automatic: return "automatic";
    case Crossing::direct: return "direct";
    case Crossing::hierarchical: return "hierarchical";
  }
  return "unknown";
}

/// Of one rank, on all its NICs together.
inline constexpr int kMaxOfiEndpoints = 8;

/// How a rank uses libfabric. `provider` and `endpoints` must be the same on all ranks.
struct OfiOptions {
  /// As `fi_info` names it ("net", "tcp;ofi_rxm", "verbs;ofi_rxm", "efa", "cxi"); empty:
  /// FERRY_OFI_PROVIDER, or the first that offers what Ferry needs, RDMA before TCP.
  std::string provider{};
  /// The address, name or interface at which this rank listens and its peers reach it; never all
  /// interfaces. Empty: FERRY_HOST, or Bootstrap::own_address, or loopback.
  std::string host{};
  /// Endpoints (queue pairs) of a rank on each of its NICs, 1 … kMaxOfiEndpoints: the group's own
  /// traffic is on the first, latency exchanges take turns on the others. 0: FERRY_OFI_ENDPOINTS,
  /// or 1.
  int endpoints = 0;
  /// The NICs that this rank may use, with commas between: interfaces ("eth0"), addresses, or
  /// domains as `fi_info` names them ("mlx5_0"); "all": what the provider has but loopback. They
  /// replace `host`. Empty: FERRY_OFI_NICS, or for TCP what has the address of `host`, for other
  /// providers all, unless `host` is one of them.
  std::string nics{};
  /// How many of them it uses, nearest first, and stripes large transfers over; times `endpoints`
  /// at most kMaxOfiEndpoints. 0: FERRY_OFI_NICS_PER_RANK, or its part of those that are nearest
  /// (to its GPU, or to the CPUs that it may run on), which it shares with the ranks of its machine
  /// that have the same ones.
  int nics_per_rank = 0;
  /// "best_effort", "low_latency", "dedicated_access", "bulk_data", "scavenger" or "network_ctrl",
  /// which the provider maps to a service level, or ignores. Where there are several endpoints
  /// those of latency exchanges ask for low latency. Empty: FERRY_OFI_TRAFFIC_CLASS, or none.
  std::string traffic_class{};
};

/// `options`, with what they leave open taken from the environment. Throws Error(invalid_argument)
/// naming a variable that is wrong.
OfiOptions with_environment(OfiOptions options);

/// What a rank has sent to ranks of other domains since its group was made.
struct NetworkStats {
  std::uint64_t put_bytes = 0;  ///< rows and what travels beside them, and messages of calls
  std::uint64_t puts = 0;       ///< writes that carried them
  std::uint64_t signals = 0;    ///< 8-byte flags, which are not in `put_bytes`
  friend bool operator==(const NetworkStats&, const NetworkStats&) = default;
};
using NetworkUse [[deprecated("now NetworkStats")]] = NetworkStats;

/// A NIC of this rank, and what it has carried.
struct NicStats {
  std::string name{};       ///< "eth0", "mlx5_0"
  std::string address{};    ///< in numbers; empty where the provider has addresses of its own
  std::string why{};        ///< what it was chosen for: where it is, as seen from this rank
  std::uint64_t bytes = 0;  ///< of rows and what travels beside them, sent since the group was made
  friend bool operator==(const NicStats&, const NicStats&) = default;
};
using NicUse [[deprecated("now NicStats")]] = NicStats;

}  // namespace ferry

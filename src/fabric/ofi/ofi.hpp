// The fabric between hosts: libfabric, whatever network it finds.
#pragma once
#include <chrono>
#include <ferry/bootstrap.hpp>
#include <memory>
#include <string>

#include "fabric/fabric.hpp"

namespace ferry::fabric {

inline constexpr int kMaxOfiEndpoints = 8;

/// How a rank uses the network. `provider` and `endpoints` must be the same on all ranks.
struct OfiOptions {
  /// As `fi_info -l` and `fi_info` name it ("net", "tcp;ofi_rxm", "verbs;ofi_rxm", "efa", "cxi");
  /// empty: the first that offers what Ferry needs, RDMA before TCP.
  std::string provider{};
  /// The address or interface name at which this rank can be reached and listens; empty: loopback.
  std::string host{};
  /// Endpoints (queue pairs) of a rank, 1 to kMaxOfiEndpoints. The group's own traffic is on the
  /// first; latency exchanges take turns on the others.
  int endpoints = 1;
  /// Traffic class of all endpoints but, if there are several, those of latency exchanges, which
  /// ask for low latency: "", "best_effort", "low_latency", "dedicated_access", "bulk_data",
  /// "scavenger", "network_ctrl". Providers map it to service levels, or ignore it.
  std::string traffic_class{};
};

/// Whether this build has it (the headers of libfabric were there); the machine may lack the
/// library all the same.
bool ofi_is_built() noexcept;

/// Collective. No peer pointers: puts are one-sided writes, counted where they land. A thread of
/// each endpoint makes progress as long as the fabric lives, so a rank that computes still
/// receives.
///
/// `deadline` bounds creation, and later how long a peer may take no data: then it counts as dead
/// and what goes to it is dropped, for a put cannot wait for ever. Throws Error(unsupported) where
/// libfabric or the provider is missing, on all ranks when on one; Error(mismatch) when ranks use
/// different providers or numbers of endpoints; Error(invalid_argument) for options, or for a host
/// at loopback while another rank is on another host; or what the bootstrap throws.
std::unique_ptr<Fabric> make_ofi_fabric(Bootstrap& bootstrap, const OfiOptions& options,
                                        std::chrono::nanoseconds deadline,
                                        const OnWait& on_wait = {});

}  // namespace ferry::fabric

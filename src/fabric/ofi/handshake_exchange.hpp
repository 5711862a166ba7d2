// What the ranks of an ofi fabric agree on by handshakes: which NICs each takes, and who talks to
// whom by which.
#pragma once
#include <chrono>
#include <ferry/bootstrap.hpp>
#include <ferry/network.hpp>
#include <memory>
#include <string>
#include <vector>

#include "fabric/ofi/endpoint_set.hpp"
#include "fabric/segment_handle.hpp"

namespace ferry::fabric::ofi {

struct HandshakeResult {
  JobKey key{};
  std::vector<std::unique_ptr<EndpointSet>>
      endpoint_sets{};  ///< by endpoint of each NIC; they have begun
  std::vector<NicStats> nics{};
  bool cores = false;  ///< every rank of this machine has one
};

/// What make_ofi_fabric says (ofi.hpp).
HandshakeResult exchange_handshakes(Bootstrap& bootstrap, const OfiOptions& options,
                                    const std::string& gpu, std::chrono::nanoseconds deadline,
                                    const OnWait& on_wait);

}  // namespace ferry::fabric::ofi

// What the ranks of an ofi fabric agree on by handshakes: which NICs each takes, and who talks to
// whom by which.
#pragma once
#include <chrono>
#include <ferry/bootstrap.hpp>
#include <ferry/network.hpp>
#include <memory>
#include <string>
#include <vector>

#include "fabric/ofi/card.hpp"
#include "fabric/ofi/endpoint_set.hpp"
#include "fabric/ofi/handshake.hpp"
#include "fabric/segment_handle.hpp"

namespace ferry::fabric::ofi {

struct HandshakeResult {
  JobKey key{};
  std::vector<std::unique_ptr<EndpointSet>>
      endpoint_sets{};  ///< by endpoint of each NIC; they have begun
  std::vector<NicStats> nics{};
  bool cores = false;                   ///< every rank of this machine has one
  Handshake own{};                      ///< what this rank has said
  int local = 1;                        ///< ranks of this machine
  std::vector<fabric::Place> places{};  ///< by rank
};

/// What make_ofi_fabric says (ofi.hpp).
HandshakeResult exchange_handshakes(Bootstrap& bootstrap, const OfiOptions& options,
                                    const std::string& gpu, std::chrono::nanoseconds deadline,
                                    const OnWait& on_wait);

/// Of a process that joins, with what a rank of its machine has shown: it talks to nobody yet.
HandshakeResult join_handshakes(int rank, int size, const OfiOptions& options,
                                const Invitation& invitation, std::chrono::nanoseconds deadline);

fabric::Place place_of(const Handshake& handshake);

/// Whom endpoint `endpoint` of each NIC of a rank talks to, by what both have said.
std::vector<Partner> partners_of(int rank, const Handshake& mine, int peer, const Handshake& theirs,
                                 std::size_t endpoint);

}  // namespace ferry::fabric::ofi

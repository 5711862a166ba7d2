// What ranks tell each other when an ofi fabric is created.
#pragma once
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "fabric/segment_handle.hpp"

namespace ferry::fabric::ofi {

struct Greeting {
  JobKey key{};                                 ///< rank 0's is the job's; the others send zeros
  std::string problem{};                        ///< why this rank has no endpoint; empty: it has
  std::string provider{};                       ///< the same on all ranks
  std::string boot_id{};                        ///< which kernel it runs on
  std::string address{};                        ///< at which it listens
  std::vector<std::vector<std::byte>> names{};  ///< of its endpoints
};

std::vector<std::byte> to_bytes(const Greeting& greeting);
/// Throws Error(mismatch) naming `rank` and `peer`, whose bytes these are.
Greeting greeting_from(std::span<const std::byte> bytes, int rank, int peer);

/// Throws, on every rank alike, unless all have an endpoint, of the same provider, as many, that
/// the others can reach.
void check_greetings(const std::vector<Greeting>& greetings, int rank);

}  // namespace ferry::fabric::ofi

// The fabric of a group whose ranks are in several domains.
#pragma once
#include <memory>

#include "core/domains.hpp"
#include "fabric/fabric.hpp"

namespace ferry::fabric {

/// Ranks of this rank's domain are reached by `inside`, the others by `network`: no pointer crosses
/// the line. Both number the ranks as the group does, and neither has registered anything yet.
/// Memory is registered by `inside` and shared with `network`.
///
/// No network: the others are reached by copies through `inside`, which must reach all ranks, but
/// without pointers, as if there were one: virtual domains on one host.
std::unique_ptr<Fabric> make_domain_fabric(const Domains& domains, std::unique_ptr<Fabric> inside,
                                           std::unique_ptr<Fabric> network = nullptr);

}  // namespace ferry::fabric

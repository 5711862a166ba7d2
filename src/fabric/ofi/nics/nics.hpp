// The NICs of this machine that a rank may use, and those that it does.
#pragma once
#include <ferry/network.hpp>
#include <string>
#include <vector>

#include "fabric/ofi/library.hpp"
#include "fabric/ofi/nics/near.hpp"
#include "fabric/ofi/nics/provider.hpp"
#include "fabric/ofi/nics/sysfs.hpp"

namespace ferry::fabric::ofi {

struct Nic {
  std::string name{};     ///< "eth0", "mlx5_0"
  std::string address{};  ///< at which it listens, in numbers; empty: of the provider's own kind
  std::string network{};  ///< those with the same name reach each other
  Place place{};
  Info info{};
  /// Tells it apart from the others of its machine.
  std::string id() const { return name + " " + address; }
};

/// All NICs of the first provider that has what the options ask for, near or not. `own_address`: of
/// this rank where they name none. Throws Error(unsupported), saying what was tried, or
/// Error(invalid_argument) for options.
std::vector<Nic> find_nics(const Library& library, int rank, const OfiOptions& options,
                           const std::string& own_address, const Sysfs& sysfs);
/// The first of them.
Info find_provider(const Library& library, int rank, const OfiOptions& options);
/// The same NIC as endpoints of latency exchanges ask for it.
Info for_latency(const Library& library, const Nic& nic);

}  // namespace ferry::fabric::ofi

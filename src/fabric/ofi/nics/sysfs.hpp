// What the kernel tells in /sys of where devices and CPUs are. hwloc reads the same files on Linux,
// and loads its plugins (Debian's: OpenCL, GL with X11) into the caller's process; opened for this
// library alone (RTLD_LOCAL), they do not even find it.
#pragma once
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "fabric/ofi/nics/near.hpp"

namespace ferry::fabric::ofi {

/// Reads below `root`, which tests make up. What cannot be read is unknown, never an error.
class Sysfs {
 public:
  explicit Sysfs(std::filesystem::path root = "/sys") : root_(std::move(root)) {}

  /// Of a PCI device as CUDA and libfabric name it, "0000:17:00.0", in any case.
  Place pci_device(std::string bus_id) const;
  /// Of an interface ("eth0") or an RDMA device ("mlx5_0"); of none if it is no PCI device's.
  Place nic(const std::string& name) const;
  NodeDistances node_distances() const;
  /// The NUMA nodes of these CPUs, ascending.
  std::vector<int> nodes_of(std::span<const int> cpus) const;

 private:
  Place place_of(const std::filesystem::path& device) const;

  std::filesystem::path root_;
};

/// The CPUs that this thread may run on.
std::vector<int> allowed_cpus();

}  // namespace ferry::fabric::ofi

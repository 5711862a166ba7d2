#include "fabric/ofi/nics/sysfs.hpp"

#include <sched.h>

#include <algorithm>
#include <cctype>
#include <fstream>
#include <optional>
#include <sstream>
#include <string_view>

namespace ferry::fabric::ofi {
namespace {

namespace fs = std::filesystem;

constexpr int kMostNodes = 1024;

/// "0000:17:00.0".
bool is_pci_address(std::string_view text) {
  const std::size_t colon = text.find(':');
  if (colon == std::string_view::npos || colon < 4) return false;
  const std::string_view rest = text.substr(colon);
  return rest.size() == 8 && rest[3] == ':' && rest[6] == '.';
}

/// "0-3,8-11"; nothing for what is no such list.
std::vector<int> list_of(const std::string& text) {
  std::vector<int> all;
  std::istringstream parts(text);
  std::string part;
  while (std::getline(parts, part, ',')) {
    std::istringstream range(part);
    int first = 0, last = 0;
    char dash = 0;
    if (!(range >> first)) return {};
    if (!(range >> dash >> last)) last = first;
    for (int i = first; i <= last; ++i) all.push_back(i);
  }
  return all;
}

std::optional<std::string> line_of(const fs::path& file) {
  std::ifstream in(file);
  std::string line;
  if (!std::getline(in, line)) return std::nullopt;
  return line;
}

fs::path node_folder(const fs::path& root, int node) {
  return root / "devices/system/node" / ("node" + std::to_string(node));
}

}  // namespace

Place Sysfs::place_of(const fs::path& device) const {
  std::error_code failed;
  const fs::path real = fs::canonical(device, failed);
  if (failed) return {};
  Place place;
  fs::path at, found;
  for (const fs::path& part : real) {
    at /= part;
    const std::string name = part.string();
    // Below a host bridge ("pci0000:16"); a virtual device may follow ("virtio2").
    if (place.way.empty() ? name.starts_with("pci") : is_pci_address(name)) {
      place.way.push_back(name);
      found = at;
    }
  }
  if (place.way.size() < 2) return {};
  if (const auto text = line_of(found / "numa_node")) {
    std::istringstream(*text) >> place.node;
  }
  // Machines of one node often do not say so.
  std::error_code none;
  if (place.node < 0 && !fs::exists(node_folder(root_, 1), none)) place.node = 0;
  return place;
}

Place Sysfs::pci_device(std::string bus_id) const {
  std::transform(bus_id.begin(), bus_id.end(), bus_id.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (!is_pci_address(bus_id)) return {};
  // Eight digits where there are four: as NVML writes them.
  const std::size_t colon = bus_id.find(':');
  if (colon > 4 && bus_id.substr(0, colon - 4).find_first_not_of('0') == std::string::npos) {
    bus_id = bus_id.substr(colon - 4);
  }
  return place_of(root_ / "bus/pci/devices" / bus_id);
}

Place Sysfs::nic(const std::string& name) const {
  if (name.empty() || name.find('/') != std::string::npos) return {};
  for (const char* folder : {"class/infiniband", "class/net"}) {
    Place place = place_of(root_ / folder / name / "device");
    if (!place.way.empty()) return place;
  }
  return {};
}

NodeDistances Sysfs::node_distances() const {
  NodeDistances all;
  for (int node = 0; node < kMostNodes; ++node) {
    const auto text = line_of(node_folder(root_, node) / "distance");
    if (!text) break;
    std::istringstream numbers(*text);
    all.emplace_back();
    for (int one = 0; numbers >> one;) all.back().push_back(one);
  }
  return all;
}

std::vector<int> Sysfs::nodes_of(std::span<const int> cpus) const {
  std::vector<int> nodes;
  for (int node = 0; node < kMostNodes; ++node) {
    const auto text = line_of(node_folder(root_, node) / "cpulist");
    if (!text) break;
    const std::vector<int> list = list_of(*text);
    const bool some = std::any_of(cpus.begin(), cpus.end(), [&](int cpu) {
      return std::find(list.begin(), list.end(), cpu) != list.end();
    });
    if (some) nodes.push_back(node);
  }
  return nodes;
}

std::vector<int> allowed_cpus() {
  constexpr int kMostCpus = 8192;
  std::vector<int> cpus;
  cpu_set_t* set = CPU_ALLOC(kMostCpus);
  const std::size_t bytes = CPU_ALLOC_SIZE(kMostCpus);
  if (set == nullptr) return cpus;
  CPU_ZERO_S(bytes, set);
  if (sched_getaffinity(0, bytes, set) == 0) {
    for (int cpu = 0; cpu < kMostCpus; ++cpu) {
      if (CPU_ISSET_S(static_cast<std::size_t>(cpu), bytes, set)) cpus.push_back(cpu);
    }
  }
  CPU_FREE(set);
  return cpus;
}

}  // namespace ferry::fabric::ofi

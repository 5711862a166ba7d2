#include "fabric/ofi/nics/nics.hpp"

#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <ferry/error.hpp>
#include <string_view>
#include <utility>

#include "base/text.hpp"
#include "fabric/ofi/nics/address.hpp"

namespace ferry::fabric::ofi {
namespace {

/// RDMA first. "net" is TCP without a layer above it (libfabric 1.16 and 1.17), which later
/// versions call "tcp".
constexpr std::array kPreference{"cxi", "efa", "verbs;ofi_rxm", "net", "tcp", "tcp;ofi_rxm"};
constexpr std::size_t kMostOfNicShown = 80;

/// What the options say, in numbers.
struct Wanted {
  std::string address{};
  std::vector<std::string> names{};
  std::uint32_t traffic_class = 0;
};

bool has_socket_address(const fi_info& info) {
  return info.addr_format == FI_SOCKADDR || info.addr_format == FI_SOCKADDR_IN ||
         info.addr_format == FI_SOCKADDR_IN6;
}

/// In numbers; empty where the provider has addresses of its own.
std::string address_of(const fi_info& info) {
  if (!has_socket_address(info) || info.src_addr == nullptr) return {};
  return numeric(static_cast<const sockaddr*>(info.src_addr));
}

std::string domain_of(const fi_info& info) {
  return info.domain_attr->name == nullptr ? "" : info.domain_attr->name;
}

/// One alone of a list, which it keeps.
Info one_of(const Info& list, const Library& library, const fi_info& one) {
  const Info copy(library.dupinfo(&one), library.freeinfo);
  if (!copy) return {list, const_cast<fi_info*>(&one)};
  return copy;
}

Place place_of(const fi_info& info, const std::string& interface, const Sysfs& sysfs) {
  const fid_nic* nic = info.nic;
  if (nic != nullptr && nic->bus_attr != nullptr && nic->bus_attr->bus_type == FI_BUS_PCI) {
    const auto& at = nic->bus_attr->attr.pci;
    std::array<char, 32> text{};
    std::snprintf(text.data(), text.size(), "%04x:%02x:%02x.%x", unsigned{at.domain_id},
                  unsigned{at.bus_id}, unsigned{at.device_id}, unsigned{at.function_id});
    if (Place place = sysfs.pci_device(text.data()); !place.way.empty()) return place;
  }
  Place place = sysfs.nic(domain_of(info));
  return place.way.empty() ? sysfs.nic(interface) : place;
}

Nic nic_of(Info info, const Sysfs& sysfs) {
  Nic nic;
  nic.address = address_of(*info);
  // Of an address that is no interface's first one, TCP's domain has no interface's name.
  const std::string interface = nic.address.empty() ? "" : interface_of(nic.address);
  nic.name =
      is_tcp(info->fabric_attr->prov_name) && !interface.empty() ? interface : domain_of(*info);
  nic.network = info->fabric_attr->name == nullptr ? "" : info->fabric_attr->name;
  nic.place = place_of(*info, interface, sysfs);
  nic.info = std::move(info);
  return nic;
}

bool is_down(const fi_info& info) {
  return info.nic != nullptr && info.nic->link_attr != nullptr &&
         info.nic->link_attr->state == FI_LINK_DOWN;
}

/// All NICs of a provider that other hosts may reach, each at its first address of that kind.
std::vector<Nic> all_nics(const Library& library, const std::string& provider, bool ipv6,
                          std::uint32_t tclass, const Sysfs& sysfs, int& code) {
  std::vector<Nic> nics;
  const Info list = ask_any_class(library, provider, "", tclass, code);
  for (const fi_info* at = list.get(); at != nullptr; at = at->next) {
    const std::string address = address_of(*at);
    if (has_socket_address(*at) &&
        (address.empty() || is_loopback(address) || address.starts_with("fe80") ||
         (address.find(':') != std::string::npos) != ipv6)) {
      continue;
    }
    // After its own a provider lists those with a layer above them.
    const std::string_view name = at->fabric_attr->prov_name;
    if (name != list->fabric_attr->prov_name || is_down(*at)) continue;
    const bool known = std::any_of(nics.begin(), nics.end(), [&](const Nic& nic) {
      return domain_of(*nic.info) == domain_of(*at);
    });
    if (!known) nics.push_back(nic_of(one_of(list, library, *at), sysfs));
  }
  return nics;
}

/// The NICs of one provider that the options allow; none, and why.
class Search {
 public:
  Search(const Library& library, const OfiOptions& options, const Wanted& wanted,
         const Sysfs& sysfs)
      : library_(library), options_(options), wanted_(wanted), sysfs_(sysfs) {}

  std::vector<Nic> run(const std::string& provider, std::string& problem) {
    provider_ = &provider;
    code_ = 0;
    std::vector<Nic> nics = wanted_.names.empty() ? by_address() : by_names(problem);
    if (nics.empty() && problem.empty()) problem = error_text(library_, code_);
    return nics;
  }

 private:
  std::vector<Nic> all() {
    const bool ipv6 = wanted_.address.find(':') != std::string::npos;
    return all_nics(library_, *provider_, ipv6, wanted_.traffic_class, sysfs_, code_);
  }

  std::vector<Nic> at(const std::string& address) {
    const Info info = ask_any_class(library_, *provider_, address, wanted_.traffic_class, code_);
    if (!info) return {};
    return {nic_of(one_of(info, library_, *info), sysfs_)};
  }

  /// TCP: what has this rank's address. Others: all, for that address need not be an RDMA NIC's;
  /// but what has it if it was given.
  std::vector<Nic> by_address() {
    if (is_tcp(*provider_) || is_loopback(wanted_.address)) return at(wanted_.address);
    std::vector<Nic> nics = all();
    for (const Nic& nic : nics) {
      if (!options_.host.empty() && nic.address == wanted_.address) return {nic};
    }
    return nics.empty() ? at(wanted_.address) : nics;
  }

  std::vector<Nic> by_names(std::string& problem) {
    std::vector<Nic> chosen;
    for (const std::string& name : wanted_.names) {
      const std::vector<Nic> found = of_name(name);
      if (found.empty()) {
        problem = "no NIC " + printable(name, kMostOfNicShown);
        return {};
      }
      for (const Nic& nic : found) {
        const bool known = std::any_of(chosen.begin(), chosen.end(),
                                       [&](const Nic& other) { return other.id() == nic.id(); });
        if (!known) chosen.push_back(nic);
      }
    }
    return chosen;
  }

  std::vector<Nic> of_name(const std::string& name) {
    if (name == "all") return all();
    std::string address = interface_address(name);
    if (address.empty() && is_own_address(name)) address = name;
    if (!address.empty()) {
      if (std::vector<Nic> found = at(address); !found.empty()) return found;
    }
    std::vector<Nic> found;
    for (const Nic& nic : all()) {
      const std::string domain = domain_of(*nic.info);
      if (domain == name || domain.starts_with(name + "-")) found.push_back(nic);  // "NAME-rdm"
    }
    return found;
  }

  const Library& library_;
  const OfiOptions& options_;
  const Wanted& wanted_;
  const Sysfs& sysfs_;
  const std::string* provider_ = nullptr;
  int code_ = 0;
};

std::vector<std::string> names_in(const std::string& list) {
  std::vector<std::string> names;
  for (std::size_t at = 0; at < list.size();) {
    const std::size_t end = std::min(list.find(',', at), list.size());
    if (end > at) names.push_back(list.substr(at, end - at));
    at = end + 1;
  }
  return names;
}

}  // namespace

std::vector<Nic> find_nics(const Library& library, int rank, const OfiOptions& options,
                           const std::string& own_address, const Sysfs& sysfs) {
  check_counts(rank, options);
  const Wanted wanted{
      .address = listening_address(options.host.empty() ? own_address : options.host, rank),
      .names = names_in(options.nics),
      .traffic_class = traffic_class(options.traffic_class, rank)};
  std::vector<std::string> providers(kPreference.begin(), kPreference.end());
  if (!options.provider.empty()) providers = {options.provider};
  Search search(library, options, wanted, sysfs);
  std::string tried;
  for (const std::string& provider : providers) {
    std::string problem;
    std::vector<Nic> nics = search.run(provider, problem);
    if (!nics.empty()) return nics;
    tried += (tried.empty() ? "" : "; ") + printable(provider, kMostOfNicShown) + ": " + problem;
  }
  const std::string where = wanted.names.empty()
                                ? "at " + wanted.address
                                : "with the NICs " + printable(options.nics, kMostOfNicShown);
  throw Error(ErrorKind::unsupported,
              "rank " + std::to_string(rank) +
                  ": no provider of libfabric offers reliable datagrams with remote writes " +
                  where + " (" + tried + "); `fi_info` lists what this machine has; " +
                  (wanted.names.empty() ? "is " + wanted.address + " one of its addresses?"
                                        : "FERRY_OFI_NICS names interfaces, addresses or domains"),
              {.rank = rank});
}

Info find_provider(const Library& library, int rank, const OfiOptions& options) {
  return find_nics(library, rank, options, "", Sysfs()).front().info;
}

Info for_latency(const Library& library, const Nic& nic) {
  int code = 0;
  const Info list =
      ask(library, nic.info->fabric_attr->prov_name, nic.address, FI_TC_LOW_LATENCY, code);
  for (const fi_info* at = list.get(); at != nullptr; at = at->next) {
    if (domain_of(*at) == domain_of(*nic.info) && address_of(*at) == nic.address) {
      return one_of(list, library, *at);
    }
  }
  return nic.info;
}

}  // namespace ferry::fabric::ofi

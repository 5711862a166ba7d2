#include "fabric/ofi/provider.hpp"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <ferry/error.hpp>
#include <utility>
#include <vector>

#include "core/text.hpp"

namespace ferry::fabric::ofi {
namespace {

constexpr std::uint32_t kApi = FI_VERSION(1, 15);
/// RDMA first. "net" is TCP without a layer above it (libfabric 1.16 and 1.17), which later
/// versions call "tcp".
constexpr std::array kPreference{"cxi", "efa", "verbs;ofi_rxm", "net", "tcp", "tcp;ofi_rxm"};
constexpr std::size_t kMostShown = 80;

[[noreturn]] void refuse(int rank, ErrorKind kind, const std::string& what) {
  throw Error(kind, "rank " + std::to_string(rank) + ": " + what, {.rank = rank});
}

std::uint32_t traffic_class(const std::string& name, int rank) {
  constexpr std::array<std::pair<const char*, std::uint32_t>, 7> kClasses{
      {{"", FI_TC_UNSPEC},
       {"best_effort", FI_TC_BEST_EFFORT},
       {"low_latency", FI_TC_LOW_LATENCY},
       {"dedicated_access", FI_TC_DEDICATED_ACCESS},
       {"bulk_data", FI_TC_BULK_DATA},
       {"scavenger", FI_TC_SCAVENGER},
       {"network_ctrl", FI_TC_NETWORK_CTRL}}};
  std::string known;
  for (const auto& [text, value] : kClasses) {
    if (name == text) return value;
    if (*text != '\0') known += (known.empty() ? "" : ", ") + std::string(text);
  }
  refuse(rank, ErrorKind::invalid_argument,
         "the network's traffic class is \"" + printable(name, kMostShown) +
             "\", expected one of " + known + ", or nothing");
}

std::string numeric(const sockaddr* address) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  const void* from = nullptr;
  if (address->sa_family == AF_INET) {
    from = &reinterpret_cast<const sockaddr_in*>(address)->sin_addr;
  } else if (address->sa_family == AF_INET6) {
    from = &reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr;
  }
  if (from == nullptr || !inet_ntop(address->sa_family, from, text.data(), text.size())) return {};
  return text.data();
}

/// The first address of an interface, IPv4 before IPv6; empty if there is none of that name.
std::string of_interface(const std::string& name) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return {};
  std::string found;
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* at = list; at != nullptr && found.empty(); at = at->ifa_next) {
      if (name != at->ifa_name || at->ifa_addr == nullptr || at->ifa_addr->sa_family != family) {
        continue;
      }
      const std::string text = numeric(at->ifa_addr);
      if (!text.starts_with("fe80")) found = text;  // link-local: means nothing to other hosts
    }
  }
  freeifaddrs(list);
  return found;
}

std::string of_name(const std::string& host, std::string& problem) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  const int code = getaddrinfo(host.c_str(), nullptr, &hints, &list);
  if (code != 0) {
    problem = gai_strerror(code);
    return {};
  }
  const std::string text = numeric(list->ai_addr);
  freeaddrinfo(list);
  return text;
}

/// Whether a numeric address is one of this machine's: a socket can be bound to it.
bool is_own(const std::string& address) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  if (getaddrinfo(address.c_str(), nullptr, &hints, &list) != 0) return false;
  const int fd = socket(list->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const bool own = fd >= 0 && bind(fd, list->ai_addr, list->ai_addrlen) == 0;
  if (fd >= 0) close(fd);
  freeaddrinfo(list);
  return own;
}

Info ask(const Library& library, const char* provider, const std::string& address,
         std::uint32_t tclass, int& code) {
  const Info hints(library.dupinfo(nullptr), library.freeinfo);
  if (!hints) {
    code = -FI_ENOMEM;
    return nullptr;
  }
  hints->caps = FI_MSG | FI_RMA | FI_SEND | FI_RECV | FI_WRITE | FI_REMOTE_WRITE;
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->ep_attr->type = FI_EP_RDM;
  hints->domain_attr->mr_mode =
      FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
  hints->domain_attr->threading = FI_THREAD_DOMAIN;  // a lane's lock guards its domain
  hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
  hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;  // by the lane's thread
  hints->domain_attr->cq_data_size = sizeof(std::uint32_t);
  hints->tx_attr->tclass = tclass;
  hints->fabric_attr->prov_name = strdup(provider);  // freed with the hints
  fi_info* found = nullptr;
  code = library.getinfo(kApi, address.c_str(), nullptr, FI_SOURCE, hints.get(), &found);
  return code == 0 ? Info(found, library.freeinfo) : nullptr;
}

}  // namespace

std::string listening_address(const std::string& host, int rank) {
  if (host.empty()) return "127.0.0.1";
  std::string problem;
  std::string address = of_interface(host);
  if (address.empty()) address = of_name(host, problem);
  if (address.empty()) {
    refuse(rank, ErrorKind::invalid_argument,
           "the network's host is \"" + printable(host, kMostShown) +
               "\", which is no interface of this machine and does not resolve (" + problem +
               "); expected an address, name or interface of this machine (FERRY_HOST)");
  }
  if (address == "0.0.0.0" || address == "::") {
    refuse(rank, ErrorKind::invalid_argument,
           "the network's host is " + address +
               ", all interfaces; expected one address of this machine, at which its peers reach "
               "it (FERRY_HOST)");
  }
  if (!is_own(address)) {
    refuse(rank, ErrorKind::invalid_argument,
           "the network's host is " + address +
               ", which is none of this machine's addresses; expected one of them, at which its "
               "peers reach it (FERRY_HOST)");
  }
  return address;
}

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "::1";
}

Info find_provider(const Library& library, int rank, const OfiOptions& options, bool latency) {
  if (options.endpoints < 0 || options.endpoints > kMaxOfiEndpoints) {
    refuse(rank, ErrorKind::invalid_argument,
           "the network's endpoints are " + std::to_string(options.endpoints) + ", expected 1 to " +
               std::to_string(kMaxOfiEndpoints));
  }
  const std::string address = listening_address(options.host, rank);
  const std::uint32_t given = traffic_class(options.traffic_class, rank);
  const std::uint32_t tclass = latency ? std::uint32_t{FI_TC_LOW_LATENCY} : given;
  std::vector<std::string> names(kPreference.begin(), kPreference.end());
  if (!options.provider.empty()) names = {options.provider};
  std::string tried;
  for (const std::string& name : names) {
    int code = 0;
    Info info = ask(library, name.c_str(), address, tclass, code);
    // A class that the provider does not know is no reason to do without the network.
    if (!info && tclass != FI_TC_UNSPEC) {
      info = ask(library, name.c_str(), address, FI_TC_UNSPEC, code);
    }
    if (info) return info;
    tried += (tried.empty() ? "" : "; ") + printable(name, kMostShown) + ": " +
             error_text(library, code);
  }
  refuse(rank, ErrorKind::unsupported,
         "no provider of libfabric offers reliable datagrams with remote writes at " + address +
             " (" + tried + "); `fi_info` lists what this machine has; is " + address +
             " one of its addresses?");
}

}  // namespace ferry::fabric::ofi

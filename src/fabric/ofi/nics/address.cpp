#include "fabric/ofi/nics/address.hpp"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <ferry/error.hpp>

#include "base/text.hpp"

namespace ferry::fabric::ofi {
namespace {

constexpr std::size_t kMostOfHostShown = 80;

[[noreturn]] void refuse_host(int rank, const std::string& what) {
  throw Error(ErrorKind::invalid_argument, "rank " + std::to_string(rank) + ": " + what,
              {.rank = rank});
}

std::uint32_t ipv4(const sockaddr* address) {
  in_addr number{};
  if (address->sa_family == AF_INET) {
    number = reinterpret_cast<const sockaddr_in*>(address)->sin_addr;
  } else {
    std::memcpy(&number, &reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr.s6_addr[12],
                sizeof number);
  }
  return ntohl(number.s_addr);
}

bool is_ipv4(const sockaddr* address) {
  return address->sa_family == AF_INET ||
         (address->sa_family == AF_INET6 &&
          IN6_IS_ADDR_V4MAPPED(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr));
}

/// Not all interfaces, no group of hosts, no broadcast: all of which can be bound, too.
bool is_one_host(const sockaddr* address) {
  if (is_ipv4(address)) {
    const std::uint32_t number = ipv4(address);
    constexpr std::uint32_t kLoopbackBroadcast = 0x7fffffff;  // 127.255.255.255
    return number != INADDR_ANY && number != INADDR_BROADCAST && number != kLoopbackBroadcast &&
           !IN_MULTICAST(number);
  }
  const in6_addr& number = reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr;
  return !IN6_IS_ADDR_UNSPECIFIED(&number) && !IN6_IS_ADDR_MULTICAST(&number);
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

}  // namespace

std::string numeric(const sockaddr* address) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (is_ipv4(address)) {
    const in_addr number{htonl(ipv4(address))};
    return inet_ntop(AF_INET, &number, text.data(), text.size());
  }
  if (address->sa_family != AF_INET6) return {};
  const in6_addr& number = reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr;
  return inet_ntop(AF_INET6, &number, text.data(), text.size());
}

bool is_own_address(const std::string& address) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  if (getaddrinfo(address.c_str(), nullptr, &hints, &list) != 0) return false;
  const int fd = socket(list->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const bool own =
      fd >= 0 && is_one_host(list->ai_addr) && bind(fd, list->ai_addr, list->ai_addrlen) == 0;
  if (fd >= 0) close(fd);
  freeaddrinfo(list);
  return own;
}

std::string interface_address(const std::string& name) {
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

std::string interface_of(const std::string& address) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return {};
  std::string found;
  for (const ifaddrs* at = list; at != nullptr && found.empty(); at = at->ifa_next) {
    if (at->ifa_addr != nullptr && numeric(at->ifa_addr) == address) found = at->ifa_name;
  }
  freeifaddrs(list);
  return found;
}

std::string listening_address(const std::string& host, int rank) {
  if (host.empty()) return "127.0.0.1";
  std::string problem;
  std::string address = interface_address(host);
  if (address.empty()) address = of_name(host, problem);
  if (address.empty()) {
    refuse_host(rank, "the network's host is \"" + printable(host, kMostOfHostShown) +
                          "\", which is no interface of this machine and does not resolve (" +
                          problem +
                          "); expected an address, name or interface of this machine (FERRY_HOST)");
  }
  if (address == "0.0.0.0" || address == "::") {
    refuse_host(
        rank,
        "the network's host is " + address +
            ", all interfaces; expected one address of this machine, at which its peers reach "
            "it (FERRY_HOST)");
  }
  if (!is_own_address(address)) {
    refuse_host(
        rank, "the network's host is " + address +
                  ", which is none of this machine's addresses; expected one of them, at which its "
                  "peers reach it (FERRY_HOST)");
  }
  return address;
}

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "::1";
}

}  // namespace ferry::fabric::ofi

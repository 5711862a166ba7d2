#include "run/port_system.hpp"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "posix/unique_fd.hpp"
#include "run/ports.hpp"

namespace ferry::cli {
namespace {

constexpr std::uint16_t kFirstPort = 10000;

bool can_bind(std::uint16_t port, std::uint32_t address) {
  const UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) throw std::system_error(errno, std::generic_category(), "socket");
  const int on = 1;  // as servers do: connections of the past that linger do not count
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  sockaddr_in where{};
  where.sin_family = AF_INET;
  where.sin_port = htons(port);
  where.sin_addr.s_addr = htonl(address);
  return bind(fd.get(), reinterpret_cast<const sockaddr*>(&where), sizeof where) == 0 &&
         listen(fd.get(), 1) == 0;
}

}  // namespace

PortRange usable_ports() {
  // The kernel serves itself from the first ephemeral port on.
  std::ifstream file("/proc/sys/net/ipv4/ip_local_port_range");
  int first = 0;
  const bool known = file >> first && first > 12000 && first < 65536;
  return {kFirstPort, known ? static_cast<std::uint16_t>(first) : std::uint16_t{32768}};
}

// A socket of the abstract namespace, which lives as long as its owner.
std::shared_ptr<void> claim_port(std::uint16_t port) {
  UniqueFd fd(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!fd) throw std::system_error(errno, std::generic_category(), "socket");
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  const std::string text = fmt::format("ferry-port-{}", port);
  std::memcpy(name.sun_path + 1, text.data(), text.size());
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  if (bind(fd.get(), reinterpret_cast<const sockaddr*>(&name), length) != 0) return nullptr;
  return std::make_shared<UniqueFd>(std::move(fd));
}

// Programs may listen on the loopback interface or on all.
bool is_free(std::uint16_t port) {
  return can_bind(port, INADDR_LOOPBACK) && can_bind(port, INADDR_ANY);
}

void fill_random(void* data, std::size_t bytes) {
  auto* at = static_cast<unsigned char*>(data);
  while (bytes > 0) {
    const ssize_t got = getrandom(at, bytes, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) throw std::system_error(errno, std::generic_category(), "getrandom");
    at += got;
    bytes -= static_cast<std::size_t>(got);
  }
}

int own_place(const std::vector<std::string>& addresses) {
  std::vector<int> own;
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* list = nullptr;
    if (const int code = getaddrinfo(addresses[i].c_str(), nullptr, &hints, &list); code != 0) {
      throw std::runtime_error(
          fmt::format("--hosts: \"{}\" does not resolve: {}", addresses[i], gai_strerror(code)));
    }
    // An address is this machine's when a socket can be bound to it.
    const UniqueFd fd(socket(list->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (fd && bind(fd.get(), list->ai_addr, list->ai_addrlen) == 0) {
      own.push_back(static_cast<int>(i));
    }
    freeaddrinfo(list);
  }
  if (own.size() == 1) return own.front();
  throw std::runtime_error(
      own.empty() ? "--hosts: none of them is this machine"
                  : fmt::format("--hosts: {} and {} are both this machine; expected each once",
                                addresses[static_cast<std::size_t>(own[0])],
                                addresses[static_cast<std::size_t>(own[1])]));
}

}  // namespace ferry::cli

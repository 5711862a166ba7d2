#include "run/port_system.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <stdexcept>

#include "run/ports.hpp"
#include "windows/system.hpp"

namespace ferry::cli {
namespace {

constexpr PortRange kPorts{10000, 32768};  // wine serves itself from there on, Windows later

void start_winsock() {
  static const int started = [] {
    WSADATA data;
    return WSAStartup(MAKEWORD(2, 2), &data);
  }();
  (void)started;  // sockets fail with the reason
}

}  // namespace

PortRange usable_ports() {
  return kPorts;
}

// A mutex of the session, which goes with its last handle.
std::shared_ptr<void> claim_port(std::uint16_t port) {
  Handle mutex(CreateMutexA(nullptr, FALSE, fmt::format("Local\\ferry-port-{}", port).c_str()));
  if (!mutex || GetLastError() == ERROR_ALREADY_EXISTS) return nullptr;
  return mutex;
}

bool is_free(std::uint16_t port) {
  start_winsock();
  const SOCKET socket = ::socket(AF_INET, SOCK_STREAM, IPPROTO_TCP);
  if (socket == INVALID_SOCKET) raise_last("socket");
  const int on = 1;
  ::setsockopt(socket, SOL_SOCKET, SO_EXCLUSIVEADDRUSE, reinterpret_cast<const char*>(&on),
               sizeof on);
  sockaddr_in where{};
  where.sin_family = AF_INET;
  where.sin_port = htons(port);
  where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const bool free = ::bind(socket, reinterpret_cast<const sockaddr*>(&where), sizeof where) == 0 &&
                    ::listen(socket, 1) == 0;
  ::closesocket(socket);
  return free;
}

void fill_random(void* data, std::size_t bytes) {
  std::random_device source;  // rdrand or the system's source
  for (std::size_t done = 0; done < bytes;) {
    const std::random_device::result_type word = source();
    const std::size_t some = std::min(bytes - done, sizeof word);
    std::memcpy(static_cast<std::byte*>(data) + done, &word, some);
    done += some;
  }
}

int own_place(const std::vector<std::string>& /*addresses*/) {
  throw std::runtime_error("--hosts: on Windows ranks are of one host");
}

}  // namespace ferry::cli

// A port for a store that a test starts.
#pragma once
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>

namespace ferry::test {

inline bool can_bind(std::uint16_t port) {
  const int probe = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const bool bound =
      ::bind(probe, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
  ::close(probe);
  return bound;
}

/// A port on the loopback address that nobody uses. It is below the ephemeral ports of Linux
/// (from 32768 on): the system gives it to no connection before the store listens there. Each
/// process begins elsewhere: tests that run side by side do not choose the same.
inline std::uint16_t free_port() {
  constexpr unsigned kFirst = 10000, kPorts = 22000;
  static std::atomic<unsigned> calls{0};
  for (unsigned tried = 0; tried < kPorts; ++tried) {
    const unsigned place = static_cast<unsigned>(::getpid()) * 61 + calls++;
    const auto port = static_cast<std::uint16_t>(kFirst + place % kPorts);
    if (can_bind(port)) return port;
  }
  std::abort();
}

}  // namespace ferry::test

// A port for a store that a test starts.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "platform/process.hpp"
#include "platform/socket.hpp"

namespace ferry::test {

inline bool can_listen(std::uint16_t port) {
  int error = 0;
  std::string problem;
  return static_cast<bool>(
      listen_on(resolve_host("127.0.0.1", port, error, problem).front(), error));
}

/// A port on the loopback address that nobody uses. It is below the ephemeral ports of Linux
/// (from 32768 on): the system gives it to no connection before the store listens there. Each
/// process begins elsewhere: tests that run side by side do not choose the same.
inline std::uint16_t free_port() {
  constexpr unsigned kFirst = 10000, kPorts = 22000;
  static std::atomic<unsigned> calls{0};
  for (unsigned tried = 0; tried < kPorts; ++tried) {
    const unsigned place = static_cast<unsigned>(process_id()) * 61 + calls++;
    const auto port = static_cast<std::uint16_t>(kFirst + place % kPorts);
    if (can_listen(port)) return port;
  }
  std::abort();
}

}  // namespace ferry::test

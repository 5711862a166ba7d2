#include "run/ports.hpp"

#include <fmt/format.h>

#include <random>
#include <stdexcept>

#include "windows/system.hpp"

namespace ferry::cli {
namespace {

constexpr std::uint16_t kFirstPort = 10000;
constexpr std::uint16_t kEndPort =
    32768;  // wine's system serves itself from here on, Windows later
constexpr int kAttempts = 200;

void start_winsock() {
  static const int started = [] {
    WSADATA data;
    return WSAStartup(MAKEWORD(2, 2), &data);
  }();
  (void)started;  // sockets fail with the reason
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

/// Two jobs that start together must not choose the same port before either listens: a mutex of
/// the session, which goes with its last handle, is the claim.
std::shared_ptr<void> claim(std::uint16_t port) {
  Handle mutex(CreateMutexA(nullptr, FALSE, fmt::format("Local\\ferry-port-{}", port).c_str()));
  if (!mutex || GetLastError() == ERROR_ALREADY_EXISTS) return nullptr;
  return mutex;
}

}  // namespace

ReservedPort::ReservedPort() {
  std::random_device random;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const auto port = static_cast<std::uint16_t>(kFirstPort + random() % (kEndPort - kFirstPort));
    std::shared_ptr<void> held = claim(port);
    if (!held || !is_free(port)) continue;
    port_ = port;
    claim_ = std::move(held);
    return;
  }
  throw std::runtime_error("found no free TCP port; close some servers, or name one with --port");
}

ReservedPort::ReservedPort(std::uint16_t port) : port_(port), claim_(claim(port)) {
  if (!claim_ || !is_free(port)) {
    throw std::runtime_error(fmt::format(
        "port {} is in use on this machine; choose another with --port, or leave --port out and "
        "a free one is found",
        port));
  }
}

int own_place(const std::vector<std::string>& /*addresses*/) {
  throw std::runtime_error("--hosts: on Windows ranks are of one host");
}

std::string random_secret() {
  std::random_device random;  // rdrand or the system's source
  std::string text;
  for (int i = 0; i < 4; ++i) text += fmt::format("{:08x}", static_cast<std::uint32_t>(random()));
  return text;
}

}  // namespace ferry::cli

#include "run/ports.hpp"

#include <fmt/format.h>

#include <stdexcept>
#include <utility>

#include "run/port_system.hpp"

namespace ferry::cli {
namespace {

constexpr int kAttempts = 200;

}  // namespace

ReservedPort::ReservedPort() {
  const PortRange ports = usable_ports();
  const auto span = static_cast<std::uint32_t>(ports.end - ports.first);
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    std::uint32_t random = 0;
    fill_random(&random, sizeof random);
    const auto port = static_cast<std::uint16_t>(ports.first + random % span);
    std::shared_ptr<void> held = claim_port(port);
    if (!held || !is_free(port)) continue;
    port_ = port;
    claim_ = std::move(held);
    return;
  }
  throw std::runtime_error(fmt::format(
      "found no free TCP port in {} attempts between {} and {}; close some servers, or name one "
      "with --port",
      kAttempts, ports.first, ports.end - 1));
}

ReservedPort::ReservedPort(std::uint16_t port) : port_(port), claim_(claim_port(port)) {
  if (!claim_ || !is_free(port)) {
    throw std::runtime_error(fmt::format(
        "port {} is in use on this machine; choose another with --port, or leave --port out and "
        "a free one is found",
        port));
  }
}

std::string random_secret() {
  std::uint64_t words[2];
  fill_random(words, sizeof words);
  return fmt::format("{:016x}{:016x}", words[0], words[1]);
}

}  // namespace ferry::cli

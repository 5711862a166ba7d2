#include "run/ports.hpp"

#include <fmt/format.h>

#include <fstream>
#include <span>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "platform/pages.hpp"
#include "platform/random.hpp"
#include "platform/socket.hpp"

namespace ferry::cli {
namespace {

constexpr int kAttempts = 200;

/// Ports from `first` to before `end`, which the system does not give away by itself.
struct PortRange {
  std::uint16_t first = 10000;
  std::uint16_t end = 32768;  // wine serves itself from there on, Windows later
};

PortRange usable_ports() {
  PortRange ports;
  std::ifstream file("/proc/sys/net/ipv4/ip_local_port_range");
  int first = 0;
  if (file >> first && first > 12000 && first < 65536)
    ports.end = static_cast<std::uint16_t>(first);
  return ports;
}

template <class T>
T random_number() {
  T number;
  if (const int error = random_bytes(std::as_writable_bytes(std::span(&number, 1))); error != 0) {
    throw std::system_error(error, std::generic_category(), "random numbers");
  }
  return number;
}

/// Two jobs that start together must not choose the same port before either listens: a name that
/// goes with its owner. Null: another process holds the claim.
std::shared_ptr<void> claim_port(std::uint16_t port) {
  const std::string name = fmt::format("ferry-port-{}", port);
  if (user_sockets()) {
    int error = 0;
    Socket named = listen_on(user_socket_address("@" + name), error);
    return named ? std::make_shared<Socket>(std::move(named)) : nullptr;
  }
  SectionFailure failure;
  Section section = make_section(name, 1, failure);
  if (section.data == nullptr) return nullptr;
  return {section.data, [name](void* data) {
            remove_section(name);
            unmap_pages(static_cast<std::byte*>(data), 1);
          }};
}

/// Programs may listen on the loopback interface or on all.
bool is_free(std::uint16_t port) {
  for (const char* const host : {"127.0.0.1", "0.0.0.0"}) {
    int error = 0;
    std::string problem;
    const auto addresses = resolve_host(host, port, error, problem);
    if (addresses.empty() || !listen_on(addresses.front(), error)) return false;
  }
  return true;
}

}  // namespace

ReservedPort::ReservedPort() {
  const PortRange ports = usable_ports();
  const auto span = static_cast<std::uint32_t>(ports.end - ports.first);
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const auto port =
        static_cast<std::uint16_t>(ports.first + random_number<std::uint32_t>() % span);
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

ReservedPort::ReservedPort(std::uint16_t port, std::string_view advice)
    : port_(port), claim_(claim_port(port)) {
  if (!claim_ || !is_free(port)) {
    throw std::runtime_error(fmt::format("port {} is in use on this machine; {}", port, advice));
  }
}

int own_place(const std::vector<std::string>& addresses) {
  std::vector<int> own;
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    int error = 0;
    std::string problem;
    const auto found = resolve_host(addresses[i], 0, error, problem);
    if (found.empty()) {
      throw std::runtime_error(
          fmt::format("--hosts: \"{}\" does not resolve: {}", addresses[i], problem));
    }
    // An address is this machine's when a socket can listen there.
    if (listen_on(found.front(), error)) own.push_back(static_cast<int>(i));
  }
  if (own.size() == 1) return own.front();
  throw std::runtime_error(
      own.empty() ? "--hosts: none of them is this machine"
                  : fmt::format("--hosts: {} and {} are both this machine; expected each once",
                                addresses[static_cast<std::size_t>(own[0])],
                                addresses[static_cast<std::size_t>(own[1])]));
}

std::string random_secret() {
  return fmt::format("{:016x}{:016x}", random_number<std::uint64_t>(),
                     random_number<std::uint64_t>());
}

}  // namespace ferry::cli

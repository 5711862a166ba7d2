// What the system gives for ports and secrets: run/port_system.cpp, windows/port_system.cpp.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

namespace ferry::cli {

/// Ports from `first` to before `end`, which the system does not give away by itself.
struct PortRange {
  std::uint16_t first = 0;
  std::uint16_t end = 0;
};
PortRange usable_ports();

/// Two jobs that start together must not choose the same port before either listens. Null: another
/// process holds the claim, which goes with the last copy.
std::shared_ptr<void> claim_port(std::uint16_t port);
/// Whether nobody listens there.
bool is_free(std::uint16_t port);

void fill_random(void* data, std::size_t bytes);

}  // namespace ferry::cli

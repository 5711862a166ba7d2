// Addresses of this machine in numbers.
#pragma once
#include <string>

struct sockaddr;

namespace ferry::fabric::ofi {

/// "10.0.0.1"; empty for what is neither IPv4 nor IPv6.
std::string numeric(const sockaddr* address);

/// The first address of an interface, IPv4 before IPv6; empty if there is none of that name.
std::string interface_address(const std::string& name);
/// The interface that has this address; empty if none does.
std::string interface_of(const std::string& address);

/// Whether a numeric address is one of this machine's: a socket can be bound to it.
bool is_own_address(const std::string& address);

/// The numeric address that `host` (a number, a name or an interface) stands for; "" stands for
/// 127.0.0.1. Throws Error(invalid_argument); all interfaces at once are refused.
std::string listening_address(const std::string& host, int rank);

/// Whether a numeric address can be reached from this host only.
bool is_loopback(const std::string& address);

}  // namespace ferry::fabric::ofi

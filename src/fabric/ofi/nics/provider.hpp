// What libfabric is asked for, and which options are right.
#pragma once
#include <rdma/fabric.h>

#include <cstdint>
#include <ferry/network.hpp>
#include <memory>
#include <string>
#include <string_view>

#include "fabric/ofi/library.hpp"

namespace ferry::fabric::ofi {

/// A list of what a provider offers, or one of it.
using Info = std::shared_ptr<fi_info>;

/// Reliable unordered endpoints with messages, remote writes and their data at the target.
/// `address`: where; empty: all that the machine has. Null: none, and libfabric's `code`.
Info ask(const Library& library, const std::string& provider, const std::string& address,
         std::uint32_t traffic_class, int& code);
/// The same, of no class if need be: one that the provider does not know is no reason to do without
/// the network.
Info ask_any_class(const Library& library, const std::string& provider, const std::string& address,
                   std::uint32_t traffic_class, int& code);

/// FI_TC_* of OfiOptions::traffic_class. Throws Error(invalid_argument) naming `rank`.
std::uint32_t traffic_class(const std::string& name, int rank);
/// Numbers of endpoints and NICs. Throws Error(invalid_argument) naming `rank`.
void check_counts(int rank, const OfiOptions& options);

/// Whether its NICs are whatever has an IP address.
bool is_tcp(std::string_view provider);

}  // namespace ferry::fabric::ofi

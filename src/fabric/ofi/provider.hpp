// Which provider of libfabric carries a group, and what it was asked for.
#pragma once
#include <rdma/fabric.h>

#include <memory>
#include <string>

#include "fabric/ofi/library.hpp"
#include "fabric/ofi/ofi.hpp"

namespace ferry::fabric::ofi {

using Info = std::shared_ptr<fi_info>;

/// Reliable unordered endpoints with messages, remote writes and their data at the target, at this
/// rank's address. `latency`: of the endpoints of latency exchanges. Throws Error(unsupported),
/// saying what was tried, or Error(invalid_argument) for options.
Info find_provider(const Library& library, int rank, const OfiOptions& options, bool latency);

/// The numeric address that `host` (a number, a name or an interface) stands for; "" stands for
/// 127.0.0.1. Throws Error(invalid_argument); all interfaces at once are refused.
std::string listening_address(const std::string& host, int rank);

/// Whether a numeric address can be reached from this host only.
bool is_loopback(const std::string& address);

}  // namespace ferry::fabric::ofi

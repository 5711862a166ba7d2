// The fabric between hosts: libfabric, whatever network it finds.
#pragma once
#include <chrono>
#include <ferry/bootstrap.hpp>
#include <ferry/network.hpp>
#include <memory>
#include <span>
#include <string>

#include "fabric/fabric.hpp"

namespace ferry::fabric {

/// Whether this build has it (the headers of libfabric were there); the machine may lack the
/// library all the same.
bool ofi_is_built() noexcept;

/// Collective. No peer pointers: puts are one-sided writes, counted where they land. A thread of
/// each endpoint makes progress as long as the fabric lives, so a rank that computes still
/// receives.
///
/// `deadline` bounds creation, and later how long a peer may take no data: then it counts as dead
/// and what goes to it is dropped, for a put cannot wait for ever. Throws Error(unsupported) where
/// libfabric or the provider is missing, on all ranks when on one; Error(mismatch) when ranks use
/// different providers or numbers of endpoints; Error(invalid_argument) for options, or for a host
/// at loopback while another rank is on another host; or what the bootstrap throws. `gpu`: the PCI
/// address of this rank's, to which its NICs are near; empty: they are near to its CPUs.
std::unique_ptr<Fabric> make_ofi_fabric(Bootstrap& bootstrap, const OfiOptions& options,
                                        std::chrono::nanoseconds deadline,
                                        const OnWait& on_wait = {}, const std::string& gpu = {});

/// Of a process that joins, with the `invitation` of a rank: it reaches nobody until it links them.
/// `own_address`: Bootstrap::own_address; empty: that of the rank, on this machine. Throws what
/// make_ofi_fabric does.
std::unique_ptr<Fabric> join_ofi_fabric(int rank, int size, const OfiOptions& options,
                                        std::span<const std::byte> invitation,
                                        std::chrono::nanoseconds deadline,
                                        const std::string& own_address = {});

/// Of a process that begins a group alone. `local`: the most ranks that this machine will have.
std::unique_ptr<Fabric> begin_ofi_fabric(int rank, int size, const OfiOptions& options, int local,
                                         std::chrono::nanoseconds deadline,
                                         const std::string& own_address);

}  // namespace ferry::fabric

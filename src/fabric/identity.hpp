// Where a rank runs, and which fabric can join the ranks of a group.
#pragma once
#include <cstddef>
#include <cstdint>
#include <ferry/error.hpp>
#include <span>
#include <string>
#include <vector>

#include "platform/process.hpp"

namespace ferry::fabric {

/// Where a rank runs. Sent to all ranks when a group is created.
struct Identity {
  std::string boot_id{};         ///< of the running kernel: one host, one boot; empty: unknown
  std::string host{};            ///< for messages only: containers share names, clones too
  ProcessName process{};         ///< which process
  std::uint64_t shm_device = 0;  ///< which file system /dev/shm is; 0: there is none
  std::uint64_t user = 0;        ///< effective user id
  std::string problem{};         ///< why the rest could not be found out; empty: it could

  friend bool operator==(const Identity&, const Identity&) = default;
};

/// This process.
Identity this_identity();

/// For an all-gather between equal builds of Ferry.
std::vector<std::byte> to_bytes(const Identity& identity);
/// Throws Error(mismatch) naming `rank` and `peer`, whose bytes these are.
Identity identity_from(std::span<const std::byte> bytes, int rank, int peer);

/// What joins all ranks of a group.
enum class Reachable { local, shm, network, nothing };

struct Choice {
  Reachable by = Reachable::nothing;
  std::string problem{};  ///< why memory does not: which ranks, which hosts, what to do
  int peer = -1;          ///< first rank that rank 0 cannot reach
  ErrorKind kind = ErrorKind::unsupported;
};

/// By rank. The same on every rank that is given the same list. One process: local. One host, one
/// user and one /dev/shm: shm. Several hosts: a network.
Choice choose(std::span<const Identity> identities);

/// [ranks]: for each rank the first one that it shares memory with: same host, user and /dev/shm.
/// Labels of the domains (core/domains.hpp) of a group on several hosts.
std::vector<int> hosts_of(std::span<const Identity> identities);

}  // namespace ferry::fabric

#include "fabric/identity.hpp"

#include <cstring>
#include <ferry/error.hpp>

#include "base/open_files.hpp"
#include "base/text.hpp"
#include "platform/host.hpp"

namespace ferry::fabric {
namespace {

constexpr std::uint64_t kMagic = 0x3144495952524546;  // "FERRYID1"

/// The part of an Identity without text; the three texts follow it.
struct Fixed {
  std::uint64_t magic = kMagic;
  ProcessName process{};
  std::uint64_t shm_device = 0;
  std::uint64_t user = 0;
  std::uint32_t boot_id_bytes = 0;
  std::uint32_t host_bytes = 0;
  std::uint64_t problem_bytes = 0;
};

constexpr std::size_t kMostProblem = 300;

std::string describe(const Identity& identity, std::size_t rank) {
  return "rank " + std::to_string(rank) + " on host " +
         (identity.host.empty() ? "(no name)" : identity.host) + " (pid " +
         std::to_string(identity.process.pid) + ")";
}

bool same_host(const Identity& a, const Identity& b) {
  return a.boot_id == b.boot_id && (!a.boot_id.empty() || a.host == b.host);
}

}  // namespace

Identity this_identity() {
  Identity identity;
  int error = 0;
  identity.boot_id = boot_id(error);
  if (too_many_files(error)) identity.problem = error_text(error);
  identity.host = host_name();
  identity.process = this_process();
  identity.shm_device = shared_memory_place();
  identity.user = user_id();
  return identity;
}

std::vector<std::byte> to_bytes(const Identity& identity) {
  const Fixed fixed{.process = identity.process,
                    .shm_device = identity.shm_device,
                    .user = identity.user,
                    .boot_id_bytes = static_cast<std::uint32_t>(identity.boot_id.size()),
                    .host_bytes = static_cast<std::uint32_t>(identity.host.size()),
                    .problem_bytes = identity.problem.size()};
  std::vector<std::byte> bytes;
  const auto append = [&bytes](const void* data, std::size_t count) {
    const auto* first = static_cast<const std::byte*>(data);
    bytes.insert(bytes.end(), first, first + count);
  };
  append(&fixed, sizeof fixed);
  append(identity.boot_id.data(), identity.boot_id.size());
  append(identity.host.data(), identity.host.size());
  append(identity.problem.data(), identity.problem.size());
  return bytes;
}

Identity identity_from(std::span<const std::byte> bytes, int rank, int peer) {
  Fixed fixed;
  if (bytes.size() >= sizeof fixed) std::memcpy(&fixed, bytes.data(), sizeof fixed);
  const std::uint64_t before = std::uint64_t{sizeof fixed} + fixed.boot_id_bytes + fixed.host_bytes;
  if (bytes.size() < sizeof fixed || fixed.magic != kMagic || bytes.size() < before ||
      bytes.size() - before != fixed.problem_bytes) {
    throw Error(ErrorKind::mismatch,
                "rank " + std::to_string(rank) + ": what rank " + std::to_string(peer) +
                    " says about its process (" + std::to_string(bytes.size()) +
                    " bytes) cannot be read; use the same version of Ferry on all ranks",
                {.rank = rank, .peer = peer});
  }
  const auto* text = reinterpret_cast<const char*>(bytes.data()) + sizeof fixed;
  Identity identity;
  identity.boot_id.assign(text, fixed.boot_id_bytes);
  identity.host.assign(text + fixed.boot_id_bytes, fixed.host_bytes);
  identity.problem.assign(text + fixed.boot_id_bytes + fixed.host_bytes, fixed.problem_bytes);
  identity.process = fixed.process;
  identity.shm_device = fixed.shm_device;
  identity.user = fixed.user;
  return identity;
}

std::vector<int> hosts_of(std::span<const Identity> identities) {
  std::vector<int> labels;
  for (std::size_t r = 0; r < identities.size(); ++r) {
    const Identity& own = identities[r];
    std::size_t first = 0;
    for (; first < r; ++first) {
      const Identity& other = identities[first];
      if (own.shm_device != 0 && same_host(own, other) && own.shm_device == other.shm_device &&
          own.user == other.user) {
        break;
      }
    }
    labels.push_back(static_cast<int>(first));
  }
  return labels;
}

Choice choose(std::span<const Identity> identities) {
  for (std::size_t r = 0; r < identities.size(); ++r) {
    if (identities[r].problem.empty()) continue;
    return {Reachable::nothing,
            describe(identities[r], r) + ": " + printable(identities[r].problem, kMostProblem),
            static_cast<int>(r), ErrorKind::exhausted};
  }
  bool one_process = true;
  for (std::size_t r = 0; r < identities.size(); ++r) {
    const Identity& first = identities.front();
    const Identity& other = identities[r];
    const bool one_host = same_host(first, other);
    one_process = one_process && one_host && first.process == other.process;
    if (one_process) continue;
    const std::string who = describe(first, 0) + " and " + describe(other, r);
    std::string problem;
    Reachable by = Reachable::nothing;
    if (!one_host) {
      problem = who +
                " run on different hosts, which share no memory; start all ranks on one host, or "
                "join them by a network (fabric ofi)";
      by = Reachable::network;
    } else if (first.shm_device == 0 || other.shm_device == 0) {
      problem = who +
                " are processes of one host, but one of them has no /dev/shm; mount a tmpfs "
                "there";
    } else if (first.shm_device != other.shm_device) {
      problem = who +
                " see different /dev/shm (two containers?); share it between them, for "
                "example with --ipc=host";
    } else if (first.user != other.user) {
      problem = who + " belong to different users (" + std::to_string(first.user) + " and " +
                std::to_string(other.user) + "); shared memory is for one user";
    }
    if (!problem.empty()) {
      return {by, problem, static_cast<int>(r), ErrorKind::unsupported};
    }
  }
  return {one_process ? Reachable::local : Reachable::shm, {}, -1, ErrorKind::unsupported};
}

}  // namespace ferry::fabric

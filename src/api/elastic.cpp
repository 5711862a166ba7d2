#include "api/elastic.hpp"

#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "api/agreement.hpp"
#include "core/check.hpp"
#include "cuda/engine.hpp"
#include "engine/membership/aside.hpp"
#include "fabric/domains/domain_fabric.hpp"
#include "fabric/domains/shared_doors.hpp"
#include "fabric/lobby.hpp"
#include "fabric/ofi/ofi.hpp"
#include "fabric/segment_handle.hpp"
#include "fabric/shm/shm.hpp"
#include "host/throughput/engine.hpp"

namespace ferry {
namespace {

fabric::LobbyName lobby_name(const Bootstrap& bootstrap, const GroupConfig& config) {
  const std::string job = bootstrap.job();
  return {"\"" + config.elastic + "\"" + (job.empty() ? job : " of the job at " + job),
          bootstrap.job_key()};
}

[[noreturn]] void throw_unsupported(int rank, const std::string& got) {
  throw Error(
      ErrorKind::unsupported,
      "Group: elastic: got " + got + "; expected at most " +
          std::to_string(engine::SeatTraits::kSeats) +
          " ranks as processes (fabric shm), in one domain, or with backend host in several "
          "that libfabric joins (network ofi)",
      {rank, -1, "Group: elastic", 0, 0, 0});
}

std::string spell_domains(const GroupConfig& config, int domains) {
  return std::to_string(domains) + " domains, backend " + std::string(name_of(config.backend));
}

/// What a process that joins must know: the domain of each rank, then what its network needs.
std::vector<std::byte> invitation_of(const Domains& domains, const fabric::Fabric& fabric) {
  if (domains.count() == 1) return {};
  std::vector<std::uint16_t> labels;
  for (int rank = 0; rank < domains.ranks(); ++rank) {
    labels.push_back(static_cast<std::uint16_t>(domains.of(rank)));
  }
  const auto first = std::as_bytes(std::span(labels));
  std::vector<std::byte> all(first.begin(), first.end());
  const auto network = fabric.invitation();
  all.insert(all.end(), network.begin(), network.end());
  return all;
}

/// The domains that an invitation says; its rest is left.
Domains take_domains(std::span<const std::byte>& invitation, int rank, int size) {
  if (invitation.empty()) return Domains::blocks(size, 0);
  std::vector<std::uint16_t> labels(static_cast<std::size_t>(size));
  const std::size_t bytes = labels.size() * sizeof(std::uint16_t);
  if (invitation.size() < bytes) {
    throw Error(ErrorKind::mismatch,
                "Group: rank " + std::to_string(rank) + " cannot join: what the group shows has " +
                    std::to_string(invitation.size()) + " bytes, expected at least " +
                    std::to_string(bytes) + "; it has other ranks, or another version of Ferry",
                {rank, -1, "Group: elastic", 0, 0, 0});
  }
  std::memcpy(labels.data(), invitation.data(), bytes);
  invitation = invitation.subspan(bytes);
  return Domains(std::vector<int>(labels.begin(), labels.end()));
}

/// By the directory that all hosts share, if there is one.
fabric::LookElsewhere look_elsewhere(const GroupConfig& config, const fabric::LobbyName& name,
                                     int rank, int size) {
  if (config.arbiter.empty()) return {};
  const fabric::SharedDoors doors(config.arbiter, name, rank, size);
  const auto find = [doors, rank]() -> std::optional<fabric::FoundElsewhere> {
    const auto all = doors.list();
    if (all.empty()) return std::nullopt;
    for (const fabric::SharedDoor& door : all) {
      if (door.group == all.front().group) continue;
      throw Error(ErrorKind::mismatch,
                  "Group: rank " + std::to_string(rank) +
                      " wants to join, but two groups of that name show themselves in the "
                      "arbiter's directory: ranks " +
                      std::to_string(all.front().there.rank) + " and " +
                      std::to_string(door.there.rank) + "; give each another port",
                  {.rank = rank, .peer = door.there.rank});
    }
    return fabric::FoundElsewhere{all.front().group, all.front().there};
  };
  const std::string late = "Group: rank " + std::to_string(rank) +
                           " wants to join, but the arbiter's directory does not answer";
  return [find, late, deadline = config.deadline] {
    return engine::at_most_for<std::optional<fabric::FoundElsewhere>>(deadline, late, find);
  };
}

}  // namespace

void open_lobby(const Bootstrap& bootstrap, const GroupConfig& config, const Inside& inside,
                fabric::Fabric& fabric) {
  if (config.elastic.empty()) return;
  const int rank = bootstrap.rank(), size = bootstrap.size();
  const bool gpus_apart = config.backend == Backend::cuda && inside.domains.count() > 1;
  if (fabric.lobby() == nullptr || gpus_apart) {
    throw_unsupported(rank, spell_domains(config, inside.domains.count()) + ", fabric " +
                                std::string(fabric.name()));
  }
  if (size > engine::SeatTraits::kSeats) throw_unsupported(rank, std::to_string(size) + " ranks");
  fabric.lobby()->open({lobby_name(bootstrap, config), config_text(config, size), 0,
                        invitation_of(inside.domains, fabric)});
}

namespace {

/// Of a process without a store.
void check_elastic(const GroupConfig& config, int rank, int size, const char* expected) {
  if (config.elastic.empty()) {
    refuse("Group", "elastic", "no name, with a bootstrap that begins or joins", expected);
  }
  const bool shm = config.fabric == FabricKind::shm || config.fabric == FabricKind::automatic;
  if (!shm) throw_unsupported(rank, "fabric " + std::string(name_of(config.fabric)));
  if (size > engine::SeatTraits::kSeats) throw_unsupported(rank, std::to_string(size) + " ranks");
}

}  // namespace

std::shared_ptr<Engine> begin_group(const Bootstrap& bootstrap, GroupConfig config) {
  complete_config(config);
  const int rank = bootstrap.rank(), size = bootstrap.size();
  check_elastic(config, rank, size, "a name, by which the others find it");
  const Domains domains = Domains::blocks(size, config.domain_size);
  const bool several = domains.count() > 1;
  if (several && (config.backend == Backend::cuda || config.network != FabricKind::ofi)) {
    throw_unsupported(rank, spell_domains(config, domains.count()) + ", network " +
                                std::string(name_of(config.network)));
  }
  const fabric::LobbyName name = lobby_name(bootstrap, config);
  const Socket turn = fabric::turn_to_begin(rank, name);
  auto fabric = fabric::begin_shm_fabric(rank, size, name);
  if (several) {
    // Nobody on another host could find the group without a directory.
    const int local = config.arbiter.empty() ? size : config.domain_size;
    fabric = fabric::make_domain_fabric(
        domains, std::move(fabric),
        fabric::begin_ofi_fabric(rank, size, config.ofi, local, config.deadline,
                                 bootstrap.own_address()));
  }
  fabric->lobby()->open(
      {name, config_text(config, size), 0, invitation_of(domains, *fabric), true});
  if (config.backend == Backend::cuda) {
    return cuda::make_lone_cuda_engine(config, std::move(fabric), 0);
  }
  return host::begin_host_engine(config, domains, std::move(fabric));
}

std::shared_ptr<Engine> join_group(const Bootstrap& bootstrap, GroupConfig config) {
  complete_config(config);
  const int rank = bootstrap.rank(), size = bootstrap.size();
  check_elastic(config, rank, size,
                "the name that the group was made with; one without takes nobody in");
  const std::string text = config_text(config, size);
  const std::uint64_t ticket = fabric::random_key(rank)[0] | fabric::kTicketBit;
  const fabric::LobbyName name = lobby_name(bootstrap, config);
  fabric::Met met = fabric::join_shm_fabric(
      rank, size, name, look_elsewhere(config, name, rank, size), config.deadline, config.on_wait);
  std::unique_ptr<fabric::Fabric> fabric = std::move(met.fabric);
  check_same(text, rank, met.there.text, met.there.rank);
  fabric->lobby()->open({name, text, ticket, met.there.invitation, met.there.begun});
  for (const fabric::Visitor& there : fabric->lobby()->visitors()) {
    check_same(text, rank, there.text, there.rank);
  }
  std::span<const std::byte> rest = met.there.invitation;
  if (config.backend == Backend::cuda) {
    return cuda::make_lone_cuda_engine(config, std::move(fabric), ticket);
  }
  const Domains domains = take_domains(rest, rank, size);
  if (domains.count() > 1) {
    fabric = fabric::make_domain_fabric(
        domains, std::move(fabric),
        fabric::join_ofi_fabric(rank, size, config.ofi, rest, config.deadline,
                                bootstrap.own_address()));
  }
  return host::join_host_engine(config, domains, std::move(fabric), ticket);
}

}  // namespace ferry

#include "api/wires.hpp"

#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "api/agreement.hpp"
#include "base/log.hpp"
#include "cuda/engine.hpp"
#include "fabric/domains/domain_fabric.hpp"
#include "fabric/identity.hpp"
#include "fabric/local/local.hpp"
#include "fabric/ofi/ofi.hpp"
#include "fabric/shm/shm.hpp"
#include "fabric/sim/sim.hpp"

namespace ferry {
namespace {

std::vector<fabric::Identity> identities_of(Bootstrap& bootstrap, const GroupConfig& config) {
  const auto mine = fabric::to_bytes(fabric::this_identity());
  const auto all = bootstrap.all_gather(mine, config.deadline, config.on_wait);
  std::vector<fabric::Identity> identities;
  for (int peer = 0; peer < bootstrap.size(); ++peer) {
    identities.push_back(
        fabric::identity_from(all[static_cast<std::size_t>(peer)], bootstrap.rank(), peer));
  }
  return identities;
}

bool shares_nothing(FabricKind kind) {
  return kind == FabricKind::sim || kind == FabricKind::ofi;
}

/// Of ranks that shared memory alone does not join: the hosts are the domains.
Inside choose_hosts(const GroupConfig& config, std::span<const fabric::Identity> identities,
                    int rank) {
  const Domains hosts(fabric::hosts_of(identities));
  if (config.domain_size > 0) {
    throw Error(ErrorKind::invalid_argument,
                "Group: domain_size: got " + std::to_string(config.domain_size) +
                    " with ranks on " + std::to_string(hosts.count()) +
                    " hosts; expected 0, which makes every host a domain",
                {rank, -1, "Group: domains", 0, 0, 0});
  }
  if (hosts.count() == hosts.ranks()) return {FabricKind::ofi, hosts};
  return {FabricKind::shm, hosts, true};
}

Inside choose_inside(Bootstrap& bootstrap, const GroupConfig& config) {
  const auto blocks = [&](FabricKind kind) {
    return Inside{kind,
                  Domains::blocks(bootstrap.size(), shares_nothing(kind) ? 1 : config.domain_size)};
  };
  if (config.fabric != FabricKind::automatic) return blocks(config.fabric);
  const std::vector<fabric::Identity> identities = identities_of(bootstrap, config);
  const fabric::Choice choice = fabric::choose(identities);
  switch (choice.by) {
    case fabric::Reachable::local: return blocks(FabricKind::local);
    case fabric::Reachable::shm: return blocks(FabricKind::shm);
    case fabric::Reachable::network: return choose_hosts(config, identities, bootstrap.rank());
    case fabric::Reachable::nothing: break;
  }
  throw Error(choice.kind, "Group: " + choice.problem,
              {bootstrap.rank(), choice.peer, "Group: fabric", 0, 0, 0});
}

/// Of the log: what decided.
std::string why(const GroupConfig& config, const Inside& inside) {
  if (config.fabric != FabricKind::automatic) {
    return "asked for: fabric=" + std::string(name_of(config.fabric));
  }
  const std::string hosts = std::to_string(inside.domains.count()) + " hosts";
  if (inside.hosts) return "ranks on " + hosts + ": shared memory in each, libfabric between them";
  switch (inside.kind) {
    case FabricKind::local: return "all ranks are threads of one process";
    case FabricKind::shm: return "all ranks are processes of one user on one host";
    default: return "ranks on " + hosts + ", one on each";
  }
}

std::unique_ptr<fabric::Fabric> make_sim(Bootstrap& bootstrap, const GroupConfig& config) {
  fabric::SimOptions options;
  options.seed = config.sim_seed;
  return fabric::make_sim_fabric(bootstrap, options, config.deadline, config.on_wait);
}

std::unique_ptr<fabric::Fabric> make_ofi(Bootstrap& bootstrap, const GroupConfig& config) {
  const std::string gpu =
      config.backend == Backend::cuda ? cuda::pci_bus_id(config.device) : std::string();
  return fabric::make_ofi_fabric(bootstrap, config.ofi, config.deadline, config.on_wait, gpu);
}

std::unique_ptr<fabric::Fabric> make_fabric(Bootstrap& bootstrap, const GroupConfig& config,
                                            const Inside& inside) {
  switch (inside.kind) {
    case FabricKind::shm:
      if (!inside.hosts) {
        return fabric::make_shm_fabric(bootstrap, config.deadline, config.on_wait);
      }
      return fabric::make_shm_fabric(bootstrap, inside.domains, config.deadline, config.on_wait);
    case FabricKind::sim: return make_sim(bootstrap, config);
    case FabricKind::ofi: return make_ofi(bootstrap, config);
    default: return fabric::make_local_fabric(bootstrap, config.deadline, config.on_wait);
  }
}

}  // namespace

Inside agree_on_wires(Bootstrap& bootstrap, GroupConfig& config) {
  std::optional<Error> invalid;
  try {
    complete_config(config);
  } catch (const Error& error) {
    invalid = error;
  }
  agree_on(bootstrap, config, invalid);
  bootstrap.set_stage("Group: fabric");
  Inside inside = choose_inside(bootstrap, config);
  if (logs(LogLevel::info)) {
    log(LogLevel::info, bootstrap.rank(), "fabric",
        {{"fabric", std::string(name_of(inside.kind))},
         {"domains", inside.domains.count()},
         {"why", why(config, inside)}});
  }
  return inside;
}

std::unique_ptr<fabric::Fabric> make_wires(Bootstrap& bootstrap, const GroupConfig& config,
                                           const Inside& inside) {
  auto own = make_fabric(bootstrap, config, inside);
  if (inside.domains.count() == 1 || shares_nothing(inside.kind)) return own;
  std::unique_ptr<fabric::Fabric> network;
  if (config.network == FabricKind::sim) network = make_sim(bootstrap, config);
  if (config.network == FabricKind::ofi || (inside.hosts && !network)) {
    network = make_ofi(bootstrap, config);
  }
  return fabric::make_domain_fabric(inside.domains, std::move(own), std::move(network));
}

cuda::DomainWires wires_inside(DomainBootstrap& part, const GroupConfig& config,
                               const Inside& inside) {
  const auto make_inside = [&] {
    return inside.kind == FabricKind::shm
               ? fabric::make_shm_fabric(part, config.deadline, config.on_wait)
               : fabric::make_local_fabric(part, config.deadline, config.on_wait);
  };
  const auto finish = [&](const std::optional<Error>& failed) {
    part.finish(failed, config.deadline, config.on_wait);
  };
  return {part, make_inside, finish};
}

}  // namespace ferry

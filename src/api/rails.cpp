#include "api/rails.hpp"

#include <optional>
#include <thread>
#include <utility>

#include "api/domain_bootstrap.hpp"
#include "host/collectives/engine.hpp"

namespace ferry {
namespace {

GroupConfig crossing_config(GroupConfig config) {
  config.backend = Backend::host;
  config.memory_bytes = 0;
  config.deadline += config.deadline / 4;
  if (config.on_wait) {
    config.on_wait = [caller = std::this_thread::get_id(), ask = std::move(config.on_wait)] {
      if (std::this_thread::get_id() == caller) ask();
    };
  }
  return config;
}

/// Every rank of a rail is a domain.
Inside on_rail(const Inside& inside) {
  return {inside.hosts ? FabricKind::ofi : inside.kind, Domains::blocks(inside.domains.count(), 1),
          false};
}

}  // namespace

cuda::CollectiveWires make_rails(Bootstrap& bootstrap, const GroupConfig& config,
                                 const Inside& inside) {
  const GroupConfig crossing = crossing_config(config);
  const Domains& domains = inside.domains;
  cuda::CollectiveWires made;
  for (auto* each : {&made.calls, &made.all}) {
    *each = host::make_host_collectives(bootstrap, crossing, domains,
                                        make_wires(bootstrap, config, inside));
  }
  const int place = domains.index(bootstrap.rank());
  const bool rides = place < domains.full_rails();
  DomainBootstrap part(bootstrap,
                       rides ? domains.on_rail(place) : std::vector<int>{bootstrap.rank()});
  std::optional<Error> failed;
  try {
    if (rides) {
      const Inside rail = on_rail(inside);
      made.rail = host::make_host_collectives(part, crossing, rail.domains,
                                              make_wires(part, config, rail), domains.ranks());
    }
  } catch (const Error& error) {
    failed = error;
  }
  part.finish(failed, config.deadline, config.on_wait);
  return made;
}

}  // namespace ferry

#include "api/elastic.hpp"

#include <string>
#include <utility>

#include "api/agreement.hpp"
#include "core/check.hpp"
#include "fabric/lobby.hpp"
#include "fabric/segment_handle.hpp"
#include "fabric/shm/shm.hpp"
#include "host/throughput/engine.hpp"

namespace ferry {
namespace {

std::string lobby_name(const Bootstrap& bootstrap, const GroupConfig& config) {
  return "\"" + config.elastic + "\"" +
         (bootstrap.job().empty() ? std::string() : " of the job at " + bootstrap.job());
}

[[noreturn]] void throw_unsupported(const Bootstrap& bootstrap, const std::string& got) {
  throw Error(ErrorKind::unsupported,
              "Group: elastic: got " + got + "; expected at most " +
                  std::to_string(engine::SeatTraits::kSeats) +
                  " ranks as processes of one host and one domain (fabric shm), backend host",
              {bootstrap.rank(), -1, "Group: elastic", 0, 0, 0});
}

}  // namespace

void open_lobby(const Bootstrap& bootstrap, const GroupConfig& config, const Inside& inside,
                fabric::Fabric& fabric) {
  if (config.elastic.empty()) return;
  if (fabric.lobby() == nullptr || inside.domains.count() > 1) {
    throw_unsupported(bootstrap, std::to_string(inside.domains.count()) + " domains, fabric " +
                                     std::string(fabric.name()));
  }
  if (fabric.size() > engine::SeatTraits::kSeats) {
    throw_unsupported(bootstrap, std::to_string(fabric.size()) + " ranks");
  }
  fabric.lobby()->open(lobby_name(bootstrap, config), config_text(config, bootstrap.size()), 0);
}

std::shared_ptr<Engine> join_group(const Bootstrap& bootstrap, GroupConfig config) {
  complete_config(config);
  const int rank = bootstrap.rank(), size = bootstrap.size();
  if (config.elastic.empty()) {
    refuse("Group", "elastic", "no name, with a bootstrap that joins",
           "the name that the group was made with");
  }
  const bool shm = config.fabric == FabricKind::shm || config.fabric == FabricKind::automatic;
  if (!shm) throw_unsupported(bootstrap, "fabric " + std::string(name_of(config.fabric)));
  if (size > engine::SeatTraits::kSeats) {
    throw_unsupported(bootstrap, std::to_string(size) + " ranks");
  }
  const std::string text = config_text(config, size);
  const fabric::JobKey ticket = fabric::random_key(rank);
  const std::string name = lobby_name(bootstrap, config);
  auto fabric = fabric::join_shm_fabric(rank, size, name, config.deadline, config.on_wait);
  fabric->lobby()->open(name, text, ticket[0] | 1);
  for (const fabric::Visitor& there : fabric->lobby()->visitors()) {
    check_same(text, rank, there.text, there.rank);
  }
  return host::join_host_engine(config, std::move(fabric), ticket[0] | 1);
}

}  // namespace ferry

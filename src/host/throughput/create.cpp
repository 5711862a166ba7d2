// Creation of a host engine: the only time at which the bootstrap is used.
#include <algorithm>
#include <utility>
#include <vector>

#include "core/layout.hpp"
#include "engine/create.hpp"
#include "engine/membership/arbiter_creation.hpp"
#include "fabric/lobby.hpp"
#include "host/throughput/engine.hpp"

namespace ferry::host {
namespace {

constexpr std::size_t kPage = 4096;

std::size_t control_bytes(const GroupConfig& config, const Domains& domains,
                          std::size_t body_bytes) {
  return make_control_layout(domains.ranks(), message_bytes(config.experts, domains, body_bytes))
      .bytes;
}

std::size_t arena_bytes(const GroupConfig& config) {
  return round_up(std::max(config.memory_bytes, kPage), kPage);
}

}  // namespace

MemoryStats host_memory_hint(const GroupConfig& config, int ranks) {
  return {control_bytes(config, Domains::blocks(ranks, config.domain_size), 0), arena_bytes(config),
          0, 0};
}

std::shared_ptr<HostEngine> make_host_engine(Bootstrap& bootstrap, const GroupConfig& config,
                                             const Domains& domains,
                                             std::unique_ptr<fabric::Fabric> fabric,
                                             std::size_t body_bytes) {
  auto memory = std::make_shared<Memory>(std::move(fabric));
  fabric::Fabric& wire = *memory->fabric;
  fabric::Segment control, arena;
  engine::ArbiterCreation arbiter(config, domains, wire, wire.rank() == 0);
  const auto cards = engine::together(bootstrap, config, "Group: memory", [&] {
    arbiter.create();
    clear_doors(config, wire);
    control = wire.register_memory(control_bytes(config, domains, body_bytes));
    arena = wire.register_memory(arena_bytes(config));
    return engine::bytes_of({engine::card_of(control), engine::card_of(arena)});
  });
  memory->arena.add(arena);
  engine::together(bootstrap, config, "Group: attach", [&] {
    engine::attach_all(wire, cards, {engine::card_of(control), engine::card_of(arena)});
    arbiter.check();
    show_card(config, wire);
    return std::vector<std::byte>();
  });
  arbiter.keep();
  wire.seal(control.id);
  wire.seal(arena.id);
  return std::make_shared<HostEngine>(std::move(memory), config, domains, control, body_bytes);
}

namespace {

/// Without a bootstrap: nobody else is there yet, as far as this process knows.
std::shared_ptr<HostEngine> make_alone(const GroupConfig& config, const Domains& domains,
                                       std::unique_ptr<fabric::Fabric> fabric) {
  auto memory = std::make_shared<Memory>(std::move(fabric));
  fabric::Fabric& wire = *memory->fabric;
  const fabric::Segment control = wire.register_memory(control_bytes(config, domains, 0));
  const fabric::Segment arena = wire.register_memory(arena_bytes(config));
  wire.seal(control.id);  // the others open its descriptors
  wire.seal(arena.id);
  memory->arena.add(arena);
  for (int peer = 0; peer < wire.size(); ++peer) {
    if (peer != wire.rank() && wire.lobby()->has(peer)) wire.lobby()->vacate(peer);
  }
  auto engine = std::make_shared<HostEngine>(std::move(memory), config, domains, control, 0);
  show_card(config, wire);
  return engine;
}

}  // namespace

std::shared_ptr<HostEngine> begin_host_engine(const GroupConfig& config, const Domains& domains,
                                              std::unique_ptr<fabric::Fabric> fabric) {
  fabric::Fabric& wire = *fabric;
  const auto turn = turn_to_begin(config, wire);
  check_only_group(config, wire);
  engine::ArbiterCreation arbiter(config, domains, wire, true);
  arbiter.create();
  auto engine = make_alone(config, domains, std::move(fabric));
  arbiter.keep();
  check_only_group(config, wire);  // where hosts do not share locks, of two that come at once
  engine->begin();
  return engine;
}

std::shared_ptr<HostEngine> join_host_engine(const GroupConfig& config, const Domains& domains,
                                             std::unique_ptr<fabric::Fabric> fabric,
                                             std::uint64_t ticket) {
  engine::check_arbiter(config, domains, *fabric);
  auto engine = make_alone(config, domains, std::move(fabric));
  engine->join(ticket);
  return engine;
}

}  // namespace ferry::host

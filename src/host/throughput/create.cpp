// Creation of a host engine: the only time at which the bootstrap is used.
#include <algorithm>
#include <utility>
#include <vector>

#include "core/layout.hpp"
#include "engine/create.hpp"
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

std::shared_ptr<const engine::Arbiter> arbiter_of(const GroupConfig& config, const Domains& domains,
                                                  const fabric::Fabric& fabric) {
  if (config.arbiter.empty()) return nullptr;
  const int rank = fabric.rank(), size = fabric.size();
  if (domains.count() == 1 || !fabric.carries_texts() || size > engine::SeatTraits::kSeats) {
    throw Error(ErrorKind::unsupported,
                "Group: arbiter: got " + std::to_string(size) + " ranks in " +
                    std::to_string(domains.count()) + " domains over " +
                    std::string(fabric.name()) + "; expected at most " +
                    std::to_string(engine::SeatTraits::kSeats) +
                    " in several domains that libfabric joins (network ofi)",
                {rank, -1, "Group: arbiter", 0, 0, 0});
  }
  return std::make_shared<engine::Arbiter>(config.arbiter, fabric.job(), rank, size);
}

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
  const auto cards = engine::together(bootstrap, config, "Group: memory", [&] {
    const auto arbiter = arbiter_of(config, domains, wire);
    if (arbiter && wire.rank() == 0) arbiter->create();
    control = wire.register_memory(control_bytes(config, domains, body_bytes));
    arena = wire.register_memory(arena_bytes(config));
    return engine::bytes_of({engine::card_of(control), engine::card_of(arena)});
  });
  memory->arena.add(arena);
  engine::together(bootstrap, config, "Group: attach", [&] {
    engine::attach_all(wire, cards, {engine::card_of(control), engine::card_of(arena)});
    if (const auto arbiter = arbiter_of(config, domains, wire)) arbiter->await();
    return std::vector<std::byte>();
  });
  wire.seal(control.id);
  wire.seal(arena.id);
  return std::make_shared<HostEngine>(std::move(memory), config, domains, control, body_bytes);
}

std::shared_ptr<HostEngine> join_host_engine(const GroupConfig& config, const Domains& domains,
                                             std::unique_ptr<fabric::Fabric> fabric,
                                             std::uint64_t ticket) {
  auto memory = std::make_shared<Memory>(std::move(fabric));
  fabric::Fabric& wire = *memory->fabric;
  if (const auto arbiter = arbiter_of(config, domains, wire)) arbiter->await();
  const fabric::Segment control = wire.register_memory(control_bytes(config, domains, 0));
  const fabric::Segment arena = wire.register_memory(arena_bytes(config));
  wire.seal(control.id);  // the others open its descriptors
  wire.seal(arena.id);
  memory->arena.add(arena);
  for (int peer = 0; peer < wire.size(); ++peer) {  // until it is known who is there
    if (peer != wire.rank() && wire.lobby()->has(peer)) wire.lobby()->vacate(peer);
  }
  auto engine = std::make_shared<HostEngine>(std::move(memory), config, domains, control, 0);
  if (wire.carries_texts()) wire.lobby()->show(wire.card());
  engine->join(ticket);
  return engine;
}

}  // namespace ferry::host

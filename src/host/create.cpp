// Creation of a host engine: the only time at which the bootstrap is used.
#include <algorithm>
#include <cstring>
#include <utility>

#include "core/layout.hpp"
#include "host/engine.hpp"

namespace ferry::host {
namespace {

constexpr std::size_t kPage = 4096;

std::size_t control_bytes(const GroupConfig& config, int ranks) {
  return make_control_layout(ranks, message_bytes(config.experts, ranks)).bytes;
}

std::size_t arena_bytes(const GroupConfig& config) {
  return round_up(std::max(config.memory_bytes, kPage), kPage);
}

/// One segment's id, size and handle, as it crosses at creation.
struct Card {
  std::uint32_t id = 0;
  std::uint32_t handle_bytes = 0;
  std::uint64_t bytes = 0;
  std::byte handle[fabric::kMaxHandleBytes]{};
};

Card card_of(const fabric::Segment& segment) {
  Card card;
  card.id = segment.id;
  card.bytes = segment.bytes;
  card.handle_bytes = static_cast<std::uint32_t>(segment.handle.size());
  std::memcpy(card.handle, segment.handle.data(), segment.handle.size());
  return card;
}

void attach_all(fabric::Fabric& fabric, const std::vector<std::vector<std::byte>>& cards) {
  for (int peer = 0; peer < fabric.size(); ++peer) {
    const auto& bytes = cards[static_cast<std::size_t>(peer)];
    Card two[2];
    if (bytes.size() != sizeof(two)) {
      throw Error(ErrorKind::mismatch, "Group: rank " + std::to_string(peer) +
                                           " sent " + std::to_string(bytes.size()) +
                                           " bytes of segment handles, expected " +
                                           std::to_string(sizeof(two)));
    }
    std::memcpy(two, bytes.data(), sizeof(two));
    if (peer == fabric.rank()) continue;
    for (const Card& card : two) {
      if (card.handle_bytes > sizeof(card.handle)) {
        throw Error(ErrorKind::mismatch,
                    "Group: rank " + std::to_string(peer) + " sent an impossible handle");
      }
      fabric.attach(peer, card.id, card.bytes, {card.handle, card.handle_bytes});
    }
  }
}

}  // namespace

MemoryUse host_memory_hint(const GroupConfig& config, int ranks) {
  return {control_bytes(config, ranks), arena_bytes(config), 0, 0};
}

std::shared_ptr<Engine> make_host_engine(Bootstrap& bootstrap, const GroupConfig& config,
                                         std::unique_ptr<fabric::Fabric> fabric) {
  auto memory = std::make_shared<Memory>(std::move(fabric));
  fabric::Fabric& wire = *memory->fabric;
  const fabric::Segment control = wire.register_memory(control_bytes(config, wire.size()));
  const fabric::Segment arena = wire.register_memory(arena_bytes(config));
  memory->arena.add(arena);

  const Card mine[2] = {card_of(control), card_of(arena)};
  const auto cards =
      bootstrap.all_gather(std::as_bytes(std::span(mine)), config.deadline, config.on_wait);
  attach_all(wire, cards);
  bootstrap.all_gather({}, config.deadline, config.on_wait);  // everybody has attached
  wire.seal(control.id);
  wire.seal(arena.id);
  return std::make_shared<HostEngine>(std::move(memory), config, control);
}

}  // namespace ferry::host

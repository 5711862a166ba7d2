// Creation of a host engine: the only time at which the bootstrap is used.
#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

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
using Cards = std::array<Card, 2>;  // control segment, arena

Card card_of(const fabric::Segment& segment) {
  Card card;
  card.id = segment.id;
  card.bytes = segment.bytes;
  card.handle_bytes = static_cast<std::uint32_t>(segment.handle.size());
  std::memcpy(card.handle, segment.handle.data(), segment.handle.size());
  return card;
}

/// A step that every rank takes and that may fail on one: all learn of it, so nobody waits for a
/// rank that gave up. Returns what the ranks' steps yielded.
std::vector<std::vector<std::byte>> together(Bootstrap& bootstrap, const GroupConfig& config,
                                             const char* stage,
                                             const std::function<std::vector<std::byte>()>& step) {
  std::exception_ptr failure;
  std::string message(1, '\0');  // first byte 1: the rest says why this rank failed
  try {
    const std::vector<std::byte> bytes = step();
    message.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  } catch (const std::exception& error) {
    failure = std::current_exception();
    message = std::string(1, '\1') + error.what();
  }
  auto all =
      bootstrap.all_gather(std::as_bytes(std::span(message)), config.deadline, config.on_wait);
  if (failure) std::rethrow_exception(failure);
  for (std::size_t peer = 0; peer < all.size(); ++peer) {
    const std::string theirs(reinterpret_cast<const char*>(all[peer].data()), all[peer].size());
    if (theirs.empty() || theirs[0] != '\0') {
      throw Error(ErrorKind::peer_failed,
                  std::string(stage) + ": rank " + std::to_string(peer) +
                      " could not go on: " + theirs.substr(theirs.empty() ? 0 : 1, 1000),
                  {bootstrap.rank(), static_cast<int>(peer), stage, 0, 0, 0});
    }
    all[peer].erase(all[peer].begin());
  }
  return all;
}

void attach_all(fabric::Fabric& fabric, const std::vector<std::vector<std::byte>>& cards,
                const Cards& mine) {
  for (int peer = 0; peer < fabric.size(); ++peer) {
    const auto& bytes = cards[static_cast<std::size_t>(peer)];
    Cards theirs;
    if (bytes.size() != sizeof(theirs)) {
      throw Error(ErrorKind::mismatch,
                  "Group: rank " + std::to_string(peer) + " sent " + std::to_string(bytes.size()) +
                      " bytes of segment handles, expected " + std::to_string(sizeof(theirs)));
    }
    std::memcpy(theirs.data(), bytes.data(), sizeof(theirs));
    if (peer == fabric.rank()) continue;
    for (std::size_t i = 0; i < theirs.size(); ++i) {  // flags are written there unchecked later on
      if (theirs[i].id != mine[i].id || theirs[i].bytes != mine[i].bytes) {
        throw Error(ErrorKind::mismatch,
                    "Group: rank " + std::to_string(peer) + " registered " +
                        std::to_string(theirs[i].bytes) + " bytes as segment " +
                        std::to_string(theirs[i].id) + ", expected " +
                        std::to_string(mine[i].bytes) + " bytes as segment " +
                        std::to_string(mine[i].id),
                    {fabric.rank(), peer, "Group: attach", 0, 0, 0});
      }
    }
    for (const Card& card : theirs) {
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
  fabric::Segment control, arena;
  const auto cards = together(bootstrap, config, "Group: memory", [&] {
    control = wire.register_memory(control_bytes(config, wire.size()));
    arena = wire.register_memory(arena_bytes(config));
    const Cards mine{card_of(control), card_of(arena)};
    const auto bytes = std::as_bytes(std::span(mine));
    return std::vector<std::byte>(bytes.begin(), bytes.end());
  });
  memory->arena.add(arena);
  together(bootstrap, config, "Group: attach", [&] {
    attach_all(wire, cards, {card_of(control), card_of(arena)});
    return std::vector<std::byte>();
  });
  wire.seal(control.id);
  wire.seal(arena.id);
  return std::make_shared<HostEngine>(std::move(memory), config, control);
}

}  // namespace ferry::host

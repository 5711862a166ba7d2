// By what processes that join find the ranks of an elastic group of several domains: the doors of
// this host (fabric/shm/door.hpp), and files in the arbiter's directory.
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/membership/aside.hpp"
#include "fabric/lobby.hpp"
#include "host/throughput/engine.hpp"

namespace ferry::host {
namespace {

/// So often the directory is read.
constexpr auto kReadPeriod = std::chrono::milliseconds(250);

std::string late_directory(int rank) {
  return "rank " + std::to_string(rank) +
         ": Group: elastic: the arbiter's directory did not answer within the deadline";
}

/// What the files show, as read last; reads them aside.
class SharedCards {
 public:
  explicit SharedCards(std::shared_ptr<const fabric::SharedDoors> doors)
      : doors_(std::move(doors)) {}

  std::vector<fabric::Elsewhere> read() {
    const auto now = std::chrono::steady_clock::now();
    if (!reading_.valid() && now >= next_) {
      next_ = now + kReadPeriod;
      reading_ = engine::Aside<Doors>([doors = doors_] { return doors->list(); });
    }
    if (!reading_.valid() || !reading_.ready_in(std::chrono::seconds(0))) return {};
    std::vector<fabric::Elsewhere> cards;
    for (fabric::SharedDoor& door : reading_.get()) {
      if (!door.there.card.empty()) cards.push_back({door.there.rank, std::move(door.there.card)});
    }
    return cards;
  }

 private:
  using Doors = std::vector<fabric::SharedDoor>;
  std::shared_ptr<const fabric::SharedDoors> doors_;
  std::chrono::steady_clock::time_point next_{};
  engine::Aside<Doors> reading_{};
};

/// Of a rank of an earlier group: one that ran here has, for no door of this host was found.
bool has_ended(const fabric::SharedDoor& door, const fabric::Fabric& fabric) {
  try {
    return fabric::proves_end(fabric.place_in(door.there.rank, door.there.card),
                              fabric.place_in(fabric.rank(), fabric.card()));
  } catch (const Error&) {  // such a card cannot be
    return false;
  }
}

}  // namespace

std::shared_ptr<const fabric::SharedDoors> shared_doors_of(const GroupConfig& config,
                                                           fabric::Fabric& fabric) {
  fabric::Lobby* lobby = fabric.lobby();
  const bool any = !config.arbiter.empty() && lobby != nullptr && lobby->is_open();
  if (!any || !fabric.carries_texts()) return nullptr;
  return std::make_shared<fabric::SharedDoors>(config.arbiter, lobby->opening().name, fabric.rank(),
                                               fabric.size());
}

void clear_doors(const GroupConfig& config, fabric::Fabric& fabric) {
  const auto doors = shared_doors_of(config, fabric);
  if (!doors || fabric.rank() != 0) return;
  engine::at_most_for<void>(config.deadline, late_directory(fabric.rank()),
                            [doors] { doors->clear(); });
}

std::optional<fabric::TurnToBegin> turn_to_begin(const GroupConfig& config,
                                                 fabric::Fabric& fabric) {
  const auto doors = shared_doors_of(config, fabric);
  if (!doors) return std::nullopt;
  return engine::at_most_for<fabric::TurnToBegin>(config.deadline, late_directory(fabric.rank()),
                                                  [doors] { return doors->turn_to_begin(); });
}

void check_only_group(const GroupConfig& config, fabric::Fabric& fabric) {
  const auto doors = shared_doors_of(config, fabric);
  if (!doors) return;
  const int rank = fabric.rank();
  const auto all = engine::at_most_for<std::vector<fabric::SharedDoor>>(
      config.deadline, late_directory(rank), [doors] { return doors->list(true); });
  for (const fabric::SharedDoor& door : all) {
    if (door.group == fabric.lobby()->group() || has_ended(door, fabric)) continue;
    const int other = door.there.rank;
    throw Error(ErrorKind::refused,
                "Group: rank " + std::to_string(rank) +
                    " wants to begin alone, but the arbiter's directory has the file of rank " +
                    std::to_string(other) +
                    " of a group of that name, on another host; join it, or, if none of its "
                    "processes runs any more, remove its files (ferry-door-…)",
                {.rank = rank, .peer = other});
  }
}

void show_card(const GroupConfig& config, fabric::Fabric& fabric) {
  fabric::Lobby* lobby = fabric.lobby();
  if (!fabric.carries_texts() || lobby == nullptr || !lobby->is_open()) return;
  const auto card = fabric.card();
  lobby->show(card);
  const auto doors = shared_doors_of(config, fabric);
  if (!doors) return;
  const fabric::Lobby::Opening& opening = lobby->opening();
  fabric::SharedDoor own{.group = lobby->group(),
                         .there = {.rank = fabric.rank(),
                                   .ticket = opening.ticket,
                                   .text = opening.text,
                                   .invitation = opening.invitation,
                                   .card = card,
                                   .begun = opening.begun}};
  engine::at_most_for<void>(config.deadline, late_directory(fabric.rank()),
                            [doors, own = std::move(own)] { doors->show(own); });
}

engine::Regroup::Cards shared_cards(std::shared_ptr<const fabric::SharedDoors> doors) {
  if (!doors) return {};
  const auto cards = std::make_shared<SharedCards>(std::move(doors));
  return [cards] { return cards->read(); };
}

}  // namespace ferry::host

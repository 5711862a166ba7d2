#include "core/experts/expert_table.hpp"

#include <algorithm>

namespace ferry {

bool ExpertTable::has(int seat, std::int32_t expert) const {
  return std::ranges::any_of(places(expert), [&](auto place) { return seat_of(place) == seat; });
}

std::int32_t ExpertTable::empty_place(int seat) const {
  for (int slot = 0; slot < slots_; ++slot) {
    const std::int32_t place = seat * slots_ + slot;
    if (expert_at(place) < 0) return place;
  }
  return -1;
}

void ExpertTable::put(std::int32_t place, std::int32_t expert) {
  expert_at_[index(place)] = expert;
  auto& all = places_of_[index(expert)];
  all.insert(std::ranges::lower_bound(all, place), place);
}

void ExpertTable::take(std::int32_t place) {
  std::erase(places_of_[index(expert_at(place))], place);
  expert_at_[index(place)] = -1;
}

std::vector<std::int32_t> ExpertTable::orphans(std::span<const std::uint8_t> live) const {
  std::vector<std::int32_t> all;
  for (std::int32_t expert = 0; expert < experts(); ++expert) {
    const auto lives = [&](auto place) { return live[index(seat_of(place))] != 0; };
    if (std::ranges::none_of(places(expert), lives)) all.push_back(expert);
  }
  return all;
}

CopyChoice ExpertTable::choice(int source, const Domains& domains,
                               const std::vector<bool>& masked) const {
  CopyChoice choice;
  choice.first.push_back(0);
  for (std::int32_t expert = 0; expert < experts(); ++expert) {
    const std::size_t before = choice.places.size();
    const auto add = [&](bool near_alone) {
      for (const std::int32_t place : places(expert)) {
        const int seat = seat_of(place);
        const bool open = masked.empty() || !masked[index(seat)];
        if (open && (!near_alone || domains.together(source, seat))) choice.places.push_back(place);
      }
    };
    add(true);
    if (choice.places.size() == before) add(false);
    choice.first.push_back(static_cast<std::int32_t>(choice.places.size()));
  }
  return choice;
}

}  // namespace ferry

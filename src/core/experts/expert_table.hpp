// Which places hold which expert, when experts have copies and seats hold any number of them.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "core/device.hpp"
#include "core/domains.hpp"

namespace ferry {

/// Spreads the tokens of a source over `copies`, the same way wherever it is computed.
FERRY_FN constexpr std::int64_t copy_for(int source, std::int64_t token, std::int64_t copies) {
  auto x = static_cast<std::uint64_t>(token) * 0x9e3779b97f4a7c15ull +
           static_cast<std::uint64_t>(source) * 0xd1b54a32d192ed03ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return static_cast<std::int64_t>((x >> 32) % static_cast<std::uint64_t>(copies));
}

/// The copies that one source sends to: those of its own domain if there are any, otherwise all.
struct CopyChoice {
  std::vector<std::int32_t> first;   ///< [experts + 1]: where those of an expert begin
  std::vector<std::int32_t> places;  ///< ascending for each expert

  /// The place for a token; -1: the expert is nowhere.
  std::int32_t place(int source, std::int64_t token, std::int32_t expert) const {
    const std::int32_t begin = first[index(expert)], count = first[index(expert + 1)] - begin;
    if (count == 0) return -1;
    return places[index(begin + copy_for(source, token, count))];
  }
};

/// Logical experts in places. A place is seat * slots + slot; it is empty or holds one expert.
class ExpertTable {
 public:
  /// Nothing is placed.
  ExpertTable(std::int32_t experts, int seats, int slots)
      : seats_(seats),
        slots_(slots),
        places_of_(index(experts)),
        expert_at_(index(seats * slots), -1) {}

  std::int32_t experts() const { return static_cast<std::int32_t>(places_of_.size()); }
  int seats() const { return seats_; }
  int slots() const { return slots_; }
  int seat_of(std::int32_t place) const { return place / slots_; }
  /// -1: empty.
  std::int32_t expert_at(std::int32_t place) const { return expert_at_[index(place)]; }
  /// Ascending.
  const std::vector<std::int32_t>& places(std::int32_t expert) const {
    return places_of_[index(expert)];
  }
  bool has(int seat, std::int32_t expert) const;
  /// The lowest empty slot of a seat, as a place; -1: none.
  std::int32_t empty_place(int seat) const;

  /// `place` must be empty.
  void put(std::int32_t place, std::int32_t expert);
  /// `place` must hold an expert.
  void take(std::int32_t place);

  /// Experts without a place on the seats of `live` ([seats], 0: not), ascending.
  std::vector<std::int32_t> orphans(std::span<const std::uint8_t> live) const;
  /// `masked`: [seats] whose places are left out, or empty.
  CopyChoice choice(int source, const Domains& domains, const std::vector<bool>& masked = {}) const;

  friend bool operator==(const ExpertTable&, const ExpertTable&) = default;

 private:
  int seats_;
  int slots_;
  std::vector<std::vector<std::int32_t>> places_of_;
  std::vector<std::int32_t> expert_at_;
};

}  // namespace ferry

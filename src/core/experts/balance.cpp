#include "core/experts/balance.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <tuple>

#include "core/check.hpp"

namespace ferry {
namespace {

int live_seats(const BalanceRequest& request) {
  return static_cast<int>(std::ranges::count_if(request.live, [](auto live) { return live != 0; }));
}

void check(const BalanceRequest& request) {
  const int live = live_seats(request);
  const auto slots = static_cast<std::int64_t>(live) * request.slots;
  const auto experts = static_cast<std::int64_t>(request.load.size());
  if (request.domains->ranks() != static_cast<int>(request.live.size())) {
    refuse("balance", "live", std::to_string(request.live.size()) + " seats",
           std::to_string(request.domains->ranks()) + ", as the domains have");
  }
  if (slots < experts) {
    refuse("balance", "slots",
           std::to_string(slots) + " on the " + std::to_string(live) + " of " +
               std::to_string(request.live.size()) + " ranks that are there",
           "at least " + std::to_string(experts) +
               ", one for each expert; give each rank more slots, or wait for more ranks");
  }
  for (const double load : request.load) {
    if (!std::isfinite(load) || load < 0) {
      refuse("balance", "load", std::to_string(load), "numbers of 0 or more");
    }
  }
  const ExpertTable* old = request.old;
  const bool fits = old == nullptr || (old->experts() == experts && old->slots() == request.slots &&
                                       old->seats() == static_cast<int>(request.live.size()));
  if (!fits)
    refuse("balance", "old", "a table of another size", "as many experts, seats and slots");
}

/// Fills a table, and knows how much each seat has to do.
class Packer {
 public:
  Packer(const BalanceRequest& request, const std::vector<int>& copies)
      : request_(request),
        copies_(copies),
        table_(static_cast<std::int32_t>(request.load.size()),
               static_cast<int>(request.live.size()), request.slots),
        load_(request.live.size()),
        used_(request.live.size()),
        domain_load_(index(request.domains->count())),
        domain_live_(index(request.domains->count())) {
    for (std::size_t seat = 0; seat < request.live.size(); ++seat) {
      if (request.live[seat] != 0) ++domain_live_[index(domain(static_cast<int>(seat)))];
    }
  }

  /// Old places that stay: of an expert that has fewer copies now, those on seats that keep least.
  void keep() {
    if (request_.old == nullptr) return;
    for (const std::int32_t expert : heaviest_first()) {
      std::vector<std::int32_t> places;
      for (const std::int32_t place : request_.old->places(expert)) {
        if (request_.live[index(table_.seat_of(place))] != 0) places.push_back(place);
      }
      std::ranges::stable_sort(places, {},
                               [&](auto place) { return load_[index(table_.seat_of(place))]; });
      places.resize(std::min(places.size(), static_cast<std::size_t>(copies_[index(expert)])));
      for (const std::int32_t place : places) put(place, expert);
    }
  }

  ExpertTable pack() {
    for (const std::int32_t expert : heaviest_first()) {
      while (static_cast<int>(table_.places(expert).size()) < copies_[index(expert)]) {
        if (const int seat = best_seat(expert); seat >= 0) {
          put(table_.empty_place(seat), expert);
        } else {
          make_room(expert);
        }
      }
    }
    return std::move(table_);
  }

 private:
  int domain(int seat) const { return request_.domains->of(seat); }
  double weight(std::int32_t expert) const {
    return request_.load[index(expert)] / copies_[index(expert)];
  }
  std::vector<std::int32_t> heaviest_first() const {
    std::vector<std::int32_t> all(request_.load.size());
    std::iota(all.begin(), all.end(), 0);
    std::ranges::stable_sort(all, std::greater{}, [&](auto expert) { return weight(expert); });
    return all;
  }
  void put(std::int32_t place, std::int32_t expert) { count(place, expert, 1); }
  void take(std::int32_t place) { count(place, table_.expert_at(place), -1); }
  void count(std::int32_t place, std::int32_t expert, int sign) {
    const int seat = table_.seat_of(place);
    if (sign > 0) {
      table_.put(place, expert);
    } else {
      table_.take(place);
    }
    used_[index(seat)] += sign;
    load_[index(seat)] += sign * weight(expert);
    domain_load_[index(domain(seat))] += sign * weight(expert);
  }

  /// The seat for one more copy: it has a free slot and does not hold the expert; -1: none.
  int best_seat(std::int32_t expert) const {
    std::vector<std::uint8_t> holds(domain_live_.size());
    for (const std::int32_t place : table_.places(expert)) {
      holds[index(domain(table_.seat_of(place)))] = 1;
    }
    int best = -1;
    std::tuple<int, double, double, int> best_key;
    for (int seat = 0; seat < table_.seats(); ++seat) {
      const std::size_t s = index(seat), d = index(domain(seat));
      if (request_.live[s] == 0 || used_[s] == request_.slots || table_.has(seat, expert)) continue;
      const std::tuple key{static_cast<int>(holds[d]), domain_load_[d] / domain_live_[d], load_[s],
                           used_[s]};
      if (best < 0 || key < best_key) {
        best = seat;
        best_key = key;
      }
    }
    return best;
  }

  /// All free slots are on seats that hold the expert: moves another one there. There is one: the
  /// expert has fewer copies than there are live seats, and a full seat without it holds more
  /// experts than a seat with a free slot.
  void make_room(std::int32_t expert) {
    for (int from = 0; from < table_.seats(); ++from) {
      if (request_.live[index(from)] == 0 || table_.has(from, expert)) continue;
      for (int to = 0; to < table_.seats(); ++to) {
        if (request_.live[index(to)] == 0 || used_[index(to)] == request_.slots) continue;
        for (int slot = request_.slots - 1; slot >= 0; --slot) {
          const std::int32_t place = from * request_.slots + slot;
          const std::int32_t other = table_.expert_at(place);
          if (table_.has(to, other)) continue;
          take(place);
          put(table_.empty_place(to), other);
          return;
        }
      }
    }
  }

  const BalanceRequest& request_;
  const std::vector<int>& copies_;
  ExpertTable table_;
  std::vector<double> load_;  // of each seat
  std::vector<int> used_;     // slots of each seat
  std::vector<double> domain_load_;
  std::vector<int> domain_live_;  // seats
};

}  // namespace

std::vector<int> copies_for(const BalanceRequest& request) {
  check(request);
  const std::size_t experts = request.load.size();
  const int seats = live_seats(request);
  std::vector<int> copies(experts, experts > 0 ? 1 : 0);
  std::int64_t left =
      static_cast<std::int64_t>(seats) * request.slots - static_cast<std::int64_t>(experts);
  for (; left > 0; --left) {
    std::size_t best = experts;
    // Those that have too few copies come first.
    const auto key = [&](std::size_t expert) {
      const int count = copies[expert];
      const bool few = count < std::min(request.copies, seats);
      return std::tuple{few ? -count : -seats, request.load[expert] / count, -count};
    };
    for (std::size_t expert = 0; expert < experts; ++expert) {
      if (copies[expert] == seats) continue;
      if (best == experts || key(expert) > key(best)) best = expert;
    }
    if (best == experts) break;
    ++copies[best];
  }
  return copies;
}

ExpertTable balance(const BalanceRequest& request) {
  const std::vector<int> copies = copies_for(request);
  Packer packer(request, copies);
  packer.keep();
  return packer.pack();
}

}  // namespace ferry

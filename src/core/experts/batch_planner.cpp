#include "core/experts/batch_planner.hpp"

#include <algorithm>

namespace ferry {

BatchPlanner::BatchPlanner(const Placement& homes, int slots, const Domains& domains,
                           std::int64_t copy_rows, std::int64_t max_rows)
    : homes_(homes),
      ranks_(homes.ranks),
      slots_(slots),
      domains_(domains),
      copy_rows_(copy_rows),
      search_(homes, slots, domains, max_rows) {
  const std::size_t places = index(std::int64_t{ranks_} * slots_);
  total_.resize(index(homes.experts));
  left_.resize(index(ranks_));
  plan_.table.assign(places, -1);
  tokens_.resize(places);
  plan_.quota.resize(places * index(ranks_));
}

void BatchPlanner::plan(std::span<const std::int32_t> counts, std::span<const std::int32_t> held) {
  std::ranges::fill(total_, 0);
  for (int source = 0; source < ranks_; ++source) {
    const auto row = counts.subspan(index(source * homes_.experts), total_.size());
    for (std::size_t e = 0; e < total_.size(); ++e) total_[e] += row[e];
  }
  const CopySearch::Draft& found = search_.find(total_, held, copy_rows_);
  plan_.load = found.load;
  place_copies(found.copies, held);
  share_among_sources(found, counts);
}

/// A copy that is held stays in its place; others take empty places, then those whose copies are
/// not used.
void BatchPlanner::place_copies(std::span<const CopySearch::Copy> copies,
                                std::span<const std::int32_t> held) {
  std::ranges::fill(plan_.table, -1);
  for (const CopySearch::Copy& copy : copies) {
    if (copy.held) put(copy, [&](std::size_t place) { return held[place] == copy.expert; });
  }
  for (const CopySearch::Copy& copy : copies) {
    if (copy.held) continue;
    if (!put(copy, [&](std::size_t place) { return plan_.table[place] < 0 && held[place] < 0; })) {
      put(copy, [&](std::size_t place) { return plan_.table[place] < 0; });
    }
  }
}

/// In the first place of the copy's rank that fits.
template <class Fits>
bool BatchPlanner::put(const CopySearch::Copy& copy, const Fits& fits) {
  const std::size_t first = index(std::int64_t{copy.rank} * slots_);
  for (std::size_t place = first; place < first + index(slots_); ++place) {
    if (!fits(place)) continue;
    plan_.table[place] = copy.expert;
    tokens_[place] = copy.tokens;
    return true;
  }
  return false;
}

/// For the first place of each expert, all of its places.
void BatchPlanner::share_among_sources(const CopySearch::Draft& found,
                                       std::span<const std::int32_t> counts) {
  std::ranges::fill(plan_.quota, 0);
  const auto& table = plan_.table;
  for (auto place = table.begin(); place != table.end(); ++place) {
    if (*place < 0 || std::find(table.begin(), place, *place) != place) continue;
    for (int source = 0; source < ranks_; ++source) {
      left_[index(source)] = counts[index(source * homes_.experts + *place)];
    }
    share(*place, index(place - table.begin()), found.at_home[index(*place)]);
  }
}

/// Slots of sources go to places on their own rank, then in their own domain, then anywhere, home
/// first, in ascending order. What is left of each source in the end stays at home.
void BatchPlanner::share(std::int32_t expert, std::size_t first, std::int64_t at_home) {
  const int home = homes_.rank_of(expert);
  const auto keep = [&](int source) {
    const std::int64_t tokens = std::min<std::int64_t>(at_home, left_[index(source)]);
    at_home -= tokens;
    left_[index(source)] -= static_cast<std::int32_t>(tokens);
  };
  const auto give = [&](int source, std::size_t place) {
    const std::int64_t tokens = std::min<std::int64_t>(tokens_[place], left_[index(source)]);
    tokens_[place] -= tokens;
    left_[index(source)] -= static_cast<std::int32_t>(tokens);
    plan_.quota[place * index(ranks_) + index(source)] += static_cast<std::int32_t>(tokens);
  };
  keep(home);
  for_places(expert, first, [&](std::size_t place) { give(rank_of(place), place); });
  for (const int source : domains_.members(domains_.of(home))) keep(source);
  for_places(expert, first, [&](std::size_t place) {
    for (const int source : domains_.members(domains_.of(rank_of(place)))) give(source, place);
  });
  for_places(expert, first, [&](std::size_t place) {
    for (int source = 0; source < ranks_; ++source) give(source, place);
  });
}

}  // namespace ferry

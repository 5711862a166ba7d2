#include "core/experts/copy_search.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

namespace ferry {
namespace {

constexpr int kTries = 20;  // drafts for one limit, at 8 ranks; fewer of more ranks
constexpr int kFewestTries = 3;
constexpr int kBisectionTries = 6;  // at most, where the heaviest rank is still searched for
constexpr int kLevelSweeps = 4;

std::uint32_t next(std::uint32_t& state) {
  state ^= state << 13;
  state ^= state >> 17;
  state ^= state << 5;
  return state;
}

}  // namespace

CopySearch::CopySearch(const Placement& homes, int slots, const Domains& domains,
                       std::int64_t max_rows)
    : homes_(homes),
      ranks_(homes.ranks),
      slots_(slots),
      domains_(domains),
      max_rows_(max_rows > 0 ? max_rows : std::numeric_limits<std::int64_t>::max()) {
  load_.resize(index(ranks_));
  rooms_.resize(index(ranks_));
  reached_.resize(load_.size());
  queue_.reserve(load_.size());
  for (Draft* draft : {&now_, &best_}) {
    draft->load.resize(load_.size());
    draft->at_home.resize(index(homes.experts));
    draft->free.resize(load_.size());
    draft->copies.reserve(index(std::int64_t{ranks_} * slots_));
  }
}

const CopySearch::Draft& CopySearch::find(std::span<const std::int64_t> total,
                                          std::span<const std::int32_t> held,
                                          std::int64_t copy_rows) {
  total_ = total;
  held_ = held;
  for (int rank = 0; rank < ranks_; ++rank) {
    load_[index(rank)] =
        std::accumulate(total.begin() + homes_.first_expert(rank),
                        total.begin() + homes_.first_expert(rank + 1), std::int64_t{0});
  }
  const std::int64_t all = std::accumulate(load_.begin(), load_.end(), std::int64_t{0});
  const std::int64_t mean = (all + ranks_ - 1) / ranks_;
  const std::int64_t heaviest = *std::ranges::max_element(load_);
  best_.heaviest = -1;
  const bool fits = heaviest <= max_rows_;
  if (fits && 2 * (heaviest - mean) <= copy_rows) return no_copies();
  const int tries = std::max(kFewestTries, kTries * 8 / std::max(ranks_, 8));
  std::int64_t low = std::max(mean, std::min(max_rows_, all * kMostPercent / (100 * ranks_)));
  std::int64_t high = search(low, tries);
  // Nothing was found for `low`; what was found for `high` is kept until less is.
  while (high - low > std::max<std::int64_t>(1, low / 256)) {
    const std::int64_t middle = low + (high - low) / 2;
    const std::int64_t found = search(middle, std::min(tries, kBisectionTries));
    if (found <= middle) {
      high = found;
    } else {
      low = middle;
      high = std::min(high, found);
    }
  }
  level();
  return !fits || pays(heaviest, copy_rows) ? best_ : no_copies();
}

const CopySearch::Draft& CopySearch::no_copies() {
  best_.load = load_;
  best_.at_home.assign(total_.begin(), total_.end());
  best_.copies.clear();
  return best_;
}

/// What moving weights and gradients takes is counted where most of it comes and goes. Of a copy
/// that is held only the gradient moves: half of it.
bool CopySearch::pays(std::int64_t heaviest, std::int64_t copy_rows) {
  if (copy_rows == 0) return true;
  std::ranges::fill(rooms_, 0);
  for (const Copy& copy : best_.copies) {
    const std::int64_t cost = copy.held ? copy_rows : 2 * copy_rows;
    rooms_[index(copy.rank)] += cost;
    rooms_[index(homes_.rank_of(copy.expert))] += cost;
  }
  const std::int64_t saved = heaviest - *std::ranges::max_element(best_.load);
  return 2 * saved > *std::ranges::max_element(rooms_);
}

/// Returns the load of the heaviest rank in the best draft so far, at least `limit`.
std::int64_t CopySearch::search(std::int64_t limit, int tries) {
  const int fewest = fewest_copies(limit);
  std::uint32_t random = 0x9e3779b9;
  for (int i = 0; i < tries; ++i) {
    Style style;
    style.tight = i % 2 == 1;
    style.reuse = i % 8 != 7;
    style.random = i < 2 ? 0 : next(random);
    draft(limit, style);
    const std::int64_t now = std::max(now_.heaviest, limit);
    const std::int64_t best = std::max(best_.heaviest, limit);
    if (best_.heaviest < 0 || now < best || (now == best && now_.fetches < best_.fetches)) {
      std::swap(now_, best_);
    }
    if (best_.heaviest <= limit && best_.fetches <= fewest) break;
  }
  return std::max(best_.heaviest, limit);
}

/// A bound: no rank can give its excess to fewer copies than ranks with the most room take, and all
/// together need as many ranks as have that room. 0 where copies are held, which may do it.
int CopySearch::fewest_copies(std::int64_t limit) {
  for (const std::int32_t expert : held_) {
    if (expert >= 0) return 0;
  }
  std::int64_t excess = 0;
  for (std::size_t rank = 0; rank < load_.size(); ++rank) {
    rooms_[rank] = std::max<std::int64_t>(limit - load_[rank], 0);
    excess += std::max<std::int64_t>(load_[rank] - limit, 0);
  }
  if (excess == 0) return 0;
  std::ranges::sort(rooms_, std::greater{});
  const auto needed = [&](std::int64_t tokens) {
    int ranks = 0;
    for (std::size_t i = 0; i < rooms_.size() && tokens > 0; ++i, ++ranks) tokens -= rooms_[i];
    return ranks;
  };
  int each = 0;
  for (const std::int64_t load : load_) {
    if (load > limit) each += needed(load - limit);
  }
  return std::max(each, needed(excess));
}

void CopySearch::draft(std::int64_t limit, Style style) {
  now_.load = load_;
  now_.at_home.assign(total_.begin(), total_.end());
  now_.copies.clear();
  std::ranges::fill(now_.free, slots_);
  if (style.reuse) use_held(limit, style.random);
  for (bool stuck = false; !stuck;) {
    const int rank = overloaded(limit, style);
    if (rank < 0) break;
    const std::int64_t excess = now_.load[index(rank)] - limit;
    stuck = push(rank, excess, limit, -1) == 0 && !relieve(rank, limit, style) &&
            !relieve_through_others(rank, limit, 1);
  }
  finish();
}

/// The heaviest rank above the limit, in a random style any; −1: none.
int CopySearch::overloaded(std::int64_t limit, Style& style) const {
  int best = -1;
  for (int rank = 0; rank < ranks_; ++rank) {
    if (now_.load[index(rank)] <= limit) continue;
    const bool better =
        best < 0 || (style.random != 0 ? next(style.random) % 2 == 0
                                       : now_.load[index(rank)] > now_.load[index(best)]);
    if (better) best = rank;
  }
  return best;
}

void CopySearch::use_held(std::int64_t limit, std::uint32_t random) {
  const std::size_t places = held_.size();
  const std::size_t first = places == 0 ? 0 : random % places;
  for (std::size_t i = 0; i < places; ++i) {
    const std::size_t place = (first + i) % places;
    const std::int32_t expert = held_[place];
    if (expert < 0) continue;
    const int rank = static_cast<int>(place) / slots_, home = homes_.rank_of(expert);
    const std::int64_t tokens =
        std::min({now_.load[index(home)] - limit, limit - now_.load[index(rank)],
                  now_.at_home[index(expert)]});
    if (tokens > 0) move(expert, rank, tokens);
  }
}

/// A copy more of an expert of the rank. False: nobody has room and a place.
bool CopySearch::relieve(int rank, std::int64_t limit, Style& style) {
  const std::int64_t excess = now_.load[index(rank)] - limit;
  std::int64_t room = 0;
  for (int r = 0; r < ranks_; ++r) {
    if (now_.free[index(r)] > 0) room = std::max(room, limit - now_.load[index(r)]);
  }
  if (room <= 0) return false;
  const std::int32_t expert = expert_to_move(rank, excess, room, style.tight);
  if (expert < 0) return false;
  const std::int64_t wanted = std::min(excess, now_.at_home[index(expert)]);
  const int to = receiver(expert, wanted, limit, style);
  if (to < 0) return false;
  if (limit - now_.load[index(to)] < wanted && full_rank_has_room(wanted, limit) &&
      relieve_through_others(rank, limit, wanted)) {
    return true;
  }
  move(expert, to, std::min(wanted, limit - now_.load[index(to)]));
  return true;
}

/// Tight: the smallest that suffices, so that the largest are there for what is left.
std::int32_t CopySearch::expert_to_move(int rank, std::int64_t excess, std::int64_t room,
                                        bool tight) const {
  const std::int64_t enough = std::min(excess, room);
  std::int32_t largest = -1, smallest = -1;
  for (auto e = homes_.first_expert(rank); e < homes_.first_expert(rank + 1); ++e) {
    const std::int64_t tokens = now_.at_home[index(e)];
    if (tokens <= 0) continue;
    const auto expert = static_cast<std::int32_t>(e);
    if (largest < 0 || tokens > now_.at_home[index(largest)]) largest = expert;
    if (tokens >= enough && (smallest < 0 || tokens < now_.at_home[index(smallest)])) {
      smallest = expert;
    }
  }
  return tight && smallest >= 0 ? smallest : largest;
}

/// In the expert's domain if there is one: the rank with the least room that suffices, else with
/// the most. A random style overlooks some.
int CopySearch::receiver(std::int32_t expert, std::int64_t wanted, std::int64_t limit,
                         Style& style) const {
  const int home = homes_.rank_of(expert);
  int best = -1;
  std::int64_t best_room = 0;
  bool best_near = false;
  for (int rank = 0; rank < ranks_; ++rank) {
    const std::int64_t room = limit - now_.load[index(rank)];
    if (rank == home || room <= 0 || now_.free[index(rank)] == 0) continue;
    if (style.random != 0 && best >= 0 && next(style.random) % 4 == 0) continue;
    const bool near = domains_.together(rank, home);
    const bool both_suffice = room >= wanted && best_room >= wanted;
    const bool fits_better = both_suffice ? room < best_room : room > best_room;
    if (best >= 0 && (near == best_near ? !fits_better : !near)) continue;
    best = rank;
    best_room = room;
    best_near = near;
  }
  return best;
}

void CopySearch::move(std::int32_t expert, int to, std::int64_t tokens) {
  now_.at_home[index(expert)] -= tokens;
  now_.load[index(homes_.rank_of(expert))] -= tokens;
  now_.load[index(to)] += tokens;
  if (const int same = copy_at(expert, to); same >= 0) {
    now_.copies[index(same)].tokens += tokens;
    return;
  }
  const auto places = held_.subspan(index(std::int64_t{to} * slots_), index(slots_));
  const bool held = std::ranges::find(places, expert) != places.end();
  now_.copies.push_back({expert, to, tokens, held});
  --now_.free[index(to)];
}

/// Whether a rank without a free slot has room for so many tokens.
bool CopySearch::full_rank_has_room(std::int64_t wanted, std::int64_t limit) const {
  for (std::size_t rank = 0; rank < now_.load.size(); ++rank) {
    if (now_.free[rank] == 0 && limit - now_.load[rank] >= wanted) return true;
  }
  return false;
}

/// A rank without room takes a copy, and gives away as much over the copies that there are: at
/// least so many tokens, or nothing is done.
bool CopySearch::relieve_through_others(int rank, std::int64_t limit, std::int64_t least) {
  const std::int32_t expert = expert_to_move(rank, 0, 0, false);
  if (expert < 0) return false;
  const std::int64_t wanted = std::min(now_.load[index(rank)] - limit, now_.at_home[index(expert)]);
  int best = -1;
  std::int64_t most = 0;
  for (int other = 0; other < ranks_; ++other) {
    if (other == rank || now_.free[index(other)] == 0 || copy_at(expert, other) >= 0) continue;
    const std::int64_t tokens = find_room(other, wanted, limit, rank) < 0 ? 0 : path_tokens_;
    if (tokens <= most) continue;
    best = other;
    most = tokens;
  }
  if (best < 0 || most < least) return false;
  move(expert, best, push(best, most, limit, rank));
  return true;
}

/// The nearest rank with room that tokens of `from` reach over the copies that there are, not by
/// way of `avoid`; −1: none. `path_tokens_`: how many of `wanted` that takes.
int CopySearch::find_room(int from, std::int64_t wanted, std::int64_t limit, int avoid) {
  std::ranges::fill(reached_, Reached{});
  reached_[index(from)] = {.tokens = wanted};
  queue_.assign(1, from);
  for (std::size_t at = 0; at < queue_.size(); ++at) {
    const int rank = queue_[at];
    for (std::size_t c = 0; c < now_.copies.size(); ++c) {
      const Copy& copy = now_.copies[c];
      const int home = homes_.rank_of(copy.expert);
      if (home != rank && copy.rank != rank) continue;
      const int to = home == rank ? copy.rank : home;
      const std::int64_t tokens =
          std::min(reached_[index(rank)].tokens,
                   home == rank ? now_.at_home[index(copy.expert)] : copy.tokens);
      if (tokens == 0 || to == avoid || reached_[index(to)].tokens > 0) continue;
      reached_[index(to)] = {tokens, static_cast<int>(c), rank};
      const std::int64_t room = limit - now_.load[index(to)];
      if (room > 0) {
        path_tokens_ = std::min(tokens, room);
        return to;
      }
      queue_.push_back(to);
    }
  }
  return -1;
}

/// Returns how many tokens went to a rank with room.
std::int64_t CopySearch::push(int from, std::int64_t wanted, std::int64_t limit, int avoid) {
  int to = find_room(from, wanted, limit, avoid);
  if (to < 0) return 0;
  now_.load[index(from)] -= path_tokens_;
  now_.load[index(to)] += path_tokens_;
  while (to != from) {
    Copy& copy = now_.copies[index(reached_[index(to)].copy)];
    const std::int64_t tokens = copy.rank == to ? path_tokens_ : -path_tokens_;
    copy.tokens += tokens;
    now_.at_home[index(copy.expert)] -= tokens;
    to = reached_[index(to)].before;
  }
  std::erase_if(now_.copies, [&](const Copy& copy) {
    if (copy.tokens == 0) ++now_.free[index(copy.rank)];
    return copy.tokens == 0;
  });
  return path_tokens_;
}

int CopySearch::copy_at(std::int32_t expert, int rank) const {
  for (std::size_t c = 0; c < now_.copies.size(); ++c) {
    if (now_.copies[c].expert == expert && now_.copies[c].rank == rank) {
      return static_cast<int>(c);
    }
  }
  return -1;
}

/// Tokens go from the heavier to the lighter of the two ranks that share an expert: it costs no
/// copy more, and the loads of all come closer to the mean.
void CopySearch::level() {
  for (int sweep = 0; sweep < kLevelSweeps; ++sweep) {
    for (Copy& copy : best_.copies) {
      std::int64_t& home = best_.load[index(homes_.rank_of(copy.expert))];
      std::int64_t& away = best_.load[index(copy.rank)];
      const std::int64_t tokens =
          std::clamp((home - away) / 2, 1 - copy.tokens, best_.at_home[index(copy.expert)]);
      home -= tokens;
      away += tokens;
      copy.tokens += tokens;
      best_.at_home[index(copy.expert)] -= tokens;
    }
  }
}

void CopySearch::finish() {
  now_.heaviest = *std::ranges::max_element(now_.load);
  now_.fetches = 0;
  for (const Copy& copy : now_.copies) now_.fetches += copy.held ? 0 : 1;
}

}  // namespace ferry

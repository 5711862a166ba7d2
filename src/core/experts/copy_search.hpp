// Which experts get copies on which ranks, and how many tokens go there: a search among drafts.
// Integers only: teams that search alike find the same.
#pragma once
#include <cstdint>

#include "core/experts/copy_drafter.hpp"

namespace ferry {

/// The heaviest rank, in percent of the mean, that is not improved by moving more weights.
inline constexpr std::int64_t kMostPercent = 102;

template <class Team>
class CopySearch {
 public:
  /// memory: of the layout, with `total` and `load` of the batch. held: [ranks, slots], valid
  /// copies; −1: none. Results: the best draft, see BatchPlanner.
  FERRY_TEAM_FN CopySearch(const Team& team, const BatchPlanShape& shape,
                           const BatchPlanLayout& layout, std::byte* memory,
                           const std::int32_t* held)
      : team_(team),
        shape_(shape),
        layout_(layout),
        memory_(memory),
        held_(held),
        total_(reinterpret_cast<Rows*>(memory + layout.total)),
        load_(reinterpret_cast<Rows*>(memory + layout.load)),
        sums_(reinterpret_cast<std::int64_t*>(memory + layout.sums)),
        rooms_(reinterpret_cast<Rows*>(memory + layout.rooms)),
        slot_of_(reinterpret_cast<std::int32_t*>(memory + layout.slot_of)) {}

  FERRY_TEAM_FN CopyDraft find() {
    const Rows all = team_.lanes().sum(shape_.ranks, [&](int rank) { return load_[rank]; });
    const auto ranks = static_cast<std::uint32_t>(shape_.ranks);
    const auto mean = static_cast<Rows>((static_cast<std::uint32_t>(all) + ranks - 1) / ranks);
    const Rows heaviest = heaviest_of(load_);
    const bool fits = heaviest <= shape_.max_rows;
    team_.each(team_.drafters(), [&](int i) { slot_of_[i] = i + 1; });
    if (fits && 2 * std::int64_t{heaviest - mean} <= shape_.copy_rows) return no_copies();
    const int tries = tries_of(shape_.ranks);
    const auto near =
        static_cast<Rows>(static_cast<std::uint32_t>(all * kMostPercent / 100) / ranks);
    Rows low = near < shape_.max_rows ? near : shape_.max_rows;
    if (low < mean) low = mean;
    // Where nothing is found for `low`, what was found for `high` is kept until less is. One call
    // of search: a GPU has it inline.
    Rows high = INT32_MAX;
    const int fewer = tries < kBisectionTries ? tries : kBisectionTries;
    for (Rows limit = low, wanted = low;; limit = low + (high - low) / 2) {
      const Rows found = search(limit, limit == wanted ? tries : fewer);
      if (found < high) high = found;
      if (found > limit && limit != wanted) low = limit;
      if (high - low <= (low < 512 ? 1 : low / 256)) break;
    }
    team_.mark(PlanStage::best);
    level();
    team_.mark(PlanStage::level);
    return !fits || pays(heaviest) ? best() : no_copies();
  }

  /// Drafts for one limit.
  FERRY_FN static constexpr int tries_of(int ranks) {
    constexpr int kTries = 20, kFewest = 3;  // at 8 ranks
    const int tries = kTries * 8 / (ranks < 8 ? 8 : ranks);
    return tries < kFewest ? kFewest : tries;
  }

 private:
  static constexpr int kBisectionTries = 6;  // at most, where the heaviest rank is searched for
  static constexpr int kLevelSweeps = 4;

  FERRY_TEAM_FN CopyDraft draft(int number) const {
    return copy_draft_at(memory_, layout_, shape_, number);
  }
  FERRY_TEAM_FN CopyDraft best() const { return draft(best_); }

  FERRY_TEAM_FN Rows heaviest_of(const Rows* load) const {
    return load[team_.lanes().best(shape_.ranks, [&](int rank) { return load[rank]; })];
  }

  FERRY_TEAM_FN CopyDraft no_copies() {
    const CopyDraft none = best();
    team_.each(shape_.experts, [&](int expert) {
      none.at_home[expert] = total_[expert];
      if (expert < shape_.ranks) none.load[expert] = load_[expert];
      if (expert == 0) none.end->copies = 0;
    });
    return none;
  }

  FERRY_TEAM_FN static CopyStyle style_of(int number) {
    CopyStyle style;
    style.tight = number % 2 == 1;
    style.reuse = number % 8 != 7;
    if (number < 2) return style;
    style.random = 0x9e3779b9;
    for (int i = 2; i <= number; ++i) next_random(style.random);
    return style;
  }

  /// Returns the load of the heaviest rank in the best draft so far, at least `limit`.
  FERRY_TEAM_FN Rows search(Rows limit, int tries) {
    const int fewest = fewest_copies(limit);
    team_.mark(PlanStage::bound);
    bool enough = false;
    for (int first = 0; first < tries && !enough; first += team_.drafters()) {
      const int rest = tries - first;
      const int count = rest < team_.drafters() ? rest : team_.drafters();
      team_.drafts(count, [&](int i, const auto& lanes) {
        const CopyDraft mine = draft(slot_of_[i]);
        CopyDrafter drafter(lanes, shape_, mine, load_, total_, held_, limit);
        drafter.run(style_of(first + i), [&] { return team_.vain(i); });
        if (mine.end->heaviest <= limit && mine.end->fetches <= fewest) team_.good(i);
      });
      team_.mark(PlanStage::drafts);
      enough = take_best(limit, fewest, count);
    }
    return best_heaviest_ > limit ? best_heaviest_ : limit;
  }

  /// As if one draft had been made after the other until one was good enough. True: one was.
  FERRY_TEAM_FN bool take_best(Rows limit, int fewest, int count) {
    int taken = -1;
    bool enough = false;
    for (int i = 0; i < count && !enough; ++i) {
      const CopyDraft::End end = *draft(slot_of_[i]).end;
      const Rows now = end.heaviest > limit ? end.heaviest : limit;
      const Rows best = best_heaviest_ > limit ? best_heaviest_ : limit;
      if (best_heaviest_ < 0 || now < best || (now == best && end.fetches < best_fetches_)) {
        taken = i;
        best_heaviest_ = end.heaviest;
        best_fetches_ = end.fetches;
      }
      enough = best_heaviest_ <= limit && best_fetches_ <= fewest;
    }
    if (taken < 0) return enough;
    const int before = best_;
    best_ = slot_of_[taken];
    team_.lead([&](const auto& lanes) { lanes.one([&] { slot_of_[taken] = before; }); });
    return enough;
  }

  /// A bound: no rank can give its excess to fewer copies than ranks with the most room take, and
  /// all together need as many ranks as have that room. 0 where copies are held, which may do it.
  FERRY_TEAM_FN int fewest_copies(Rows limit) {
    const auto& lanes = team_.lanes();
    const int held = lanes.first(shape_.places(), [&](int place) { return held_[place] >= 0; });
    if (held >= 0) return 0;
    const auto over = [&](int rank) { return load_[rank] > limit ? load_[rank] - limit : 0; };
    const Rows excess = lanes.sum(shape_.ranks, over);
    if (excess == 0) return 0;
    team_.each(shape_.ranks,
               [&](int rank) { rooms_[rank] = limit > load_[rank] ? limit - load_[rank] : 0; });
    team_.each(shape_.ranks, [&](int rank) {  // the rooms that are larger, or as large and before
      const Rows mine = rooms_[rank];
      std::int64_t sum = 0;
      for (int i = 0; i < shape_.ranks; ++i) {
        const Rows room = rooms_[i];
        if (room > mine || (room == mine && i < rank)) sum += room;
      }
      sums_[rank] = sum;
    });
    const auto needed = [&](Rows tokens) {
      int ranks = 0;
      for (int i = 0; i < shape_.ranks; ++i) ranks += sums_[i] < tokens ? 1 : 0;
      return ranks;
    };
    const int each = lanes.sum(shape_.ranks, [&](int rank) { return needed(over(rank)); });
    const int together = needed(excess);
    return each > together ? each : together;
  }

  /// Tokens go from the heavier to the lighter of the two ranks that share an expert: it costs no
  /// copy more, and the loads of all come closer to the mean.
  FERRY_TEAM_FN void level() {
    const CopyDraft best = this->best();
    team_.lead([&](const auto& lanes) {
      lanes.one([&] {
        bool moved = true;
        for (int sweep = 0; sweep < kLevelSweeps && moved; ++sweep) {
          moved = false;
          for (int c = 0; c < best.end->copies; ++c) moved |= level(best, best.copies[c]);
        }
      });
    });
  }

  FERRY_TEAM_FN static bool level(const CopyDraft& best, CopyDraft::Copy& copy) {
    const int expert = copy.expert, from = copy.home, to = copy.rank;
    const Rows home = best.load[from], away = best.load[to];
    const Rows stays = best.at_home[expert], has = copy.tokens;
    Rows tokens = (home - away) / 2;
    if (tokens < 1 - has) tokens = 1 - has;
    if (tokens > stays) tokens = stays;
    best.load[from] = home - tokens;
    best.load[to] = away + tokens;
    best.at_home[expert] = stays - tokens;
    copy.tokens = has + tokens;
    return tokens != 0;
  }

  /// What moving weights and gradients takes is counted where most of it comes and goes. Of a copy
  /// that is held only the gradient moves: half of it.
  FERRY_TEAM_FN bool pays(Rows heaviest) {
    if (shape_.copy_rows == 0) return true;
    const CopyDraft best = this->best();
    team_.each(shape_.ranks, [&](int rank) { sums_[rank] = 0; });
    team_.lead([&](const auto& lanes) {
      lanes.one([&] {
        for (int c = 0; c < best.end->copies; ++c) {
          const CopyDraft::Copy& copy = best.copies[c];
          const std::int64_t cost = std::int64_t{2 - copy.held} * shape_.copy_rows;
          sums_[copy.rank] += cost;
          sums_[copy.home] += cost;
        }
      });
    });
    const Rows saved = heaviest - heaviest_of(best.load);
    const int most = team_.lanes().best(shape_.ranks, [&](int rank) { return sums_[rank]; });
    return 2 * std::int64_t{saved} > sums_[most];
  }

  const Team& team_;
  const BatchPlanShape& shape_;
  const BatchPlanLayout& layout_;
  std::byte* memory_;
  const std::int32_t* held_;
  const Rows* total_;
  const Rows* load_;
  std::int64_t* sums_;
  Rows* rooms_;
  std::int32_t* slot_of_;
  int best_ = 0;  // which draft
  Rows best_heaviest_ = -1;
  int best_fetches_ = 0;
};

}  // namespace ferry

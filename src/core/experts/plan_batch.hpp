// A plan of copies for one batch, by a team: the search, places for what it found, and how many
// tokens of each source go there.
#pragma once
#include <cstdint>

#include "core/experts/copy_search.hpp"

namespace ferry {

/// What a plan is made of, and where it goes.
struct BatchPlanJob {
  const std::int32_t* counts = nullptr;  ///< [ranks, stride] slots that name each expert
  std::int64_t stride = 0;               ///< `experts` or more
  const std::int32_t* held = nullptr;    ///< [ranks, slots] valid copies; −1: none
  std::byte* memory = nullptr;           ///< of make_batch_plan_layout
  std::int32_t* table = nullptr;         ///< see BatchPlan
  Rows* load = nullptr;
  std::int32_t* quota = nullptr;
};

template <class Team>
class BatchPlanning {
 public:
  FERRY_TEAM_FN BatchPlanning(const Team& team, const BatchPlanShape& shape,
                              const BatchPlanLayout& layout, const BatchPlanJob& job)
      : team_(team),
        shape_(shape),
        layout_(layout),
        job_(job),
        tokens_(reinterpret_cast<Rows*>(job.memory + layout.tokens)) {}

  FERRY_TEAM_FN void run() {
    add_up();
    team_.mark(PlanStage::sums);
    const CopyDraft found = CopySearch<Team>(team_, shape_, layout_, job_.memory, job_.held).find();
    team_.tasks(shape_.ranks, [&](int rank, const auto& lanes, int) {
      lanes.one([&] { job_.load[rank] = found.load[rank]; });
      place_copies(lanes, found, rank);
    });
    team_.mark(PlanStage::places);
    share_among_sources(found);
    team_.mark(PlanStage::quotas);
  }

 private:
  FERRY_TEAM_FN void add_up() {
    auto* total = reinterpret_cast<Rows*>(job_.memory + layout_.total);
    auto* load = reinterpret_cast<Rows*>(job_.memory + layout_.load);
    team_.each(shape_.experts, [&](int expert) {
      Rows sum = 0;
      for (int source = 0; source < shape_.ranks; ++source) {
        sum += job_.counts[source * job_.stride + expert];
      }
      total[expert] = sum;
    });
    const std::int32_t local = shape_.local();
    team_.tasks(shape_.ranks, [&](int rank, const auto& lanes, int) {
      const Rows sum = lanes.sum(local, [&](int i) { return total[rank * local + i]; });
      lanes.one([&] { load[rank] = sum; });
    });
  }

  /// Of one rank. A copy that is held stays in its place; others take empty places, then those
  /// whose copies are not used.
  template <class Lanes>
  FERRY_TEAM_FN void place_copies(const Lanes& lanes, const CopyDraft& found, int rank) {
    const int first = rank * shape_.slots;
    std::int32_t* const table = job_.table + first;
    const std::int32_t* const held = job_.held + first;
    lanes.each(shape_.slots, [&](int slot) { table[slot] = -1; });
    for (const int kind : {1, 0}) {  // held, then not
      const auto mine = [&](int c) {
        return found.copies[c].rank == rank && found.copies[c].held == kind;
      };
      lanes.visit(found.end->copies, mine, [&](int c) {
        const std::int32_t expert = found.copies[c].expert;
        const Rows tokens = found.copies[c].tokens;
        const int slot = kind == 1
                             ? lanes.first(shape_.slots, [&](int s) { return held[s] == expert; })
                             : empty_slot(lanes, table, held);
        lanes.one([&] {
          table[slot] = expert;
          tokens_[first + slot] = tokens;
        });
        return true;
      });
    }
  }
  template <class Lanes>
  FERRY_TEAM_FN int empty_slot(const Lanes& lanes, const std::int32_t* table,
                               const std::int32_t* held) {
    return lanes.best(shape_.slots, [&](int slot) {
      return table[slot] >= 0 ? kNoKey<std::int32_t> : held[slot] < 0 ? 1 : 0;
    });
  }

  /// For the first place of each expert, all of its places.
  FERRY_TEAM_FN void share_among_sources(const CopyDraft& found) {
    const int places = shape_.places();
    team_.each(places * shape_.ranks, [&](int i) { job_.quota[i] = 0; });
    auto* left_of_warp = reinterpret_cast<Rows*>(job_.memory + layout_.left);
    team_.tasks(places, [&](int place, const auto& lanes, int warp) {
      const std::int32_t expert = job_.table[place];
      if (expert < 0) return;
      if (lanes.first(place, [&](int p) { return job_.table[p] == expert; }) >= 0) return;
      Rows* left = left_of_warp + warp * shape_.ranks;
      lanes.each(shape_.ranks,
                 [&](int source) { left[source] = job_.counts[source * job_.stride + expert]; });
      share(lanes, expert, left, found.at_home[expert]);
    });
  }

  /// Slots of sources go to places on their own rank, then in their own domain, then anywhere, home
  /// first, in ascending order. What is left of each source in the end stays at home.
  template <class Lanes>
  FERRY_TEAM_FN void share(const Lanes& lanes, std::int32_t expert, Rows* left, Rows at_home) {
    const int places = shape_.places(), home = shape_.home_of(expert);
    const auto copies = [&](int place) { return job_.table[place] == expert; };
    const Rows kept = at_home < left[home] ? at_home : left[home];
    at_home -= kept;
    lanes.one([&] { left[home] -= kept; });
    lanes.each(places, [&](int place) {  // an expert has one place on a rank
      if (!copies(place)) return;
      const int rank = shape_.rank_of(place);
      const Rows tokens = tokens_[place] < left[rank] ? tokens_[place] : left[rank];
      tokens_[place] -= tokens;
      left[rank] -= tokens;
      job_.quota[place * shape_.ranks + rank] += tokens;
    });
    const bool one_domain = shape_.domain_size >= shape_.ranks;
    const int first = one_domain ? 0 : home / shape_.domain_size * shape_.domain_size;
    lanes.deal(
        members(first), at_home, [&](int i) { return left[first + i]; },
        [&](int i, Rows tokens) { left[first + i] -= tokens; });
    for (int pass = one_domain ? 1 : 0; pass < 2; ++pass) {
      lanes.visit(places, copies, [&](int place) {
        const int rank = shape_.rank_of(place);
        const int from = pass == 1 ? 0 : rank / shape_.domain_size * shape_.domain_size;
        const int count = pass == 1 ? shape_.ranks : members(from);
        const Rows rest = lanes.deal(
            count, tokens_[place], [&](int i) { return left[from + i]; },
            [&](int i, Rows tokens) {
              left[from + i] -= tokens;
              job_.quota[place * shape_.ranks + from + i] += tokens;
            });
        lanes.one([&] { tokens_[place] = rest; });
        return true;
      });
    }
  }

  /// Ranks of the domain that begins there.
  FERRY_TEAM_FN int members(int first) const {
    const int rest = shape_.ranks - first;
    return rest < shape_.domain_size ? rest : shape_.domain_size;
  }

  const Team& team_;
  const BatchPlanShape& shape_;
  const BatchPlanLayout& layout_;
  const BatchPlanJob& job_;
  Rows* tokens_;
};

}  // namespace ferry

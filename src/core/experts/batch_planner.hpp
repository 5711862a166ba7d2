// Copies of busy experts for one batch: which rank copies which expert, and how many tokens of each
// source go to each copy. Integers only and no exchange: ranks that have the same counts have the
// same plan. `plan` allocates nothing.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "core/domains.hpp"
#include "core/experts/copy_search.hpp"
#include "core/placement.hpp"

namespace ferry {

/// What is planned for a batch.
struct BatchPlan {
  std::vector<std::int32_t> table{};  ///< [ranks, slots] whose tokens go there; −1: none do
  std::vector<std::int64_t> load{};   ///< [ranks] slots of routes that each rank works on
  /// [ranks · slots, ranks] how many of a source's slots for table[place] go to that place. The
  /// others go home.
  std::vector<std::int32_t> quota{};
};

/// Expert e lives on rank `homes.rank_of(e)`; each rank has `slots` places for copies.
class BatchPlanner {
 public:
  /// copy_rows: what moving weights and gradient of one copy costs, in rows of work. 0: nothing.
  /// max_rows: as of CopySearch.
  BatchPlanner(const Placement& homes, int slots, const Domains& domains,
               std::int64_t copy_rows = 0, std::int64_t max_rows = 0);

  /// counts: [ranks, experts], 0 or more: slots of routes of each source that name each expert.
  /// held: [ranks, slots], the expert that each place holds a valid copy of; −1: none.
  ///
  /// The heaviest rank gets at most CopySearch::kMostPercent of the mean load if the search finds a
  /// way, else the least that it finds, and that with the fewest copies which are not held yet. No
  /// copy is made where all together save fewer rows of the heaviest rank than they cost. A copy
  /// lies in another domain than its expert only if no rank of that domain has room and a place.
  void plan(std::span<const std::int32_t> counts, std::span<const std::int32_t> held);

  const BatchPlan& planned() const { return plan_; }
  std::span<const std::int32_t> table() const { return plan_.table; }
  std::span<const std::int64_t> load() const { return plan_.load; }
  std::int32_t quota(int place, int source) const {
    return plan_.quota[index(std::int64_t{place} * ranks_ + source)];
  }

 private:
  void place_copies(std::span<const CopySearch::Copy> copies, std::span<const std::int32_t> held);
  template <class Fits>
  bool put(const CopySearch::Copy& copy, const Fits& fits);
  void share_among_sources(const CopySearch::Draft& found, std::span<const std::int32_t> counts);
  void share(std::int32_t expert, std::size_t first, std::int64_t at_home);
  int rank_of(std::size_t place) const { return static_cast<int>(place) / slots_; }
  template <class Visit>
  void for_places(std::int32_t expert, std::size_t first, const Visit& visit) const {
    for (std::size_t place = first; place < plan_.table.size(); ++place) {
      if (plan_.table[place] == expert) visit(place);
    }
  }

  Placement homes_;
  int ranks_;
  int slots_;
  Domains domains_;
  std::int64_t copy_rows_;
  CopySearch search_;
  BatchPlan plan_{};
  std::vector<std::int64_t> total_{};   // [experts]
  std::vector<std::int64_t> tokens_{};  // [ranks, slots] of each place
  std::vector<std::int32_t> left_{};    // [ranks], scratch: of an expert's slots of each source
};

}  // namespace ferry

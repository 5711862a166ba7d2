// Copies of busy experts for one batch: which rank copies which expert, and how many tokens of each
// source go to each copy. Integers only and no exchange: ranks that have the same counts have the
// same plan. `plan` allocates nothing.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/domains.hpp"
#include "core/experts/batch_plan_shape.hpp"
#include "core/placement.hpp"

namespace ferry {

/// What is planned for a batch.
struct BatchPlan {
  std::vector<std::int32_t> table{};  ///< [ranks, slots] whose tokens go there; −1: none do
  std::vector<Rows> load{};           ///< [ranks] slots of routes that each rank works on
  /// [ranks · slots, ranks] how many of a source's slots for table[place] go to that place. The
  /// others go home.
  std::vector<std::int32_t> quota{};
};

/// domain_size: as of GroupConfig; 0: one domain. max_rows: > 0: the most that a rank may have;
/// copies are made for it whatever they cost.
BatchPlanShape batch_plan_shape(const Placement& homes, int slots, int domain_size,
                                std::int64_t copy_rows, std::int64_t max_rows);
/// Of what a caller gave. Throws Error(invalid_argument).
BatchPlanShape checked_batch_plan_shape(const char* call, std::int64_t experts, int ranks,
                                        int slots, int domain_size, std::int64_t copy_rows,
                                        std::int64_t max_rows);

/// Expert e lives on rank e / (experts / ranks); each rank has `slots` places for copies.
class BatchPlanner {
 public:
  explicit BatchPlanner(const BatchPlanShape& shape);

  /// counts: [ranks, experts], 0 or more, INT32_MAX at most in all: slots of routes of each source
  /// that name each expert. held: [ranks, slots], the expert that each place holds a valid copy of;
  /// −1: none.
  ///
  /// The heaviest rank gets at most kMostPercent of the mean load if the search finds a way, else
  /// the least that it finds, and that with the fewest copies which are not held yet. No copy is
  /// made where all together save fewer rows of the heaviest rank than they cost. A copy lies in
  /// another domain than its expert only if no rank of that domain has room and a place.
  void plan(std::span<const std::int32_t> counts, std::span<const std::int32_t> held);

  const BatchPlan& planned() const { return plan_; }
  std::span<const std::int32_t> table() const { return plan_.table; }
  std::span<const Rows> load() const { return plan_.load; }
  std::int32_t quota(int place, int source) const {
    return plan_.quota[index(std::int64_t{place} * shape_.ranks + source)];
  }

 private:
  BatchPlanShape shape_;
  BatchPlanLayout layout_;
  std::vector<std::byte> memory_;
  BatchPlan plan_{};
};

}  // namespace ferry

#include "core/experts/batch_planner.hpp"

#include <string>

#include "core/check.hpp"
#include "core/experts/one_team.hpp"
#include "core/experts/plan_batch.hpp"

namespace ferry {

BatchPlanShape batch_plan_shape(const Placement& homes, int slots, int domain_size,
                                std::int64_t copy_rows, std::int64_t max_rows) {
  BatchPlanShape shape;
  shape.experts = static_cast<std::int32_t>(homes.experts);
  shape.ranks = homes.ranks;
  shape.slots = slots;
  shape.domain_size = domain_size > 0 && domain_size < homes.ranks ? domain_size : homes.ranks;
  shape.copy_rows = static_cast<std::int32_t>(copy_rows);
  const bool bound = max_rows > 0 && max_rows < INT32_MAX;
  shape.max_rows = bound ? static_cast<std::int32_t>(max_rows) : INT32_MAX;
  shape.by_experts = Divider(shape.experts);
  shape.by_local = Divider(shape.local());
  shape.by_slots = Divider(slots);
  return shape;
}

BatchPlanShape checked_batch_plan_shape(const char* call, std::int64_t experts, int ranks,
                                        int slots, int domain_size, std::int64_t copy_rows,
                                        std::int64_t max_rows) {
  constexpr std::int64_t kMost = std::int64_t{1} << 20;  // experts, places, rows of a copy
  check_ranks(ranks);
  if (experts < 1 || experts > kMost || experts % ranks != 0) {
    refuse(
        call, "experts", std::to_string(experts),
        "a multiple of " + std::to_string(ranks) + ", the ranks, up to " + std::to_string(kMost));
  }
  if (slots < 1 || slots > (kMost - experts) / ranks) {
    refuse(call, "slots", std::to_string(slots),
           "1 … " + std::to_string((kMost - experts) / ranks) + " on each rank");
  }
  if (domain_size < 0) refuse(call, "domain_size", std::to_string(domain_size), "0 or more");
  if (copy_rows < 0 || copy_rows > kMost) {
    refuse(call, "copy_rows", std::to_string(copy_rows), "0 … " + std::to_string(kMost));
  }
  if (max_rows < 0) refuse(call, "max_rows", std::to_string(max_rows), "0 or more");
  return batch_plan_shape({experts, ranks}, slots, domain_size, copy_rows, max_rows);
}

BatchPlanner::BatchPlanner(const BatchPlanShape& shape)
    : shape_(shape),
      layout_(make_batch_plan_layout(shape_, OneTeam::kWarps, OneTeam::kDrafters)),
      memory_(layout_.bytes) {
  plan_.table.assign(index(shape_.places()), -1);
  plan_.load.resize(index(shape_.ranks));
  plan_.quota.resize(index(shape_.places()) * index(shape_.ranks));
}

void BatchPlanner::plan(std::span<const std::int32_t> counts, std::span<const std::int32_t> held) {
  const BatchPlanJob job{.counts = counts.data(),
                         .stride = shape_.experts,
                         .held = held.data(),
                         .memory = memory_.data(),
                         .table = plan_.table.data(),
                         .load = plan_.load.data(),
                         .quota = plan_.quota.data()};
  const OneTeam team;
  BatchPlanning(team, shape_, layout_, job).run();
}

}  // namespace ferry

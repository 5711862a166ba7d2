#include <algorithm>
#include <cstring>
#include <deque>
#include <numeric>
#include <string>

#include "core/check.hpp"
#include "core/experts/batch_planner.hpp"
#include "core/experts/copy_slots.hpp"
#include "ferry/experts.hpp"

namespace ferry {
namespace {

constexpr std::size_t kBatches = 64;  // that may be computed again

Tensor held_tensor(std::vector<std::int64_t> values, const Extents& shape) {
  const auto kept = std::make_shared<std::vector<std::int64_t>>(std::move(values));
  return {TensorView(kept->data(), Dtype::i64, shape), std::shared_ptr<void>(kept, kept->data())};
}

/// Which place each slot of one source goes to, in the order in which they come.
class Quotas {
 public:
  Quotas(const BatchPlan& plan, int ranks, std::span<const std::int32_t> counts, int source)
      : at_home_(counts.begin(), counts.end()),
        first_(counts.size(), -1),
        next_(plan.table.size(), -1),
        left_(plan.table.size()) {
    for (int place = static_cast<int>(left_.size()) - 1; place >= 0; --place) {
      const std::int32_t expert = plan.table[index(place)];
      left_[index(place)] =
          expert < 0 ? 0 : plan.quota[index(std::int64_t{place} * ranks + source)];
      if (left_[index(place)] == 0) continue;
      at_home_[index(expert)] -= left_[index(place)];
      next_[index(place)] = first_[index(expert)];
      first_[index(expert)] = place;
    }
  }
  /// −1: home.
  int next(std::int32_t expert) {
    int& place = first_[index(expert)];
    if (--at_home_[index(expert)] >= 0 || place < 0) return -1;
    const int now = place;
    if (--left_[index(now)] == 0) place = next_[index(now)];
    return now;
  }

 private:
  std::vector<std::int32_t> at_home_;
  std::vector<int> first_;
  std::vector<int> next_;
  std::vector<std::int32_t> left_;
};

}  // namespace

/// The last batches that differ in their counts, [ranks, experts], and their plans, the one of now
/// first. The same counts have the same plan, whatever the slots hold: a batch that is computed
/// again goes where it went, in any order of backward passes.
class BatchHistory {
 public:
  struct Batch {
    std::vector<std::int32_t> counts{};
    BatchPlan plan{};
    std::int64_t plan_id = 0;
  };

  bool empty() const { return batches_.empty(); }
  const Batch& current() const { return batches_.front(); }
  void add(std::vector<std::int32_t> counts, const BatchPlan& plan) {
    if (batches_.size() == kBatches) batches_.pop_back();
    batches_.push_front({std::move(counts), plan, ++plans_});
  }
  /// The batch with these counts becomes the current one. False: there is none.
  bool recall(const std::vector<std::int32_t>& counts) {
    const auto found = std::ranges::find(batches_, counts, &Batch::counts);
    if (found == batches_.end()) return false;
    std::rotate(batches_.begin(), found, found + 1);
    return true;
  }

 private:
  std::deque<Batch> batches_{};
  std::int64_t plans_ = 0;
};

BatchBalancer::BatchBalancer(std::int64_t experts, int ranks, int slots, int domain_size,
                             std::int64_t copy_rows, std::int64_t max_rows)
    : experts_(experts),
      ranks_(ranks),
      slots_(slots),
      planner_(std::make_unique<BatchPlanner>(checked_batch_plan_shape(
          "BatchBalancer", experts, ranks, slots, domain_size, copy_rows, max_rows))),
      slots_held_(std::make_unique<CopySlots<>>(index(std::int64_t{ranks} * slots))),
      history_(std::make_unique<BatchHistory>()) {}

BatchBalancer::~BatchBalancer() = default;
BatchBalancer::BatchBalancer(BatchBalancer&&) noexcept = default;
BatchBalancer& BatchBalancer::operator=(BatchBalancer&&) noexcept = default;

Tensor BatchBalancer::counts(const ConstTensorView& topk_idx) const {
  const auto found = std::make_shared<std::vector<std::int32_t>>(index(experts_));
  for (const std::int32_t expert : checked_routes("counts", topk_idx, experts_)) {
    if (expert >= 0) ++(*found)[index(expert)];
  }
  return {TensorView(found->data(), Dtype::i32, {experts_}),
          std::shared_ptr<void>(found, found->data())};
}

void BatchBalancer::invalidate(int rank) {
  if (rank < 0 || rank >= ranks_) {
    refuse("invalidate", "rank", std::to_string(rank), "0 … " + std::to_string(ranks_ - 1));
  }
  const std::int64_t each = experts_ / ranks_;
  slots_held_->forget([&](std::int32_t expert) { return expert / each == rank; });
}

void BatchBalancer::plan(const ConstTensorView& counts, bool again) {
  constexpr const char* kCall = "plan";
  check_exact(kCall, "counts", counts, Dtype::i32, {ranks_, experts_});
  std::vector<std::int32_t> given(index(experts_ * ranks_));
  std::memcpy(given.data(), counts.data, given.size() * sizeof(std::int32_t));
  const auto negative = std::ranges::find_if(given, [](auto count) { return count < 0; });
  if (negative != given.end()) {
    const std::int64_t at = negative - given.begin();
    refuse(kCall, "counts",
           std::to_string(*negative) + " of rank " + std::to_string(at / experts_) + ", expert " +
               std::to_string(at % experts_),
           "0 or more");
  }
  const std::int64_t all = std::accumulate(given.begin(), given.end(), std::int64_t{0});
  if (all > INT32_MAX) {
    refuse(kCall, "counts", std::to_string(all) + " slots of routes in all",
           std::to_string(INT32_MAX) + " at most");
  }
  if (!history_->recall(given)) {
    if (again) {
      refuse(kCall, "again", "counts of none of the last " + std::to_string(kBatches) + " batches",
             "a batch that is computed again soon: recompute (checkpoint) fewer forwards at once, "
             "with the routes that they had");
    }
    planner_->plan(given, slots_held_->held());
    history_->add(std::move(given), planner_->planned());
  }
  slots_held_->plan(history_->current().plan.table);
}

void BatchBalancer::fetching() {
  slots_held_->fetching();
}

void BatchBalancer::fetched() {
  slots_held_->fetched();
}

const std::vector<std::int32_t>& BatchBalancer::table() const {
  return slots_held_->table();
}

const std::vector<std::int32_t>& BatchBalancer::fetches() const {
  return slots_held_->fetches();
}

std::vector<std::int64_t> BatchBalancer::load() const {
  if (history_->empty()) return std::vector<std::int64_t>(index(ranks_));
  const std::vector<Rows>& load = history_->current().plan.load;
  return {load.begin(), load.end()};
}

std::int64_t BatchBalancer::plan_id() const {
  return history_->empty() ? 0 : history_->current().plan_id;
}

std::int64_t BatchBalancer::place_of(std::int64_t expert) const {
  const std::int64_t each = experts_ / ranks_;
  return expert / each * (each + slots_) + expert % each;
}

std::int64_t BatchBalancer::slot_place(std::int64_t copy) const {
  const std::int64_t each = experts_ / ranks_;
  return copy / slots_ * (each + slots_) + each + copy % slots_;
}

void BatchBalancer::check_places(const char* call, int rank) const {
  if (rank < 0 || rank >= ranks_) {
    refuse(call, "rank", std::to_string(rank), "0 … " + std::to_string(ranks_ - 1));
  }
  using State = CopySlots<>::State;
  const State state = slots_held_->state();
  if (state == State::none || state == State::missing) {
    refuse(call, "the plan", state == State::none ? "none" : "copies that are not fetched yet",
           "plan(counts), weights in the slots of fetches(), then fetched()");
  }
}

Tensor BatchBalancer::shares(int rank) const {
  check_places("shares", rank);
  const BatchPlan& plan = history_->current().plan;
  const std::int32_t* counts = history_->current().counts.data() + rank * experts_;
  // By expert: its own place first, then its copies in ascending rank and slot.
  std::vector<std::vector<std::int64_t>> copies(index(experts_));
  for (std::size_t copy = 0; copy < plan.table.size(); ++copy) {
    if (plan.table[copy] >= 0) {
      copies[index(plan.table[copy])].push_back(static_cast<std::int64_t>(copy));
    }
  }
  const std::size_t all = index(group_experts());
  std::vector<std::int64_t> made(2 * all);
  std::size_t at = 0;
  for (std::int64_t expert = 0; expert < experts_; ++expert) {
    const std::size_t home = at++;
    made[home] = place_of(expert);
    made[all + home] = counts[expert];
    for (const std::int64_t copy : copies[index(expert)]) {
      const std::int32_t share = plan.quota[index(copy * ranks_ + rank)];
      made[at] = slot_place(copy);
      made[all + at++] = share;
      made[all + home] -= share;
    }
  }
  return held_tensor(std::move(made), {2, group_experts()});
}

Tensor BatchBalancer::places(const ConstTensorView& topk_idx, int rank) const {
  constexpr const char* kCall = "places";
  check_places(kCall, rank);
  const std::vector<std::int32_t>& counts = history_->current().counts;
  const BatchPlan& plan = history_->current().plan;
  const std::vector<std::int32_t> routes = checked_routes(kCall, topk_idx, experts_);
  const auto counted = std::span(counts).subspan(index(rank * experts_), index(experts_));
  std::vector<std::int32_t> named(counted.size());
  for (const std::int32_t expert : routes) {
    if (expert >= 0) ++named[index(expert)];
  }
  const auto [found, wanted] = std::ranges::mismatch(named, counted);
  if (found != named.end()) {
    refuse(kCall, "topk_idx",
           std::to_string(*found) + " slots for expert " + std::to_string(found - named.begin()),
           std::to_string(*wanted) + ", as the counts of rank " + std::to_string(rank) + " say");
  }
  Quotas quotas(plan, ranks_, counted, rank);
  std::vector<std::int64_t> places;
  places.reserve(routes.size());
  for (const std::int32_t expert : routes) {
    const int copy = expert < 0 ? -1 : quotas.next(expert);
    places.push_back(expert < 0 ? -1 : copy < 0 ? place_of(expert) : slot_place(copy));
  }
  return held_tensor(std::move(places), {topk_idx.shape[0], topk_idx.shape[1]});
}

}  // namespace ferry

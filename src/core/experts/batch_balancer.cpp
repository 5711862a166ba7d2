#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>

#include "core/check.hpp"
#include "core/experts/batch_planner.hpp"
#include "ferry/experts.hpp"

namespace ferry {
namespace {

constexpr std::int64_t kMostBalanced = std::int64_t{1} << 20;  // experts, places

std::int64_t refuse_unless_possible(std::int64_t experts, int ranks, int slots) {
  constexpr const char* kCall = "BatchBalancer";
  check_ranks(ranks);
  if (experts < 1 || experts > kMostBalanced || experts % ranks != 0) {
    refuse(kCall, "experts", std::to_string(experts),
           "a multiple of " + std::to_string(ranks) + ", the ranks, up to " +
               std::to_string(kMostBalanced));
  }
  if (slots < 1 || slots > (kMostBalanced - experts) / ranks) {
    refuse(kCall, "slots", std::to_string(slots),
           "1 … " + std::to_string((kMostBalanced - experts) / ranks) + " on each rank");
  }
  return experts;
}

Tensor held_tensor(std::vector<std::int64_t> values, const Extents& shape) {
  const auto kept = std::make_shared<std::vector<std::int64_t>>(std::move(values));
  return {TensorView(kept->data(), Dtype::i64, shape), std::shared_ptr<void>(kept, kept->data())};
}

/// Which place each slot of one source goes to, in the order in which they come.
class Quotas {
 public:
  Quotas(const BatchPlanner& planner, std::span<const std::int32_t> counts, int source)
      : at_home_(counts.begin(), counts.end()),
        first_(counts.size(), -1),
        next_(planner.table().size(), -1),
        left_(planner.table().size()) {
    for (int place = static_cast<int>(left_.size()) - 1; place >= 0; --place) {
      const std::int32_t expert = planner.table()[index(place)];
      left_[index(place)] = expert < 0 ? 0 : planner.quota(place, source);
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

BatchBalancer::BatchBalancer(std::int64_t experts, int ranks, int slots, int domain_size)
    : experts_(refuse_unless_possible(experts, ranks, slots)),
      ranks_(ranks),
      slots_(slots),
      counts_(index(experts * ranks)),
      held_(index(std::int64_t{ranks} * slots), -1),
      table_(held_),
      fetches_(held_) {
  if (domain_size < 0) {
    refuse("BatchBalancer", "domain_size", std::to_string(domain_size), "0 or more");
  }
  planner_ = std::make_unique<BatchPlanner>(Placement{experts, ranks}, slots,
                                            Domains::blocks(ranks, domain_size));
}

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
  for (std::int32_t& expert : held_) {
    if (expert >= 0 && expert / each == rank) expert = -1;
  }
}

void BatchBalancer::plan(const ConstTensorView& counts) {
  constexpr const char* kCall = "plan";
  check_exact(kCall, "counts", counts, Dtype::i32, {ranks_, experts_});
  std::memcpy(counts_.data(), counts.data, counts_.size() * sizeof(std::int32_t));
  const auto negative = std::ranges::find_if(counts_, [](auto count) { return count < 0; });
  if (negative != counts_.end()) {
    const std::int64_t at = negative - counts_.begin();
    refuse(kCall, "counts",
           std::to_string(*negative) + " of rank " + std::to_string(at / experts_) + ", expert " +
               std::to_string(at % experts_),
           "0 or more");
  }
  planner_->plan(counts_, held_);
  table_.assign(planner_->table().begin(), planner_->table().end());
  fetched_ = true;
  for (std::size_t place = 0; place < table_.size(); ++place) {
    const bool missing = table_[place] >= 0 && table_[place] != held_[place];
    fetches_[place] = missing ? table_[place] : -1;
    if (missing) held_[place] = -1;
    fetched_ = fetched_ && !missing;
  }
  planned_ = true;
}

void BatchBalancer::fetched() {
  for (std::size_t place = 0; place < table_.size(); ++place) {
    if (fetches_[place] >= 0) held_[place] = fetches_[place];
  }
  fetched_ = true;
}

std::vector<std::int64_t> BatchBalancer::load() const {
  return {planner_->load().begin(), planner_->load().end()};
}

std::int64_t BatchBalancer::place_of(std::int64_t expert) const {
  const std::int64_t each = experts_ / ranks_;
  return expert / each * (each + slots_) + expert % each;
}

Tensor BatchBalancer::places(const ConstTensorView& topk_idx, int rank) const {
  constexpr const char* kCall = "places";
  if (rank < 0 || rank >= ranks_) {
    refuse(kCall, "rank", std::to_string(rank), "0 … " + std::to_string(ranks_ - 1));
  }
  if (!planned_ || !fetched_) {
    refuse(kCall, "the plan", planned_ ? "copies that are not fetched yet" : "none",
           "plan(counts), weights in the slots of fetches(), then fetched()");
  }
  const std::vector<std::int32_t> routes = checked_routes(kCall, topk_idx, experts_);
  const auto counted = std::span(counts_).subspan(index(rank * experts_), index(experts_));
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
  Quotas quotas(*planner_, counted, rank);
  const std::int64_t each = experts_ / ranks_;
  std::vector<std::int64_t> places;
  places.reserve(routes.size());
  for (const std::int32_t expert : routes) {
    const int copy = expert < 0 ? -1 : quotas.next(expert);
    places.push_back(expert < 0 ? -1
                     : copy < 0 ? place_of(expert)
                                : copy / slots_ * (each + slots_) + each + copy % slots_);
  }
  return held_tensor(std::move(places), {topk_idx.shape[0], topk_idx.shape[1]});
}

}  // namespace ferry

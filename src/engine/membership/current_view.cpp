#include "engine/membership/current_view.hpp"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "base/log.hpp"
#include "base/text.hpp"
#include "core/check.hpp"

namespace ferry::engine {

CurrentView::CurrentView(int rank, int size) : rank_(rank), size_(size) {
  for (int each = 0; each < size; ++each) view_.ranks.push_back(each);
}

GroupView CurrentView::get() const {
  std::scoped_lock lock(mutex_);
  GroupView now = view_;
  now.step = step();
  return now;
}

void CurrentView::begin(const Epoch& next, std::vector<int> joined) {
  GroupView view{next.number, next.ranks, {}, next.step, std::move(joined)};
  for (int rank = 0; rank < size_; ++rank) {  // the same on all ranks: each may pass epochs
    if (!std::binary_search(next.ranks.begin(), next.ranks.end(), rank)) view.lost.push_back(rank);
  }
  std::scoped_lock lock(mutex_);
  view_ = view;
  step_.store(next.step, std::memory_order_relaxed);
  epoch_.store(view.epoch, std::memory_order_relaxed);
  if (logs(LogLevel::info)) {
    log(LogLevel::info, rank_, "regroup",
        {{"epoch", view.epoch},
         {"ranks", spell_numbers(view.ranks)},
         {"lost", spell_numbers(view.lost)},
         {"joined", spell_numbers(view.joined)},
         {"step", view.step}});
  }
}

std::optional<Error> CurrentView::refusal_of(std::uint64_t step) const {
  const std::string got = "commit: step: got " + std::to_string(step) + ", expected ";
  if (step <= this->step()) {
    return Error(ErrorKind::invalid_argument,
                 got + "more than " + std::to_string(this->step()) + ", which is committed");
  }
  if (step == std::numeric_limits<std::uint64_t>::max()) {  // a vault numbers it plus 1
    return Error(ErrorKind::invalid_argument, got + "less");
  }
  return std::nullopt;
}

void CurrentView::commit(std::uint64_t step) {
  std::scoped_lock lock(mutex_);
  step_.store(step, std::memory_order_relaxed);
  view_.joined.clear();
}

void CurrentView::check_alive(std::span<const std::int32_t> routes, std::int64_t topk,
                              const Placement& placement) const {
  if (epoch() == 1) return;
  const GroupView now = get();
  if (now.ranks.size() == static_cast<std::size_t>(size_)) return;
  for (std::size_t i = 0; i < routes.size(); ++i) {
    if (routes[i] < 0) continue;
    const int seat = placement.rank_of(routes[i]);
    if (std::binary_search(now.ranks.begin(), now.ranks.end(), seat)) continue;
    const auto slot = static_cast<std::int64_t>(i);
    refuse("plan",
           "topk_idx[" + std::to_string(slot / topk) + ", " + std::to_string(slot % topk) + "]",
           "expert " + std::to_string(routes[i]) + " of rank " + std::to_string(seat) +
               ", which is not in epoch " + std::to_string(now.epoch) + " of the group",
           "experts of " + spell_ranks(now.ranks) + ", or -1");
  }
}

void CurrentView::check_whole(const char* call) const {
  const GroupView now = get();
  if (now.ranks.size() == static_cast<std::size_t>(size_)) return;
  throw Error(ErrorKind::unsupported,
              std::string(call) + ": not in a group that has lost ranks (" +
                  spell_ranks(now.ranks) + " of " + std::to_string(size_) +
                  " are left); make a new group",
              {rank_, -1, call, 0, 0, 0});
}

}  // namespace ferry::engine

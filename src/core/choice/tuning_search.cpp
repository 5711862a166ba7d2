#include "core/choice/tuning_search.hpp"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <tuple>
#include <utility>

namespace ferry {
namespace {

constexpr std::size_t kFirstCalls = 2;  // of a place that is new
constexpr std::size_t kLeastCalls = 3;  // of the place where it settles
constexpr double kHopeless = 1.5;       // times as long as the fastest: out of the race
constexpr double kSteady = 1.01;  // the middle of calls so near to the shortest: no more tell more
constexpr int kRecent = 9;        // calls whose middle tells whether times have shifted
constexpr double kShifted = 1.3;  // so many times as long, or as short
constexpr int kFirstPause = 32;   // calls after settling, before it may start again: at first
constexpr int kLongestPause = 1024;

double middle(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto at = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

/// What a call usually takes: the mean of the shorter half, for chance makes calls longer.
double usual(std::vector<double> values) {
  const auto half = values.begin() + static_cast<std::ptrdiff_t>((values.size() + 1) / 2);
  std::partial_sort(values.begin(), half, values.end());
  return std::accumulate(values.begin(), half, 0.0) / static_cast<double>(half - values.begin());
}

bool steady(const std::vector<double>& seconds) {
  return seconds.size() >= kLeastCalls &&
         middle(seconds) <= kSteady * *std::min_element(seconds.begin(), seconds.end());
}

int steps(const TuningPlace& a, const TuningPlace& b) {
  int sum = 0;
  for (std::size_t axis = 0; axis < kTuningAxes; ++axis) sum += std::abs(a[axis] - b[axis]);
  return sum;
}

}  // namespace

TuningSearch::TuningSearch(const TuningGrid& grid)
    : grid_(grid), best_(grid.start), fastest_(grid.start), pause_(kFirstPause) {
  turn_.assign(kFirstCalls, grid.start);
  settled_ = grid.sizes == TuningPlace{1, 1, 1};  // nothing to choose
}

TuningSearch::Measured* TuningSearch::find(const TuningPlace& place) {
  return const_cast<Measured*>(std::as_const(*this).find(place));
}

const TuningSearch::Measured* TuningSearch::find(const TuningPlace& place) const {
  const auto found = std::find_if(measured_.begin(), measured_.end(),
                                  [&](const Measured& one) { return one.place == place; });
  return found == measured_.end() ? nullptr : &*found;
}

double TuningSearch::seconds() const {
  const Measured* at = find(best_);
  return settled_ ? settled_s_ : at == nullptr ? 0 : middle(at->seconds);
}

double TuningSearch::gain() const {
  const Measured *start = find(grid_.start), *best = find(best_);
  if (start == nullptr || best == nullptr) return 0;
  return usual(best->seconds) / usual(start->seconds);
}

void TuningSearch::observe(const TuningPlace& place, double seconds) {
  if (!(seconds > 0)) return;
  if (settled_) {
    if (place == best_) watch(seconds);
    return;
  }
  if (!warm_) {  // the first call of a kind finds nothing in place
    warm_ = true;
    return;
  }
  if (find(place) == nullptr) measured_.push_back({place, {}});
  find(place)->seconds.push_back(seconds);
  ++probes_;
  if (++at_ == turn_.size()) go_on();
  if (probes_ >= kMostProbes && !settled_) settle();
}

/// The best place of those with so many calls.
void TuningSearch::choose(std::size_t least) {
  const Measured* fastest = nullptr;
  for (const Measured& one : measured_) {
    if (one.seconds.size() < least) continue;
    if (fastest == nullptr || usual(one.seconds) < usual(fastest->seconds)) fastest = &one;
  }
  if (fastest == nullptr) return;
  fastest_ = fastest->place;
  const auto cost = [&](const Measured& one) {
    return std::tuple(one.place[sm_axis], steps(one.place, grid_.start), usual(one.seconds));
  };
  const std::vector<double>& there = fastest->seconds;
  const double shortest = *std::min_element(there.begin(), there.end());
  const double most = std::max(usual(there), kWorth * shortest);
  const Measured* best = fastest;
  for (const Measured& one : measured_) {
    if (one.seconds.size() < least || usual(one.seconds) > most) continue;
    if (cost(one) < cost(*best)) best = &one;
  }
  best_ = best->place;
}

/// What is not known beside the fastest place, and beside the best.
std::vector<TuningPlace> TuningSearch::unknown_neighbours() const {
  std::vector<TuningPlace> found;
  for (const TuningPlace& from : {fastest_, best_}) {
    for (std::size_t axis = 0; axis < kTuningAxes; ++axis) {
      for (const int step : {-1, 1}) {
        TuningPlace place = from;
        place[axis] += step;
        const bool inside = place[axis] >= 0 && place[axis] < grid_.sizes[axis];
        const bool listed = std::find(found.begin(), found.end(), place) != found.end();
        if (inside && !listed && find(place) == nullptr) found.push_back(place);
      }
    }
  }
  return found;
}

/// One turn has ended: the next is of new places; if there are none, of those that may be fastest.
void TuningSearch::go_on() {
  choose(1);
  at_ = 0;
  turn_ = unknown_neighbours();
  if (!turn_.empty()) {
    const std::vector<TuningPlace> once = turn_;
    for (std::size_t i = 1; i < kFirstCalls; ++i) {
      turn_.insert(turn_.end(), once.begin(), once.end());
    }
    return;
  }
  race();
}

/// After n calls of the fastest place, of all places the best 2 / n go on, two at least, and those
/// that are as good.
void TuningSearch::race() {
  std::vector<const Measured*> order;
  for (const Measured& one : measured_) order.push_back(&one);
  std::stable_sort(order.begin(), order.end(), [](const Measured* a, const Measured* b) {
    return usual(a->seconds) < usual(b->seconds);
  });
  const std::size_t calls = std::max(order.front()->seconds.size(), kFirstCalls);
  const std::size_t share = std::max<std::size_t>(2, (2 * order.size() + calls / 2) / calls);
  const double fastest = usual(order.front()->seconds);
  bool known = true;
  for (std::size_t i = 0; i < order.size(); ++i) {
    const double took = usual(order[i]->seconds);
    if (took > (i < share ? kHopeless : kWorth) * fastest) break;
    known = known && steady(order[i]->seconds);
    turn_.push_back(order[i]->place);
  }
  if (known || (turn_.size() == 1 && calls >= kLeastCalls)) settle();
}

void TuningSearch::settle() {
  choose(kLeastCalls);
  settled_s_ = middle(find(best_) == nullptr ? std::vector<double>() : find(best_)->seconds);
  settled_ = true;
  recent_.clear();
  watched_ = 0;
}

void TuningSearch::watch(double seconds) {
  if (std::ssize(recent_) == kRecent) recent_.erase(recent_.begin());
  recent_.push_back(seconds);
  if (++watched_ == kRecent || settled_s_ == 0) settled_s_ = middle(recent_);
  if (watched_ < pause_ || measured_.empty()) return;
  const double now = middle(recent_);
  if (now < kShifted * settled_s_ && now * kShifted > settled_s_) return;
  pause_ = std::min(2 * pause_, kLongestPause);
  ++restarts_;
  measured_.clear();
  probes_ = 0;
  settled_ = false;
  turn_.assign(kFirstCalls, best_);
  at_ = 0;
}

}  // namespace ferry

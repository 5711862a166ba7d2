#include "core/choice/tuning_search.hpp"

#include <algorithm>
#include <cstdlib>
#include <tuple>
#include <utility>

namespace ferry {
namespace {

constexpr std::size_t kSamples = 3;  // of a place: one that is slow by chance does not count
constexpr double kHopeless = 1.5;    // times the best, twice: that says enough
constexpr int kRecent = 9;           // calls whose middle tells whether times have shifted
constexpr double kShifted = 1.3;     // so many times as long, or as short
constexpr int kFirstPause = 32;      // calls after settling, before it may start again: at first
constexpr int kLongestPause = 1024;

double middle(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto at = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

int steps(const TuningPlace& a, const TuningPlace& b) {
  int sum = 0;
  for (std::size_t axis = 0; axis < kTuningAxes; ++axis) sum += std::abs(a[axis] - b[axis]);
  return sum;
}

}  // namespace

TuningSearch::TuningSearch(const TuningGrid& grid)
    : grid_(grid), next_(grid.start), best_(grid.start), fastest_(grid.start), pause_(kFirstPause) {
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
  const Measured* start = find(grid_.start);
  const double before = start == nullptr ? 0 : middle(start->seconds);
  return before > 0 ? seconds() / before : 0;
}

bool TuningSearch::enough(const Measured& at) const {
  if (at.seconds.size() >= kSamples) return true;
  const Measured* best = find(best_);
  return best != nullptr && best->seconds.size() >= kSamples && at.seconds.size() > 1 &&
         *std::min_element(at.seconds.begin(), at.seconds.end()) >
             kHopeless * middle(best->seconds);
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
  Measured& at = *find(place);
  at.seconds.push_back(seconds);
  ++probes_;
  if (place == next_ && enough(at)) {
    choose();
    go_on();
  }
  if (probes_ >= kMostProbes && !settled_) {
    choose();
    settle();
  }
}

/// The best place of those that were measured enough.
void TuningSearch::choose() {
  double fastest = 0;
  for (const Measured& one : measured_) {
    const double took = middle(one.seconds);
    if (one.seconds.size() < kSamples || (fastest > 0 && took >= fastest)) continue;
    fastest = took;
    fastest_ = one.place;
  }
  if (fastest == 0) return;
  const auto cost = [&](const Measured& one) {
    return std::tuple(one.place[sm_axis], steps(one.place, grid_.start), middle(one.seconds));
  };
  // Chance makes calls longer, not shorter: what the fastest place can do is its shortest call.
  const std::vector<double>& there = find(fastest_)->seconds;
  const double most = std::max(fastest, kWorth * *std::min_element(there.begin(), there.end()));
  const Measured* best = nullptr;
  for (const Measured& one : measured_) {
    if (one.seconds.size() < kSamples || middle(one.seconds) > most) continue;
    if (best == nullptr || cost(one) < cost(*best)) best = &one;
  }
  best_ = best->place;
}

/// To a neighbour that is not known: of the fastest place, and of the best.
void TuningSearch::go_on() {
  for (const TuningPlace& from : {fastest_, best_}) {
    for (std::size_t axis = 0; axis < kTuningAxes; ++axis) {
      for (const int step : {-1, 1}) {
        TuningPlace place = from;
        place[axis] += step;
        if (place[axis] < 0 || place[axis] >= grid_.sizes[axis] || find(place) != nullptr) continue;
        next_ = place;
        return;
      }
    }
  }
  settle();
}

void TuningSearch::settle() {
  settled_s_ = middle(find(best_) == nullptr ? std::vector<double>() : find(best_)->seconds);
  settled_ = true;
  next_ = best_;
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
  next_ = best_;
}

}  // namespace ferry

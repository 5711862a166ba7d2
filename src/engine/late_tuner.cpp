#include "engine/late_tuner.hpp"

#include <algorithm>
#include <limits>

namespace ferry::engine {
namespace {

/// Spreads over all values, so that one in n calls of each kind is chosen, whatever comes between.
std::uint64_t mixed(std::uint64_t number) {
  return number * 0x9e3779b97f4a7c15u >> 32;
}

}  // namespace

LateTuner::LateTuner(const GroupConfig& config, int ranks)
    : on_(config.tune.value_or(false)),
      fewest_(config.fewest_sms),
      most_(config.most_sms),
      fresh_(ranks, config.tuning, config.fewest_sms, config.most_sms),
      tuner_(fresh_) {}

/// As all ranks have it, as far as this one knows.
TuningKey LateTuner::of_group(const TuningKey& key) const {
  TuningKey group = key;
  const auto known = classes_.find(key);
  if (known != classes_.end()) group.tokens_class = known->second;
  return group;
}

LateTuner::Choice LateTuner::next(const TuningKey& key, std::int64_t tokens, std::uint64_t number) {
  const ExchangeTuner::State now = tuner_.state(of_group(key));
  const bool due = !now.settled || mixed(number) % kSettledPeriod == 0;
  const Choice made{key, tokens, now.next.num_sms, number, due && made_.size() < kMostKept};
  if (made.timed) made_.push_back(made);
  return made;
}

int LateTuner::best(const TuningKey& key) const {
  return tuner_.state(of_group(key)).best.num_sms;
}

int LateTuner::as_started(const TuningKey& key) const {
  const TunedCall* given = on_ ? fresh_.start_of(key) : nullptr;
  if (given == nullptr || given->num_sms == 0) return 0;
  return std::clamp(given->num_sms, fewest_, most_);
}

void LateTuner::took(std::uint64_t number, double seconds) {
  constexpr std::int64_t kMostTokens = std::numeric_limits<std::uint32_t>::max();
  const auto made = find(number);
  if (made == made_.end()) return;  // others have told of later ones, but not of this
  news_.push_back({number, static_cast<std::uint32_t>(std::min(made->tokens, kMostTokens)),
                   static_cast<std::uint32_t>(made->num_sms), static_cast<float>(seconds), 0});
}

void LateTuner::lost(std::uint64_t number) {
  if (const auto made = find(number); made != made_.end()) made_.erase(made);
}

std::deque<LateTuner::Choice>::iterator LateTuner::find(std::uint64_t number) {
  return std::find_if(made_.begin(), made_.end(),
                      [&](const Choice& one) { return one.number == number; });
}

CallTimes LateTuner::tell() {
  CallTimes times;
  for (; times.count < CallTimes::kMost && !news_.empty(); news_.pop_front()) {
    times.calls[times.count++] = news_.front();
  }
  return times;
}

void LateTuner::heard(const std::vector<CallTimes>& all) {
  told_.resize(all.size());
  for (std::size_t r = 0; r < all.size(); ++r) {
    const std::uint64_t count = std::min<std::uint64_t>(all[r].count, CallTimes::kMost);
    for (std::size_t i = 0; i < count && told_[r].size() < kMostKept; ++i) {
      told_[r].push_back(all[r].calls[i]);
    }
  }
  const auto waits = [](const std::deque<CallTime>& rank) { return rank.empty(); };
  while (std::none_of(told_.begin(), told_.end(), waits)) {
    std::uint64_t newest = 0;
    std::vector<CallTime> first;
    for (const auto& rank : told_) {
      first.push_back(rank.front());
      newest = std::max(newest, rank.front().number);
    }
    while (!made_.empty() && made_.front().number < newest) made_.pop_front();
    // A call that some rank did not time counts nowhere.
    const bool same = std::all_of(first.begin(), first.end(),
                                  [&](const CallTime& one) { return one.number == newest; });
    if (same) count(first);
    for (auto& rank : told_) {
      if (same || rank.front().number < newest) rank.pop_front();
    }
  }
}

/// One call, of all ranks.
void LateTuner::count(const std::vector<CallTime>& ranks) {
  if (made_.empty() || made_.front().number != ranks.front().number) return;
  const TuningKey own = made_.front().key;
  made_.pop_front();
  const auto by_tokens = [](const CallTime& a, const CallTime& b) { return a.tokens < b.tokens; };
  const auto by_time = [](const CallTime& a, const CallTime& b) { return a.seconds < b.seconds; };
  const auto by_sms = [](const CallTime& a, const CallTime& b) { return a.num_sms < b.num_sms; };
  const std::int64_t tokens = std::max_element(ranks.begin(), ranks.end(), by_tokens)->tokens;
  // Times include waiting for ranks that come later; the last one waits for nobody.
  const CallTime& last = *std::min_element(ranks.begin(), ranks.end(), by_time);
  const auto [fewest, most] = std::minmax_element(ranks.begin(), ranks.end(), by_sms);
  TuningKey group = own;
  group.tokens_class = classes_[own] = tokens_class_of(tokens);
  std::scoped_lock lock(mutex_);
  const CallSettings wanted = tuner_.next(group);
  const bool alike = fewest->num_sms == most->num_sms;
  if (!alike || static_cast<int>(fewest->num_sms) != wanted.num_sms) return;
  tuner_.observe(group, wanted, tokens, static_cast<double>(last.seconds));
}

void LateTuner::forget() {
  std::scoped_lock lock(mutex_);
  tuner_ = fresh_;
  classes_.clear();
  made_.clear();
  news_.clear();
  told_.clear();
}

std::vector<TunedCall> LateTuner::tuned() const {
  std::scoped_lock lock(mutex_);
  return on_ ? tuner_.tuned() : std::vector<TunedCall>();
}

}  // namespace ferry::engine

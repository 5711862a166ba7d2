#include "core/choice/store_choice.hpp"

#include <algorithm>
#include <bit>

namespace ferry {
namespace {

constexpr std::uint64_t kTries = 3, kTryEvery = 4, kAgainEvery = 64, kRarelyEvery = 256;
constexpr double kMuchBetter = 2;

}  // namespace

StoreChoice::Calls StoreChoice::calls_of(CallKind kind, std::size_t bytes) {
  return {kind, static_cast<int>(std::bit_width(bytes))};
}

double StoreChoice::Way::least_s() const {
  const auto known = std::min<std::uint64_t>(count, last_s.size());
  if (known == 0) return 0;
  return *std::min_element(last_s.begin(), last_s.begin() + static_cast<std::ptrdiff_t>(known));
}

/// Past the caches until both were tried: where that is wrong it costs little.
bool StoreChoice::Seen::best() const {
  const double cached = ways[0].least_s(), past = ways[1].least_s();
  return cached == 0 || past == 0 || past <= cached;
}

bool StoreChoice::best(const Calls& calls) const {
  const auto found = seen_.find(calls);
  return found == seen_.end() || found->second.best();
}

bool StoreChoice::next(const Calls& calls) const {
  const auto found = seen_.find(calls);
  if (found == seen_.end()) return true;
  const Seen& seen = found->second;
  const bool best = seen.best();
  const Way& kept = seen.ways[best ? 1 : 0];
  const Way& other = seen.ways[best ? 0 : 1];
  const bool far_off = other.least_s() > kMuchBetter * kept.least_s();
  const std::uint64_t every = other.count < kTries ? kTryEvery
                              : far_off            ? kRarelyEvery
                                                   : kAgainEvery;
  return (kept.count + other.count) % every == every - 1 ? !best : best;
}

void StoreChoice::observe(const Calls& calls, bool past, double seconds) {
  Way& way = seen_[calls].ways[past ? 1 : 0];
  way.last_s[way.count++ % way.last_s.size()] = seconds;
}

}  // namespace ferry

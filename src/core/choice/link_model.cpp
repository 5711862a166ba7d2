#include "core/choice/link_model.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

namespace ferry {
namespace {

constexpr double kSameRate = 1.15, kSameLatency = 2;
constexpr double kSlowPair = 1.5;  // times slower than both interfaces
constexpr double kShortest = 1e-9;

bool differ(double one, double other, double times) {
  return one > other * times || other > one * times;
}

bool sane(const LinkProbe& probe) {
  return std::isfinite(probe.bytes_per_s) && std::isfinite(probe.latency_s) &&
         probe.bytes_per_s > 0 && probe.latency_s > 0;
}

/// Of every pair that was probed: the slower direction of the best flow in each.
std::map<std::pair<int, int>, double> pairs_in(const std::vector<LinkProbe>& probes) {
  std::map<std::pair<int, int>, double> ways, pairs;
  for (const LinkProbe& probe : probes) {
    if (!sane(probe)) continue;
    double& best = ways[{probe.from, probe.to}];
    best = std::max(best, probe.bytes_per_s);
  }
  for (const auto& [way, rate] : ways) {
    const auto [at, first] = pairs.try_emplace(std::minmax(way.first, way.second), rate);
    if (!first) at->second = std::min(at->second, rate);
  }
  return pairs;
}

}  // namespace

double probed_rate(double drained_s, double all_s, std::size_t bytes) {
  const auto counted = static_cast<double>(bytes);
  const double part = counted / (counted + kProbeDrain);
  return counted / std::max({all_s - drained_s, all_s * part, kShortest});
}

LinkTable::LinkTable(int domains, const LinkCost& first) : ports_(index(domains), first) {}

void LinkTable::set_slow_pair(int a, int b, double bytes_per_second) {
  const SlowPair pair{std::min(a, b), std::max(a, b), bytes_per_second};
  const auto at = std::lower_bound(slow_.begin(), slow_.end(), pair,
                                   [](const SlowPair& one, const SlowPair& other) {
                                     return std::pair(one.a, one.b) < std::pair(other.a, other.b);
                                   });
  if (at != slow_.end() && at->a == pair.a && at->b == pair.b) {
    *at = pair;
  } else {
    slow_.insert(at, pair);
  }
}

LinkCost LinkTable::link(int a, int b) const {
  LinkCost cost{(port(a).latency_s + port(b).latency_s) / 2,
                std::min(port(a).bytes_per_s, port(b).bytes_per_s)};
  for (const SlowPair& pair : slow_) {
    if (pair.a != std::min(a, b) || pair.b != std::max(a, b)) continue;
    cost.bytes_per_s = std::min(cost.bytes_per_s, pair.bytes_per_second);
  }
  return cost;
}

double LinkTable::largest_latency() const {
  double largest = 0;
  for (const LinkCost& port : ports_) largest = std::max(largest, port.latency_s);
  return largest;
}

bool LinkTable::measured(const std::vector<LinkProbe>& probes) {
  const bool ports = measure_ports(probes);
  return measure_pairs(probes) || ports;
}

bool LinkTable::doubtful(const std::vector<LinkProbe>& probes) const {
  LinkTable after = *this;
  after.measured(probes);
  return std::any_of(after.slow_.begin(), after.slow_.end(), [&](const SlowPair& pair) {
    return differ(link(pair.a, pair.b).bytes_per_s, pair.bytes_per_second, kSameRate);
  });
}

/// What was not probed stays as it is.
bool LinkTable::measure_pairs(const std::vector<LinkProbe>& probes) {
  if (domains() < 3) return false;  // a pair is its ports
  const std::vector<SlowPair> before = std::exchange(slow_, {});
  const auto probed = pairs_in(probes);
  for (const SlowPair& pair : before) {
    if (!probed.contains({pair.a, pair.b})) slow_.push_back(pair);
  }
  bool changed = false;
  for (const auto& [ends, rate] : probed) {
    const auto old = std::find_if(before.begin(), before.end(), [&](const SlowPair& pair) {
      return std::pair(pair.a, pair.b) == ends;
    });
    const bool was = old != before.end();
    const auto [a, b] = ends;
    const bool is = rate * kSlowPair < std::min(port(a).bytes_per_s, port(b).bytes_per_s);
    const bool stays = was && is && !differ(rate, old->bytes_per_second, kSameRate);
    if (is) set_slow_pair(a, b, stays ? old->bytes_per_second : rate);
    changed |= was != is || (is && !stays);
  }
  return changed;
}

bool LinkTable::measure_ports(const std::vector<LinkProbe>& probes) {
  bool changed = false;
  for (int d = 0; d < domains(); ++d) {
    double rate = 0, latency = 0;
    for (const LinkProbe& probe : probes) {
      if (!sane(probe) || (probe.from != d && probe.to != d)) continue;
      latency = rate > 0 ? std::min(latency, probe.latency_s) : probe.latency_s;
      rate = std::max(rate, probe.bytes_per_s);
    }
    if (rate == 0) continue;
    LinkCost& port = ports_[index(d)];
    if (differ(latency, port.latency_s, kSameLatency)) port.latency_s = latency;
    if (!differ(rate, port.bytes_per_s, kSameRate)) continue;
    port.bytes_per_s = rate;
    changed = true;
  }
  return changed;
}

}  // namespace ferry

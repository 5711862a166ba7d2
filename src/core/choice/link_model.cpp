#include "core/choice/link_model.hpp"

#include <algorithm>
#include <cmath>

namespace ferry {
namespace {

constexpr double kSameRate = 1.15, kSameLatency = 2;
constexpr double kShortest = 1e-9;

bool differ(double one, double other, double times) {
  return one > other * times || other > one * times;
}

}  // namespace

double probed_rate(double drained_s, double all_s) {
  constexpr double kBytes = kProbeBytes, kPart = kBytes / (kBytes + kProbeDrain);
  return kBytes / std::max({all_s - drained_s, all_s * kPart, kShortest});
}

LinkTable::LinkTable(int domains, const LinkCost& first) : ports_(index(domains), first) {}

LinkCost LinkTable::link(int a, int b) const {
  return {(port(a).latency_s + port(b).latency_s) / 2,
          std::min(port(a).bytes_per_s, port(b).bytes_per_s)};
}

double LinkTable::largest_latency() const {
  double largest = 0;
  for (const LinkCost& port : ports_) largest = std::max(largest, port.latency_s);
  return largest;
}

double LinkTable::slowest() const {
  double least = port(0).bytes_per_s;
  for (const LinkCost& port : ports_) least = std::min(least, port.bytes_per_s);
  return least;
}

bool LinkTable::measured(const std::vector<LinkProbe>& probes) {
  bool changed = false;
  for (int d = 0; d < domains(); ++d) {
    double rate = 0, latency = 0;
    for (const LinkProbe& probe : probes) {
      const bool sane = std::isfinite(probe.bytes_per_s) && std::isfinite(probe.latency_s) &&
                        probe.bytes_per_s > 0 && probe.latency_s > 0;
      if (!sane || (probe.from != d && probe.to != d)) continue;
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

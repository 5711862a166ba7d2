#include "core/choice/collective_choice.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>

#include "core/collective_shares.hpp"

namespace ferry {
namespace {

constexpr double kWorthUnequal = 0.95;  // of the time with equal shares
constexpr double kNear = 1.5;           // times the best: worth a try
constexpr double kWorthProbing = 3;
constexpr std::uint64_t kProbe = 64, kFirstProbe = 8;
constexpr double kLikely = 0.8;  // of the time with equal shares: more than measurements err
constexpr double kFarOff = 1.5;  // times the expected, or a part of it
constexpr int kOdd = 3, kUsual = 4;
constexpr double kFirstGap = 16 << 20, kLongestGap = 1 << 30, kPeriod = 256 << 20;
constexpr double kFollow = 0.25;
constexpr double kBetter = 0.999;  // of a time, so that sums of rounding errors decide nothing
constexpr double kForgetCorrection = 0.03;  // of another way's correction, in each call
constexpr double kAsGoodAsNew = 1.1;  // times the least correction: its observations are forgotten

/// The parts of domains that need at most `t` times the time in which a port carries the tensor.
double part_within(double t, double port, int domains) {
  return std::max(0.0, (t * port - 1) / (domains - 2));
}

/// What domains can finish within the time `t`, none more than its port allows, and those of a slow
/// pair together as much as crosses between them: all grow alike until something holds them.
std::vector<double> parts_within(double t, const LinkTable& links, const std::vector<char>& idle) {
  constexpr double kFull = 1e-12;
  const int n = links.domains();
  std::vector<double> parts(index(n), 0);
  if (links.slow_pairs().empty()) {
    for (int d = 0; d < n; ++d) parts[index(d)] = part_within(t, links.port(d).bytes_per_s, n);
    return parts;
  }
  std::vector<char> held = idle;
  const auto room = [&](int d) {
    return part_within(t, links.port(d).bytes_per_s, n) - parts[index(d)];
  };
  const auto room_between = [&](const SlowPair& pair) {
    return t * pair.bytes_per_second - parts[index(pair.a)] - parts[index(pair.b)];
  };
  for (;;) {
    for (int d = 0; d < n; ++d) held[index(d)] |= room(d) <= kFull;
    for (const SlowPair& pair : links.slow_pairs()) {
      if (room_between(pair) <= kFull) held[index(pair.a)] = held[index(pair.b)] = 1;
    }
    double step = std::numeric_limits<double>::infinity();
    for (int d = 0; d < n; ++d) {
      if (!held[index(d)]) step = std::min(step, room(d));
    }
    for (const SlowPair& pair : links.slow_pairs()) {
      const int grow = !held[index(pair.a)] + !held[index(pair.b)];
      if (grow > 0) step = std::min(step, room_between(pair) / grow);
    }
    if (!std::isfinite(step)) return parts;
    for (int d = 0; d < n; ++d) {
      if (!held[index(d)]) parts[index(d)] += step;
    }
  }
}

struct Parts {
  double time = 0;  // of a tensor of one byte
  std::vector<double> parts;
};

/// The least time within which domains that are not `idle` can finish everything.
Parts least_parts(const LinkTable& links, const std::vector<char>& idle) {
  const auto suffices = [&](double t) {
    const std::vector<double> parts = parts_within(t, links, idle);
    return std::accumulate(parts.begin(), parts.end(), 0.0) >= 1;
  };
  // In any case the slowest carries the tensor once; more time lets more parts be finished.
  double least = links.port(0).bytes_per_s;
  for (int d = 1; d < links.domains(); ++d) least = std::min(least, links.port(d).bytes_per_s);
  double low = 1 / least, high = low;
  while (!suffices(high)) high *= 2;
  for (int i = 0; i < 50 && high > low; ++i) {
    const double middle = (low + high) / 2;
    (suffices(middle) ? high : low) = middle;
  }
  return {high, parts_within(high, links, idle)};
}

/// [domains] parts of 1.
std::vector<double> parts_of(const std::vector<int>& shares, int domains) {
  std::vector<double> parts(index(domains), 1.0 / domains);
  double all = 0;
  for (const int share : shares) all += share;
  for (std::size_t d = 0; d < shares.size(); ++d) parts[d] = shares[d] / all;
  return parts;
}

double across_seconds(const std::vector<double>& parts, const ReduceVolume& volume,
                      const LinkTable& links) {
  const int n = links.domains();
  double longest = 0;
  for (int a = 0; a < n; ++a) {
    const double s = parts[index(a)];
    const double sends = volume.up_bytes * (1 - s) + volume.down_bytes * (n - 1) * s;
    const double gets = volume.up_bytes * (n - 1) * s + volume.down_bytes * (1 - s);
    longest = std::max(longest, std::max(sends, gets) / links.port(a).bytes_per_s);
  }
  for (const SlowPair& pair : links.slow_pairs()) {
    const double a = parts[index(pair.a)], b = parts[index(pair.b)];
    const double most = std::max(volume.up_bytes * a + volume.down_bytes * b,
                                 volume.up_bytes * b + volume.down_bytes * a);
    longest = std::max(longest, most / pair.bytes_per_second);
  }
  const double latency = links.largest_latency();
  const double rounds = volume.down_bytes / volume.round_bytes + 1;
  return 2 * latency + std::max(longest, rounds * latency);
}

double ring_seconds(const ReduceVolume& volume, const LinkTable& links, const Domains& domains) {
  const int ranks = domains.ranks();
  const double passes = (volume.up_bytes + volume.down_bytes) * (ranks - 1) / ranks;
  const double steps = 2.0 * (ranks - 1) * (volume.down_bytes / volume.round_bytes / 2 + 1);
  double slowest = links.port(0).bytes_per_s;
  for (int r = 0; r < ranks; ++r) {
    const int here = domains.of(r), next = domains.of((r + 1) % ranks);
    if (here != next) slowest = std::min(slowest, links.link(here, next).bytes_per_s);
  }
  return passes / slowest + steps * links.largest_latency();
}

double tree_seconds(const ReduceVolume& volume, const LinkTable& links) {
  const int n = links.domains();
  double longest = 0, slowest = links.port(0).bytes_per_s;
  int depth = 0;
  for (int d = n - 1; d > 0; d = (d - 1) / 2) ++depth;
  for (int d = 0; d < n; ++d) {
    const int children = (2 * d + 1 < n) + (2 * d + 2 < n), above = d > 0;
    const double sends = above * volume.up_bytes + children * volume.down_bytes;
    const double gets = above * volume.down_bytes + children * volume.up_bytes;
    longest = std::max(longest, std::max(sends, gets) / links.port(d).bytes_per_s);
    if (d == 0) continue;
    const double up = links.link(d, (d - 1) / 2).bytes_per_s;
    longest = std::max(longest, std::max(volume.up_bytes, volume.down_bytes) / up);
    slowest = std::min(slowest, up);
  }
  const double piece = std::min(volume.round_bytes / 4, volume.down_bytes);
  const double hop = links.largest_latency() + piece / slowest;
  return longest + 2 * depth * hop;
}

/// Of those that were tried; 0: none.
template <class Corrections>
double least_correction(const Corrections& corrections) {
  double least = 0;
  for (const double one : corrections) {
    if (one > 0 && (least == 0 || one < least)) least = one;
  }
  return least;
}

}  // namespace

std::vector<int> best_shares(const LinkTable& links) {
  const int n = links.domains();
  if (n <= 2) return {};
  std::vector<char> idle(index(n), 0);
  Parts best = least_parts(links, idle);
  // Of a slow pair it may be best that one of both, or both, finish nothing.
  for (bool better = !links.slow_pairs().empty(); better;) {
    better = false;
    std::vector<char> chosen = idle;
    for (const SlowPair& pair : links.slow_pairs()) {
      for (const int end : {pair.a, pair.b}) {
        std::vector<char> tried = idle;
        tried[index(end)] = 1;
        if (std::count(tried.begin(), tried.end(), 1) == n) continue;
        Parts parts = least_parts(links, tried);
        if (parts.time > best.time * kBetter) continue;
        best = std::move(parts);
        chosen = std::move(tried);
        better = true;
      }
    }
    idle = std::move(chosen);
  }
  const double all = std::accumulate(best.parts.begin(), best.parts.end(), 0.0);
  std::vector<int> shares;
  for (const double part : best.parts) {
    shares.push_back(static_cast<int>(part / all * kShareScale + 0.5));
  }
  return shares;
}

double predicted_seconds(const ReduceWay& way, const ReduceVolume& volume, const LinkTable& links,
                         const Domains& domains) {
  if (links.domains() < 2) return 0;
  switch (way.algorithm) {
    case Algorithm::ring: return ring_seconds(volume, links, domains);
    case Algorithm::tree: return tree_seconds(volume, links);
    default: return across_seconds(parts_of(way.shares, links.domains()), volume, links);
  }
}

CollectiveChoice::CollectiveChoice(const Domains& domains, const LinkCost& first)
    : domains_(&domains),
      across_(domains.count() == 1 || domains.count() == domains.ranks() ? Algorithm::direct
                                                                         : Algorithm::hierarchical),
      links_(domains.count(), first),
      unequal_(best_shares(links_)),
      gap_bytes_(kFirstGap) {}

int CollectiveChoice::size_class(const ReduceVolume& volume) {
  int size = 0;
  for (double bytes = volume.down_bytes; bytes > 4; bytes /= 4) ++size;
  return volume.coded ? -1 - size : size;
}

int CollectiveChoice::kind_of(const ReduceWay& way) const {
  if (way.algorithm == Algorithm::ring) return ring;
  if (way.algorithm == Algorithm::tree) return tree;
  const auto& s = way.shares;
  if (std::adjacent_find(s.begin(), s.end(), std::not_equal_to<>()) == s.end()) return equal_shares;
  const std::vector<int>& best = unequal_;
  for (std::size_t d = 0; d < s.size() && d < best.size(); ++d) {
    if (s[d] < best[d] - kShareScale / 10 || s[d] > best[d] + kShareScale / 10) return kKinds;
  }
  return unequal_shares;
}

std::vector<CollectiveChoice::Candidate> CollectiveChoice::candidates(const ReduceVolume& volume,
                                                                      bool any_order) const {
  std::vector<Candidate> all{{equal_shares, {{across_, {}}, 0}}};
  double doubt = 1;  // of unequal shares, before they were tried
  if (links_.domains() > 1 && !volume.coded) {
    const ReduceWay unequal{across_, unequal_};
    const double gain = predicted_seconds(unequal, volume, links_, *domains_) /
                        predicted_seconds(all[0].chosen.way, volume, links_, *domains_);
    if (gain < kWorthUnequal) all.push_back({unequal_shares, {unequal, 0}});
    if (gain > kLikely) doubt = 1 / kLikely;
  }
  if (links_.domains() > 1 && any_order) {
    all.push_back({ring, {{Algorithm::ring, {}}, 0}});
    all.push_back({tree, {{Algorithm::tree, {}}, 0}});
  }
  const auto found = sizes_.find(size_class(volume));
  // What is wrong with the model for all.
  const double least = found == sizes_.end() ? 0 : least_correction(found->second.correction);
  for (Candidate& one : all) {
    double correction = found == sizes_.end() ? 0 : found->second.correction[one.kind];
    const double unknown = one.kind == unequal_shares ? doubt : 1;
    if (correction == 0) correction = unknown * (least > 0 ? least : 1);
    one.chosen.predicted_s =
        correction * predicted_seconds(one.chosen.way, volume, links_, *domains_);
  }
  std::stable_sort(all.begin(), all.end(), [](const Candidate& a, const Candidate& b) {
    return a.chosen.predicted_s < b.chosen.predicted_s;
  });
  return all;
}

CollectiveChoice::Chosen CollectiveChoice::best(const ReduceVolume& volume, bool any_order) const {
  return candidates(volume, any_order).front().chosen;
}

CollectiveChoice::Chosen CollectiveChoice::next(const ReduceVolume& volume, bool any_order) const {
  const std::vector<Candidate> all = candidates(volume, any_order);
  const auto found = sizes_.find(size_class(volume));
  if (found == sizes_.end()) return all.front().chosen;
  const Size& size = found->second;
  const double best = all.front().chosen.predicted_s;
  if (size.calls % kFirstProbe == kFirstProbe - 1) {
    for (const Candidate& one : all) {
      const bool near = one.chosen.predicted_s < kNear * best;
      if (near && size.correction[one.kind] == 0) return one.chosen;
    }
  }
  if (size.calls % kProbe == kProbe - 1) {
    std::vector<const Candidate*> others;
    for (const Candidate& one : all) {
      if (&one != &all.front() && one.chosen.predicted_s < kWorthProbing * best) {
        others.push_back(&one);
      }
    }
    if (!others.empty()) return others[size.calls / kProbe % others.size()]->chosen;
  }
  return all.front().chosen;
}

void CollectiveChoice::observe(const ReduceWay& way, const ReduceVolume& volume, double seconds) {
  if (!(seconds > 0)) return;
  carried_bytes_ += volume.down_bytes;
  ++carried_calls_;
  Size& size = sizes_[size_class(volume)];
  size.last_s = seconds;
  const int kind = kind_of(way);
  if (kind == kKinds) return;
  double& mean = size.mean_s[index(kind)];
  mean = mean == 0 ? seconds : mean + kFollow * (seconds - mean);
  const double predicted = predicted_seconds(way, volume, links_, *domains_);
  if (predicted <= 0) return;
  if (const double known = size.correction[index(kind)]; known > 0) {
    watch(seconds / (known * predicted));
  }
  auto& last = size.last[index(kind)];
  std::rotate(last.begin(), last.begin() + 1, last.end());
  last.back() = seconds / predicted;
  // The middle one, so that a few calls that were slow by chance do not count.
  auto sorted = last;
  std::sort(sorted.begin(), sorted.end());
  const auto tries = std::count_if(last.begin(), last.end(), [](double one) { return one > 0; });
  const double usual = sorted[last.size() - 1 - static_cast<std::size_t>(tries / 2)];
  double& correction = size.correction[index(kind)];
  correction = tries < std::ssize(last) ? usual : correction + kFollow * (usual - correction);
  // What was found out about other ways was perhaps found with other costs of links.
  const double least = least_correction(size.correction);
  for (std::size_t k = 0; k < kKinds; ++k) {
    double& other = size.correction[k];
    if (k == index(kind) || other == 0) continue;
    const bool worse = other > kAsGoodAsNew * least;
    other += kForgetCorrection * (least - other);
    if (worse && other <= kAsGoodAsNew * least) size.last[k] = {};
  }
}

void CollectiveChoice::watch(double times) {
  const int side = times > kFarOff ? 1 : times < 1 / kFarOff ? -1 : 0;
  if (side == 0) {
    if (++usual_ > kUsual) odd_ = 0;
    return;
  }
  usual_ = 0;
  odd_ = odd_ * side > 0 ? odd_ + side : side;
}

bool CollectiveChoice::measure_due() const {
  if (links_.domains() < 2) return false;
  const bool odd = std::abs(odd_) >= kOdd && carried_bytes_ >= gap_bytes_;
  return odd || (carried_calls_ >= static_cast<int>(kProbe) && carried_bytes_ >= kPeriod);
}

void CollectiveChoice::measured(const std::vector<LinkProbe>& probes) {
  const bool changed = links_.measured(probes);
  if (changed) unequal_ = best_shares(links_);
  for (auto& [bytes, size] : sizes_) {
    if (changed) size = {.last_s = size.last_s, .calls = size.calls};
  }
  // Calls that are slow for other reasons than links do not measure them again and again.
  if (odd_ != 0) gap_bytes_ = changed ? kFirstGap : std::min(2 * gap_bytes_, kLongestGap);
  carried_bytes_ = carried_calls_ = odd_ = usual_ = 0;
}

double CollectiveChoice::observed_s(const ReduceWay& way, const ReduceVolume& volume) const {
  const auto found = sizes_.find(size_class(volume));
  if (found == sizes_.end()) return 0;
  const int kind = kind_of(way);
  const double mean = kind == kKinds ? 0 : found->second.mean_s[index(kind)];
  return mean > 0 ? mean : found->second.last_s;
}

}  // namespace ferry

#include "plan/fit.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "plan/described.hpp"

namespace ferry::cli {
namespace {

/// Logarithms of latency, of that of few tokens, of each of those, and of the rates of SM copies,
/// NVLink and NIC.
using Logarithms = std::array<double, 6>;
constexpr double kNone = std::numeric_limits<double>::infinity();
/// Of the calls of latency mode, as those of 2026-11-27 on 2 and 4 H200 have it. A dispatch sends
/// rows one by one as it receives others; a combine has sums to make before it waits.
constexpr double kDispatchOverlap = 1.5;
constexpr double kCombineHidden = 1.0 / 3;

bool in_latency_mode(const Observation& call) {
  return call.operation.starts_with("latency");
}
bool has_few_tokens(const Observation& call) {
  return in_latency_mode(call) && call.tokens <= kFewTokens;
}

FittedRates rates_at(const Logarithms& at, const std::vector<Observation>& points) {
  const std::string operation = points.empty() ? "" : points.front().operation;
  return {std::exp(at[0]),
          std::exp(at[1]),
          std::isinf(at[2]) ? 0 : std::exp(at[2]),
          operation == "latency_dispatch" ? kDispatchOverlap : 1,
          operation == "latency_combine" ? kCombineHidden : 0,
          std::exp(at[3]),
          std::exp(at[4]),
          std::exp(at[5])};
}

double squares(const Logarithms& at, const std::vector<Observation>& points) {
  const FittedRates rates = rates_at(at, points);
  double sum = 0;
  for (const Observation& point : points) {
    const double off = std::log(rates.time(point).seconds() / point.seconds);
    sum += off * off;
  }
  return sum;
}

/// Where each rate is as slow as the fastest of the points allows.
Logarithms start_of(const std::vector<Observation>& points) {
  Logarithms start{kNone, kNone, -kNone, -kNone, -kNone, -kNone};
  int fewest = 0, most = 0;  // of few tokens
  for (const Observation& point : points) {
    const auto rate = [&](double bytes) {
      return bytes > 0 ? std::log(bytes / point.seconds) : -kNone;
    };
    double& latency = start[has_few_tokens(point) ? 1 : 0];
    latency = std::min(latency, std::log(point.seconds));
    start[3] = std::max(start[3], rate(point.bytes.copy / std::max(1, point.num_sms)));
    start[4] = std::max(start[4], rate(point.bytes.nvlink));
    start[5] = std::max(start[5], rate(point.bytes.nic));
    if (!has_few_tokens(point)) continue;
    fewest = fewest == 0 ? point.tokens : std::min(fewest, point.tokens);
    most = std::max(most, point.tokens);
  }
  if (most > fewest) start[2] = start[1] - std::log(kFewTokens);
  for (double& one : start) one = one == -kNone ? kNone : one;  // nothing to be fitted
  return start;
}

/// Steps along each axis, and then on in the same direction; shorter when none helps.
void search_rates(Logarithms& at, const std::vector<Observation>& points) {
  constexpr double kGain = 1e-16;  // of squares: a rate that goes to zero gains ever less
  double least = squares(at, points);
  const auto take = [&](const Logarithms& other) {
    const double found = squares(other, points);
    // Beside large squares kGain is lost: a rate that nothing waits for must not move on.
    if (!(found < least - kGain)) return false;
    least = found;
    at = other;
    return true;
  };
  for (double step = 0.3; step > 1e-6;) {
    const Logarithms before = at;
    for (std::size_t axis = 0; axis < at.size(); ++axis) {
      if (std::isinf(at[axis])) continue;
      for (const double sign : {1.0, -1.0}) {
        Logarithms other = at;
        other[axis] += sign * step;
        if (take(other)) break;
      }
    }
    if (before == at) {
      step /= 2;
      continue;
    }
    Logarithms further = at;
    for (std::size_t axis = 0; axis < at.size(); ++axis) {
      if (!std::isinf(at[axis])) further[axis] += at[axis] - before[axis];
    }
    take(further);
  }
}

/// How many times, as logarithms.
double apart(const Observation& a, const Observation& b) {
  const double copy = std::log(a.bytes.copy / b.bytes.copy);
  const double sms = std::log(static_cast<double>(std::max(1, a.num_sms)) / std::max(1, b.num_sms));
  const double sent = std::log((a.bytes.nvlink + a.bytes.nic) / (b.bytes.nvlink + b.bytes.nic));
  return std::hypot(copy, sent, copy - sms);
}

}  // namespace

ExchangeRates FittedRates::rates(const Observation& call) const {
  ExchangeRates made;
  const bool few = has_few_tokens(call) && !std::isinf(few_latency_s);
  made.latency_s =
      few || std::isinf(latency_s) ? few_latency_s + few_token_s * call.tokens : latency_s;
  made.overlap = overlap;
  made.hidden_latency = hidden_latency;
  made.copy = copy * std::max(1, call.num_sms);
  made.nvlink_out = made.nvlink_in = nvlink;
  made.nic_out = made.nic_in = nic;
  return made;
}

ExchangeTime FittedRates::time(const Observation& call) const {
  return exchange_time(call.bytes, rates(call));
}

std::vector<std::size_t> spread_points(const std::vector<Observation>& calls, std::size_t count) {
  std::vector<std::size_t> left(calls.size()), taken;
  std::iota(left.begin(), left.end(), std::size_t{0});
  const auto take = [&](const auto& score) {
    if (taken.size() == count || left.empty()) return;
    const auto best = std::max_element(left.begin(), left.end(), [&](std::size_t a, std::size_t b) {
      return score(calls[a]) < score(calls[b]);
    });
    taken.push_back(*best);
    left.erase(best);
  };
  const auto distance = [&](const Observation& call) {
    double nearest = kNone;
    for (const std::size_t other : taken) nearest = std::min(nearest, apart(call, calls[other]));
    return nearest;
  };
  take([](const Observation& call) { return std::pair(-call.bytes.copy, call.num_sms); });
  take([](const Observation& call) { return std::pair(call.bytes.copy, call.num_sms); });
  take([](const Observation& call) { return std::pair(call.bytes.copy, -call.num_sms); });
  if (std::any_of(left.begin(), left.end(),
                  [&](std::size_t i) { return has_few_tokens(calls[i]); })) {
    take([&](const Observation& call) { return std::pair(has_few_tokens(call), distance(call)); });
  }
  while (taken.size() < std::min(count, calls.size())) take(distance);
  return taken;
}

FittedRates fit(const std::vector<Observation>& points) {
  Logarithms at = start_of(points);
  search_rates(at, points);
  FittedRates made = rates_at(at, points);
  // What no point waits for was only kept out of the way.
  std::array<double*, 3> rates{&made.copy, &made.nvlink, &made.nic};
  std::array<bool, 3> waited{};
  for (const Observation& point : points) {
    const ExchangeTime time = made.time(point);
    const double longest = std::max({time.copy, time.nvlink_out, time.nic_out});
    const std::array phases{time.copy, time.nvlink_out, time.nic_out};
    for (std::size_t i = 0; i < phases.size(); ++i) {
      const double least = made.overlap > 1 ? 1e-3 : 1 - 1e-9;  // there phases add up
      waited[i] = waited[i] || phases[i] >= longest * least;
    }
  }
  for (std::size_t i = 0; i < rates.size(); ++i) {
    if (!waited[i]) *rates[i] = ExchangeRates::kUnknown;
  }
  return made;
}

}  // namespace ferry::cli

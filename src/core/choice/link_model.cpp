#include "core/choice/link_model.hpp"

#include <algorithm>

namespace ferry {
namespace {

constexpr double kForget = 0.9;
constexpr double kFarOff = 2;  // times the expected, or a part of it
constexpr int kChanged = 3;    // observations that are far off
constexpr int kUsual = 4;      // others between two of them
constexpr double kShortest = 1e-9;
constexpr double kTied = 0.85;           // of the slower: as slow
constexpr double kLate = 1.3;            // times the expected
constexpr double kFirstBytes = 1 << 20;  // of the second of two points that stand for a first cost

}  // namespace

LinkFit::LinkFit(const LinkCost& first) : cost_(first) {
  cost_.latency_s = std::max(cost_.latency_s, kShortest);
  cost_.bytes_per_s = std::max(cost_.bytes_per_s, 1.0);
  count(0, cost_.seconds(0));
  count(kFirstBytes, cost_.seconds(kFirstBytes));
}

bool LinkFit::observe(double bytes, double seconds) {
  if (!(bytes > 0 && seconds > 0)) return false;
  const double times = seconds / cost_.seconds(bytes);
  const int side = times > kFarOff ? 1 : times < 1 / kFarOff ? -1 : 0;
  if (side == 0) {
    if (++usual_ > kUsual) odd_ = 0;
    count(bytes, seconds);
    fit();
    return false;
  }
  usual_ = 0;
  if (odd_ * side <= 0) odd_ = 0, odd_bytes_ = 0, odd_seconds_ = 0;
  odd_ += side;
  odd_bytes_ += bytes;
  odd_seconds_ += seconds;
  if (odd_ * side < kChanged) return false;
  const double each = odd_seconds_ / kChanged;
  // Nearly all of the change is β's, unless the messages are short.
  const double latency = std::min(cost_.latency_s, each / 2);
  *this = LinkFit({latency, odd_bytes_ / kChanged / std::max(each - latency, kShortest)});
  return true;
}

void LinkFit::count(double bytes, double seconds) {
  const double weight = 1 / (seconds * seconds);
  for (double* sum : {&n_, &x_, &y_, &xx_, &xy_}) *sum *= kForget;
  n_ += weight;
  x_ += weight * bytes;
  y_ += weight * seconds;
  xx_ += weight * bytes * bytes;
  xy_ += weight * bytes * seconds;
}

void LinkFit::fit() {
  const double spread = n_ * xx_ - x_ * x_;
  double slope = 0, latency = cost_.latency_s;
  if (spread > 1e-3 * n_ * xx_) {
    slope = (n_ * xy_ - x_ * y_) / spread;
    latency = (y_ - slope * x_) / n_;
  }
  if (slope <= 0 || latency < kShortest) {  // of one size, or noise: α as it was
    latency = std::max(cost_.latency_s, kShortest);
    slope = (xy_ - latency * x_) / xx_;
  }
  if (slope <= 0) return;
  cost_ = {latency, 1 / slope};
}

LinkTable::LinkTable(int domains, const LinkCost& first) : ports_(index(domains), LinkFit(first)) {}

LinkCost LinkTable::link(int a, int b) const {
  return {(port(a).latency_s + port(b).latency_s) / 2,
          std::min(port(a).bytes_per_s, port(b).bytes_per_s)};
}

double LinkTable::largest_latency() const {
  double largest = 0;
  for (const LinkFit& fit : ports_) largest = std::max(largest, fit.cost().latency_s);
  return largest;
}

double LinkTable::slowest() const {
  double least = port(0).bytes_per_s;
  for (const LinkFit& fit : ports_) least = std::min(least, fit.cost().bytes_per_s);
  return least;
}

double LinkTable::expected(const Flow& flow) const {
  return std::max(port(flow.from).seconds(flow.sent_bytes), port(flow.to).seconds(flow.got_bytes));
}

void LinkTable::observe(const std::vector<Flow>& flows) {
  // By how much the fastest flow of each domain came later than expected.
  std::vector<double> late(ports_.size(), 0);
  for (const Flow& flow : flows) {
    const double times = flow.seconds / expected(flow);
    for (const int end : {flow.from, flow.to}) {
      double& least = late[index(end)];
      least = least == 0 ? times : std::min(least, times);
    }
  }
  for (int d = 0; d < domains(); ++d) observe_port(d, flows, late);
}

void LinkTable::observe_port(int domain, const std::vector<Flow>& flows,
                             const std::vector<double>& late) {
  // The flow in which the domain carried most for its time: it can carry as much at least.
  const Flow* best = nullptr;
  double most = 0, bytes = 0;
  for (const Flow& flow : flows) {
    if (flow.from != domain && flow.to != domain) continue;
    const double carried = flow.from == domain ? flow.sent_bytes : flow.got_bytes;
    const double share = port(domain).seconds(carried) / flow.seconds;
    if (share <= most) continue;
    best = &flow;
    most = share;
    bytes = carried;
  }
  if (best == nullptr) return;
  const double alone = port(domain).seconds(bytes), whole = expected(*best);
  const double other = late[index(best->from == domain ? best->to : best->from)];
  const bool sooner = best->seconds < alone;
  const bool busy = alone > kTied * whole && best->seconds < kLate * whole;
  const bool slower = best->seconds >= kLate * whole && late[index(domain)] > kTied * other;
  if (sooner || (best->waited && (busy || slower))) {
    if (ports_[index(domain)].observe(bytes, best->seconds)) ++changes_;
  }
}

}  // namespace ferry

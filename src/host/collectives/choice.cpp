// How the collectives of the host engine choose: what ranks see of a call goes out with the
// messages of the next, so that all know the same and decide alike.
#include <algorithm>

#include "host/collectives/engine.hpp"

namespace ferry::host {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kLongReduction = 7e-3;
constexpr auto kWaited = std::chrono::microseconds(10);

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

void HostCollectives::measure_links() {
  const auto elements = static_cast<std::int64_t>(staging_.window_bytes / 2 / sizeof(float));
  std::vector<float> zeros(index(elements + kShareUnit));
  const TensorView x(zeros.data(), Dtype::f32, {elements + kShareUnit});
  const auto reduce_and_meet = [x](HostCollectives& all) {
    run_all_reduce(all, x, {.algorithm = Algorithm::hierarchical});
    all.meet("Collectives", head_of(CallKind::links, Dtype::f32, 0));  // brings the reports
  };
  // Three are enough to find that a link is not as expected; all ranks know how long one took.
  for (int i = 0; i < 3; ++i) {
    enter("Collectives", nullptr, reduce_and_meet);
    const double took = choice(zeros.size() * sizeof(float), false).observed_seconds;
    if (took > kLongReduction) return;
  }
}

ReduceWay HostCollectives::next_way(const ReduceVolume& volume, bool any_order) {
  std::scoped_lock lock(choice_mutex_);
  return choice_.next(volume, any_order).way;
}

void HostCollectives::note_partials(int domain, Clock::time_point before) {
  const auto seconds = static_cast<float>(seconds_since(met_));
  const bool waited = Clock::now() - before > kWaited;
  const CallReport::Flow flow{seconds, static_cast<std::int16_t>(domain),
                              static_cast<std::int16_t>(waited ? 2 : 1)};
  if (report_.flows[0].seen == 0) {
    report_.flows[0] = flow;
  } else if (waited) {
    report_.flows[1] = flow;
  }
}

void HostCollectives::end_reduce(const ReduceWay& way, const ReduceVolume& volume,
                                 double round_up_bytes, bool counted) {
  report_.seconds = static_cast<float>(seconds_since(met_));
  last_ = {way, volume, round_up_bytes};
  std::scoped_lock lock(choice_mutex_);
  if (counted) choice_.count(volume);
}

void HostCollectives::take_reports() {
  if (!last_) return;
  double seconds = 0;
  std::vector<Flow> flows;
  const std::vector<int> equal(index(domains().count()), 1);
  const std::vector<int>& shares = last_->way.shares.empty() ? equal : last_->way.shares;
  for (int r = 0; r < size(); ++r) {
    const CallReport report = channel().head(r).report;
    seconds = std::max(seconds, static_cast<double>(report.seconds));
    for (const CallReport::Flow& seen : report.flows) {
      const bool sane = seen.domain >= 0 && seen.domain < domains().count() &&
                        seen.domain != domains().of(r) && seen.seconds > 0;
      if (seen.seen == 0 || !sane) continue;
      Flow flow = partials_flow(shares, last_->round_up_bytes, seen.domain, domains().of(r));
      flow.seconds = seen.seconds;
      flow.waited = seen.seen == 2;
      flows.push_back(flow);
    }
  }
  std::scoped_lock lock(choice_mutex_);
  choice_.observe(last_->way, last_->volume, seconds);
  choice_.links().observe(flows);
  last_.reset();
  report_ = {};
}

Choice HostCollectives::choice(std::size_t bytes, bool any_order) const {
  const auto all = static_cast<double>(bytes);
  const ReduceVolume volume{all, all, static_cast<double>(staging_.window_bytes) / 2};
  Choice told;
  std::scoped_lock lock(choice_mutex_);
  const CollectiveChoice::Chosen best = choice_.best(volume, any_order);
  told.algorithm = bytes <= eager_bytes(size()) ? Algorithm::one_shot : best.way.algorithm;
  told.predicted_seconds = told.algorithm == Algorithm::one_shot ? 0 : best.predicted_s;
  told.observed_seconds = choice_.observed_s(best.way, volume);
  const int n = domains().count();
  double sum = 0;
  for (const int share : best.way.shares) sum += share;
  for (int d = 0; d < n; ++d) {
    told.shares.push_back(best.way.shares.empty() ? 1.0 / n : best.way.shares[index(d)] / sum);
    const LinkCost port = choice_.links().port(d);
    told.latency_seconds.push_back(n > 1 ? port.latency_s : 0);
    told.bytes_per_second.push_back(n > 1 ? port.bytes_per_s : 0);
  }
  return told;
}

}  // namespace ferry::host

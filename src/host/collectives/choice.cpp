// How the collectives of the host engine choose: what ranks see of a call goes out with the
// messages of the next, so that all know the same and decide alike.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "host/collectives/engine.hpp"

namespace ferry::host {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kPhases = 3;          // of a measurement, at most; twice where a pair looks slow
constexpr double kLongPhase = 0.1;  // seconds: the last one
constexpr int kRoundTrips = 3;
constexpr std::size_t kPiece = 64 << 10;
static_assert(kProbeDrain % kPiece == 0 && kProbeBytes % kPiece == 0);

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// What the first rank of a domain tells of what it got in a phase.
struct Told {
  double latency_s = 0;
  double bytes_per_s = 0;
  double took_s = 0;
};

}  // namespace

/// In each phase the first rank of a domain sends to that of another one, and gets from a third, so
/// that every port carries one flow each way.
void HostCollectives::measure_links(const char* call, const StepMessage& head) {
  const int n = domains().count();
  std::vector<LinkProbe> probes;
  meet(call, head);  // earlier calls have ended everywhere, so inboxes are free
  int phases = kPhases;
  const int before = std::exchange(phases_, phases_ + kPhases);  // more domains: others each time
  for (int phase = 0; phase < 2 * phases; ++phase) {
    if (phase == phases && !doubtful(probes)) break;
    const int distance = 1 + (before + phase % phases) % (n - 1);
    Told mine;
    if (rank() == members().front()) {
      const int to = domains().members((domain() + distance) % n).front();
      const int from = domains().members((domain() + n - distance) % n).front();
      const auto start = Clock::now();
      mine.latency_s = ping(call, to, from);
      mine.bytes_per_s = probe(call, to, from, phase, mine.latency_s);
      mine.took_s = seconds_since(start);
    }
    meet(call, head, std::as_bytes(std::span(&mine, 1)));
    double longest = 0;
    for (int d = 0; d < n; ++d) {
      Told told;
      std::memcpy(&told, channel().body(domains().members(d).front()), sizeof(told));
      probes.push_back({(d + n - distance) % n, d, told.latency_s, told.bytes_per_s});
      longest = std::max(longest, told.took_s);
    }
    if (longest > kLongPhase) phases = std::min(phases, phase + 1);
  }
  std::scoped_lock lock(choice_mutex_);
  choice_.measured(probes);
}

void HostCollectives::measure_links() {
  constexpr const char* kCall = "Collectives";
  enter(kCall, nullptr, [](HostCollectives& all) {
    all.measure_links(kCall, head_of(CallKind::links, Dtype::f32, 0));
  });
}

/// Half the shortest round trip to `to`, which this rank makes possible for `from`, too.
double HostCollectives::ping(const char* call, int to, int from) {
  double shortest = 0;
  for (int i = 0; i < kRoundTrips; ++i) {
    const auto start = Clock::now();
    tell(to);
    hear(call, from);
    tell(from);
    hear(call, to);
    const double took = seconds_since(start);
    shortest = i == 0 ? took : std::min(shortest, took);
  }
  return shortest / 2;
}

/// Bytes a second that came from `from`.
double HostCollectives::probe(const char* call, int to, int from, int phase, double latency_s) {
  constexpr std::size_t kDrain = kProbeDrain / kPiece, kAll = kDrain + kProbeBytes / kPiece;
  const std::vector<std::byte> zeros(kPiece);
  const auto start = Clock::now();
  double drained_s = 0;
  std::size_t came = 0;
  const auto note = [&] {
    if (++came == kDrain) drained_s = seconds_since(start);
  };
  for (std::size_t i = 0; i < kAll; ++i) {
    // Nobody reads them; senders of different phases may overlap.
    put(to, staging_.inbox() + static_cast<std::size_t>(phase) * kPiece, zeros.data(), kPiece);
    tell(to, kPiece);
    engine_->shared_memory()->fabric->progress();
    while (came < kAll && channel().take_chunk(from)) note();
  }
  while (came < kAll) {
    hear(call, from);
    note();
  }
  // What the first piece took to come is no matter of rates.
  const double all_s = seconds_since(start);
  return probed_rate(drained_s, std::max(drained_s, all_s - 2 * latency_s));
}

bool HostCollectives::doubtful(const std::vector<LinkProbe>& probes) const {
  std::scoped_lock lock(choice_mutex_);
  return choice_.doubtful(probes);
}

bool HostCollectives::links_due() const {
  std::scoped_lock lock(choice_mutex_);
  return choice_.measure_due();
}

ReduceWay HostCollectives::next_way(const ReduceVolume& volume, bool any_order) {
  std::scoped_lock lock(choice_mutex_);
  return choice_.next(volume, any_order).way;
}

void HostCollectives::end_reduce(const ReduceWay& way, const ReduceVolume& volume, bool counted) {
  report_.seconds = static_cast<float>(seconds_since(met_));
  last_ = {way, volume};
  std::scoped_lock lock(choice_mutex_);
  if (counted) choice_.count(volume);
}

void HostCollectives::take_reports() {
  double seconds = 0, windows_s = 0;
  for (int r = 0; r < size(); ++r) {
    const CallReport& theirs = channel().head(r).report;
    seconds = std::max(seconds, static_cast<double>(theirs.seconds));
    windows_s = std::max(windows_s, static_cast<double>(theirs.windows_seconds));
  }
  std::scoped_lock lock(choice_mutex_);
  if (last_) choice_.observe(last_->way, last_->volume, seconds);
  if (shown_) store_choice_.observe(shown_->calls, shown_->past, windows_s);
  last_.reset();
  shown_.reset();
  report_ = {};
}

// Several domains: what crosses takes the time, and windows are written through the caches.
void HostCollectives::choose_stores(CallKind kind, std::size_t bytes) {
  stores_ = {.calls = StoreChoice::calls_of(kind, bytes), .begin = Clock::now()};
  if (domains().count() > 1) return;
  std::scoped_lock lock(choice_mutex_);
  stores_.past = store_choice_.next(stores_.calls);
}

void HostCollectives::end_windows() {
  if (!std::exchange(stores_.used, false) || domains().count() > 1) return;
  report_.windows_seconds = static_cast<float>(stores_.before_s + seconds_since(met_));
  shown_ = stores_;
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
  told.slow_pairs = choice_.links().slow_pairs();
  told.past_caches = n == 1 && told.algorithm != Algorithm::one_shot &&
                     store_choice_.best(StoreChoice::calls_of(CallKind::all_reduce, bytes));
  return told;
}

}  // namespace ferry::host

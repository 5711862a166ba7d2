#include "host/throughput/links.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <vector>

#include "core/choice/link_model.hpp"
#include "protocol/flags.hpp"

namespace ferry::host {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kMeasureLinks = "measure_links";
constexpr std::size_t kLanding = std::size_t{1} << 20;  // rows of a rate land there, over and over
constexpr std::size_t kLinkPiece = std::size_t{256} << 10;
constexpr std::size_t kLeastRateBytes = std::size_t{2} << 20;
constexpr std::size_t kMostRateBytes = std::size_t{64} << 20;
// What disturbs a pair is often over when its turn comes again.
constexpr int kPasses = 3;
constexpr double kLatencySeconds = 0.01;
constexpr double kRateSeconds = 0.01;      // of one try
constexpr double kSlowRateSeconds = 0.03;  // below kSlowRate: so that little depends on a burst
constexpr double kSlowRate = 1e9;
constexpr double kAllRateSeconds = 0.1;  // of all: then there is no further one
constexpr int kRateTries = 2;
constexpr double kTogetherSeconds = 0.1;  // by the rate of the slowest pair, of all ranks
constexpr int kTogetherTries = 5;
constexpr std::uint64_t kWarmUp = 5, kFewestRounds = 7, kMostRounds = 200;

/// What a rank found out about its way to a peer.
struct Found {
  double latency_ns = 0;
  double bytes_per_s = 0;
};

/// The segment of each rank. Only the source of a line writes there.
struct LinkLayout {
  std::size_t flags = 0;    ///< [R] lines: how often source has called
  std::size_t counts = 0;   ///< [R] lines: of rounds or bytes that source is going to send
  std::size_t found = 0;    ///< [R, R] Found: source's row
  std::size_t landing = 0;  ///< kLanding
  std::size_t bytes = 0;
};

LinkLayout make_link_layout(int ranks) {
  const auto r = static_cast<std::size_t>(ranks);
  LinkLayout layout;
  Carver carver;
  layout.flags = carver.take(r * kLineBytes);
  layout.counts = carver.take(r * kLineBytes);
  layout.found = carver.take(r * r * sizeof(Found));
  layout.landing = carver.take(kLanding);
  layout.bytes = carver.end;
  return layout;
}

double seconds_from(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

class Probe {
 public:
  explicit Probe(HostEngine& engine)
      : engine_(engine),
        layout_(make_link_layout(engine.size())),
        number_(agree_on_exchange(engine, kMeasureLinks, layout_.bytes).number),
        segments_(engine.add_segments({kMeasureLinks, "the number of ranks", layout_.bytes, 0})),
        reach_(*engine.shared_memory()->fabric, number_, segments_.ids),
        sent_(static_cast<std::size_t>(engine.size())),
        heard_(sent_.size()),
        row_(sent_.size()),
        piece_(kLinkPiece) {
    engine.latency_pool().made(number_, segments_.mine, true);
  }

  void run(const std::function<void(int, int)>& progress) {
    const int total = kPasses * engine_.size() * (engine_.size() - 1) / 2;
    int done = 0;
    for (int pass = 0; pass < kPasses; ++pass) {
      for (int a = 0; a < engine_.size(); ++a) {
        for (int b = a + 1; b < engine_.size(); ++b) {
          meet();  // the others stay out of the way
          if (engine_.rank() == a) lead(b);
          if (engine_.rank() == b) follow(a);
          if (progress) progress(++done, total);
        }
      }
    }
    share_found();
    if (engine_.topology().count() == 1) return;
    row_[static_cast<std::size_t>(engine_.rank())].bytes_per_s = rate_together();
    share_found();
  }

  Links links() const {
    const int ranks = engine_.size();
    Links links;
    for (int a = 0; a < ranks; ++a) links.domains.push_back(engine_.domain_of(a));
    for (int a = 0; a < ranks; ++a) {
      for (int b = 0; b < ranks; ++b) {
        const Found found = found_by(a, b);
        links.latency_ns.push_back(found.latency_ns);
        links.bytes_per_s.push_back(a == b ? 0 : found.bytes_per_s);
        if (a == b) links.together_bytes_per_s.push_back(found.bytes_per_s);
      }
    }
    return links;
  }

 private:
  void meet() {
    StepMessage head;
    head.call.kind = CallKind::links;
    engine_.channel().swap(kMeasureLinks, head);
    engine::check_same_call(engine_.channel(), kMeasureLinks, head.call);
  }

  void lead(int peer) {
    const auto latency_ns = static_cast<std::uint64_t>(lead_rounds(peer));
    announce(peer, latency_ns);
    const double rate = send(peer, latency_ns);
    receive(peer);
    note(peer, latency_ns, rate);
  }

  void follow(int peer) {
    follow_rounds(peer);
    const std::uint64_t latency_ns = announced(peer);
    receive(peer);
    note(peer, latency_ns, send(peer, latency_ns));
  }

  /// The best of all passes counts.
  void note(int peer, std::uint64_t latency_ns, double rate) {
    Found& found = row_[static_cast<std::size_t>(peer)];
    const auto latency = static_cast<double>(std::max<std::uint64_t>(latency_ns, 1));
    found.latency_ns = found.latency_ns > 0 ? std::min(found.latency_ns, latency) : latency;
    found.bytes_per_s = std::max(found.bytes_per_s, rate);
  }

  /// Half a round trip, in nanoseconds: of all rounds, one that is faster than three quarters, for
  /// a machine may be busy with other things.
  double lead_rounds(int peer) {
    rounds(peer, kWarmUp);
    const double each = rounds(peer, kWarmUp).front();
    const auto fit = static_cast<std::uint64_t>(kLatencySeconds / std::max(each, 1e-9));
    const std::uint64_t count = std::clamp(fit, kFewestRounds, kMostRounds);
    announce(peer, count);
    std::vector<double> all = rounds(peer, count);
    return all[all.size() / 4] / 2 * 1e9;
  }

  /// The seconds of each, ascending.
  std::vector<double> rounds(int peer, std::uint64_t count) {
    std::vector<double> all;
    for (std::uint64_t i = 0; i < count; ++i) {
      const auto start = Clock::now();
      call(peer);
      hear(peer);
      all.push_back(seconds_from(start));
    }
    std::sort(all.begin(), all.end());
    return all;
  }

  void follow_rounds(int peer) {
    answer(peer, 2 * kWarmUp);
    answer(peer, std::min(announced(peer), kMostRounds));
  }

  void answer(int peer, std::uint64_t count) {
    for (std::uint64_t i = 0; i < count; ++i) {
      hear(peer);
      call(peer);
    }
  }

  /// Bytes in a second to the peer: the best of some tries, but for the first, which only tells
  /// how much to send.
  double send(int peer, std::uint64_t latency_ns) {
    const auto start = Clock::now();
    double rate = try_rate(peer, kLinkPiece, latency_ns), best = 0;
    for (int left = kRateTries; left > 0;) {
      const double seconds = rate < kSlowRate ? kSlowRateSeconds : kRateSeconds;
      const auto fit = static_cast<std::size_t>(std::min(rate * seconds, 1e12));
      const std::size_t bytes =
          std::clamp(fit / kLinkPiece * kLinkPiece, kLeastRateBytes, kMostRateBytes);
      rate = try_rate(peer, bytes, latency_ns);
      best = std::max(best, rate);
      left = seconds_from(start) < kAllRateSeconds ? left - 1 : 0;
      announce(peer, left > 0 ? 1 : 0);
    }
    return best;
  }

  /// What a token bucket lets through at once does not count: it goes before.
  double try_rate(int peer, std::size_t bytes, std::uint64_t latency_ns) {
    const auto start = Clock::now();
    write(peer, kProbeDrain);
    write(peer, bytes);
    const double round_s = 2e-9 * static_cast<double>(latency_ns);  // of the answers
    hear(peer);
    const double drained_s = std::max(0.0, seconds_from(start) - round_s);
    hear(peer);
    return probed_rate(drained_s, std::max(drained_s, seconds_from(start) - round_s), bytes);
  }

  void write(int peer, std::size_t bytes) {
    const std::uint64_t tag = ++tag_;
    for (std::size_t at = 0; at < bytes; at += kLinkPiece) {
      const protocol::Place to{segments_.mine.id, layout_.landing + at % kLanding};
      reach_.write(peer, to, piece_.data(), kLinkPiece, tag);
    }
    call(peer, tag, bytes);
  }

  void receive(int peer) {
    answer(peer, 2);
    do {
      answer(peer, 2);
    } while (announced(peer) != 0);
  }

  /// Tells the peer a number, beside a call. The peer must have answered before the next one.
  void announce(int peer, std::uint64_t number) {
    const std::uint64_t tag = ++tag_;
    const protocol::Place to{segments_.mine.id, line(layout_.counts, engine_.rank())};
    reach_.write(peer, to, &number, sizeof number, tag);
    call(peer, tag, sizeof number);
  }

  std::uint64_t announced(int peer) {
    hear(peer);
    std::uint64_t number = 0;
    std::memcpy(&number, segments_.mine.data + line(layout_.counts, peer), sizeof number);
    return number;
  }

  /// Of all tries but the first, in which windows of TCP open, one that is faster than most.
  double rate_together() {
    std::vector<int> peers;  // each rank starts elsewhere
    for (int i = 1; i < engine_.size(); ++i) {
      const int peer = (engine_.rank() + i) % engine_.size();
      if (engine_.domain_of(peer) != engine_.domain_of(engine_.rank())) peers.push_back(peer);
    }
    double slowest = std::numeric_limits<double>::max();
    for (int a = 0; a < engine_.size(); ++a) {
      for (int b = 0; b < engine_.size(); ++b) {
        if (engine_.domain_of(a) == engine_.domain_of(b)) continue;
        slowest = std::min(slowest, found_by(a, b).bytes_per_s);
      }
    }
    const double fit = std::clamp(slowest * kTogetherSeconds / engine_.size(), 0.0, 1e12);
    const std::size_t bytes = std::clamp(static_cast<std::size_t>(fit) / kLinkPiece * kLinkPiece,
                                         kLinkPiece, kMostRateBytes);
    std::vector<double> seconds;
    for (int i = 0; i <= kTogetherTries; ++i) seconds.push_back(send_together(peers, bytes));
    std::sort(seconds.begin() + 1, seconds.end());
    return static_cast<double>(peers.size() * bytes) / seconds[1 + kTogetherTries / 4];
  }

  /// Seconds until all have what this rank sends to them, as all ranks do.
  double send_together(const std::vector<int>& peers, std::size_t bytes) {
    meet();
    const auto start = Clock::now();
    const std::uint64_t first = tag_ + 1;
    tag_ += peers.size();
    for (std::size_t at = 0; at < bytes; at += kLinkPiece) {
      for (std::size_t i = 0; i < peers.size(); ++i) {
        const protocol::Place to{segments_.mine.id, layout_.landing + at % kLanding};
        reach_.write(peers[i], to, piece_.data(), kLinkPiece, first + i);
      }
    }
    for (std::size_t i = 0; i < peers.size(); ++i) call(peers[i], first + i, bytes);
    for (const int peer : peers) answer(peer, 1);
    for (const int peer : peers) hear(peer);
    return seconds_from(start);
  }

  /// All ranks learn what each has found.
  void share_found() {
    meet();
    for (int peer = 0; peer < engine_.size(); ++peer) tell_found(peer);
    for (int peer = 0; peer < engine_.size(); ++peer) hear(peer);
  }

  void tell_found(int peer) {
    const std::uint64_t tag = ++tag_;
    const std::size_t bytes = row_.size() * sizeof(Found);
    const std::size_t at = layout_.found + static_cast<std::size_t>(engine_.rank()) * bytes;
    reach_.write(peer, {segments_.mine.id, at}, row_.data(), bytes, tag);
    call(peer, tag, bytes);
  }

  Found found_by(int a, int b) const {
    const std::size_t index = static_cast<std::size_t>(a) * row_.size();
    const std::byte* at =
        segments_.mine.data + layout_.found + (index + static_cast<std::size_t>(b)) * sizeof(Found);
    Found found;
    std::memcpy(&found, at, sizeof found);
    return found;
  }

  void call(int peer, std::uint64_t tag = 0, std::size_t bytes = 0) {
    const protocol::Place to{segments_.mine.id, line(layout_.flags, engine_.rank())};
    reach_.publish(peer, {to, ++sent_[static_cast<std::size_t>(peer)], tag, bytes});
  }

  void hear(int peer) {
    const protocol::FlagArray flags{segments_.mine.data + layout_.flags, kLineBytes,
                                    engine_.size()};
    const std::uint64_t wanted = ++heard_[static_cast<std::size_t>(peer)];
    engine_.channel().await(kMeasureLinks, {flags, wanted, peer}, [&](GroupWatch& watch) {
      return protocol::await_flag(flags[peer], peer, wanted, protocol::kAnyAhead, watch);
    });
  }

  static std::size_t line(std::size_t lines, int rank) {
    return lines + static_cast<std::size_t>(rank) * kLineBytes;
  }

  HostEngine& engine_;
  LinkLayout layout_;
  std::uint64_t number_;  // among the group's exchanges
  AddedSegments segments_;
  FabricReach reach_;
  std::vector<std::uint64_t> sent_, heard_;  // calls to and from each peer
  std::vector<Found> row_;
  std::vector<std::byte> piece_;
  std::uint64_t tag_ = 0;
};

}  // namespace

Links measure_links(HostEngine& engine, const std::function<void(int, int)>& progress) {
  engine.check_whole(kMeasureLinks);
  Links links;
  engine.enter(kMeasureLinks, nullptr, [&] {
    Probe probe(engine);
    probe.run(progress);
    links = probe.links();
  });
  return links;
}

}  // namespace ferry::host

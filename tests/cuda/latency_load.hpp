// One rank of the CUDA engine's latency mode under load: exchanges that are compared while a rank
// is killed or stopped.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <vector>

#include "engine_latency.hpp"
#include "engine_seat.hpp"

namespace ferry::test {

inline constexpr int kVictim = 1;
inline constexpr LatencyTrip kLoadTrip{CombinePath::per_rank, true, false, nullptr, {}};

inline std::int64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}

/// One rank under load.
class Loaded {
 public:
  Loaded(Bootstrap& bootstrap, const GroupConfig& config, const Shape& shape, std::uint64_t seed)
      : bootstrap_(bootstrap),
        device_(take_gpu(bootstrap)),
        world_(bootstrap.size(), shape, seed),
        mine_(world_.inputs[static_cast<std::size_t>(bootstrap.rank())], shape, device_, copier_),
        group_(met(bootstrap), config),
        latency_(group_, latency_config(shape, true)) {
    silent_ = world_;
    auto& x = silent_.inputs[kVictim].x;
    std::fill(x.begin(), x.end(), std::byte{0});
  }

  void meet() { bootstrap_.all_gather({}, 60s); }
  int rank() const { return group_.rank(); }
  LatencyExchange& latency() { return latency_; }
  bool masks_victim() const { return latency_.masked()[kVictim]; }

  /// One exchange, compared. Whose rows are there is told by the mask before and after it.
  void trip() {
    const bool before = masks_victim();
    const LatencyReceived received = latency_dispatch(latency_, mine_, kLoadTrip);
    const bool between = masks_victim();
    const auto rows = [&](const World& world, const std::set<int>& absent) {
      check_latency_rows(world, rank(), received, copier_, absent);
    };
    const auto all = [&] { rows(world_, {}); };
    const auto none = [&] { rows(world_, {kVictim}); };
    const auto zeros = [&] { rows(silent_, {}); };
    if (before) {
      none();
    } else if (!between) {
      all();
    } else {
      one_of({none, zeros, all});
    }
    const LatencyCombined combined = latency_combine(latency_, mine_, received, kLoadTrip);
    const auto sums = [&](const std::set<int>& absent) {
      check_latency_sums(world_, rank(), kLoadTrip.path, combined.x, copier_, absent);
    };
    if (between) {
      sums({kVictim});
    } else if (!masks_victim()) {
      sums({});
    } else {
      one_of({[&] { sums({kVictim}); }, [&] { sums({}); }});
    }
  }
  /// Exchanges a second, as many on all ranks.
  double speed() {
    constexpr int kExchanges = 200;
    const std::int64_t start = now_ns();
    for (int i = 0; i < kExchanges; ++i) {
      const LatencyReceived received = latency_dispatch(latency_, mine_, kLoadTrip);
      (void)latency_combine(latency_, mine_, received, kLoadTrip);
    }
    return kExchanges * 1e9 / static_cast<double>(now_ns() - start);
  }

 private:
  /// The ranks have met: the deadline is for Ferry, not for CUDA.
  static std::shared_ptr<Bootstrap> met(Bootstrap& bootstrap) {
    bootstrap.all_gather({}, 60s);
    return borrowed(bootstrap);
  }
  /// Throws what the last one says if none holds.
  static void one_of(const std::vector<std::function<void()>>& checks) {
    for (std::size_t i = 0; i + 1 < checks.size(); ++i) {
      try {
        checks[i]();
        return;
      } catch (const std::runtime_error&) {  // another one may hold
      }
    }
    checks.back()();
  }

  Bootstrap& bootstrap_;
  int device_;
  Copier copier_{};
  World world_;
  World silent_ = world_;  // the victim's rows are zero
  OnGpu mine_;
  Group group_;
  LatencyExchange latency_;
};

/// Routes that change with every replay; the trips of a sample are compared.
void replayed_rank(Bootstrap& bootstrap, const Shape& shape, int replays, std::uint64_t seed);

}  // namespace ferry::test

// The tuner of the CUDA engine: it settles, on all ranks alike and within its bounds, and every bit
// is as without it; graphs keep what they were captured with. Skips without a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "engine_graph.hpp"
#include "engine_seat.hpp"

namespace ferry::test {
namespace {

constexpr std::uint64_t kTunerSeed = 20261128;
constexpr int kFewest = 2, kMost = 6;

class EngineTunerTest : public EngineTest {
 protected:
  /// Groups with a tuner; each rank's tokens are on its GPU.
  void tuned(const std::vector<TunedCall>& start, const SeededBody& body) {
    const Shape shape;
    GroupConfig config = config_for(shape);
    config.tune = true;
    config.tuning = start;
    config.fewest_sms = kFewest;
    config.most_sms = kMost;
    on_ranks(GetParam().ranks, GetParam().threads, config, [&](Seat& seat) {
      const World world(seat.size(), shape, kTunerSeed);
      body(seat, world, seat.on_gpu(world));
    });
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, EngineTunerTest, kAllRanks, ranks_name);

std::string words_of(const std::vector<TunedCall>& calls) {
  std::string words;
  for (const TunedCall& one : calls) {
    words += one.call + " order " + std::to_string(static_cast<int>(one.order)) + " first " +
             std::to_string(one.first) + " tokens " + std::to_string(one.tokens) + ": " +
             std::to_string(one.num_sms) + " SMs, " + std::to_string(one.seconds) + " s, " +
             one.why + "\n";
  }
  return words;
}

/// What is tuned, when all ranks have heard of all calls that have ended; the same on all of them.
std::vector<TunedCall> tuned_alike(Seat& seat) {
  constexpr int kRounds = 6;  // of swaps, for a few calls
  for (int i = 0; i < kRounds; ++i) {
    seat.group.barrier();
    seat.meet();
  }
  std::vector<TunedCall> calls = seat.group.tuning();
  const std::string words = words_of(calls);
  const auto bytes = std::as_bytes(std::span(words));
  for (const auto& others : seat.bootstrap.all_gather(bytes, 60s)) {
    const std::string theirs(reinterpret_cast<const char*>(others.data()), others.size());
    need(theirs == words, "ranks differ:\n" + words + "another:\n" + theirs);
  }
  return calls;
}

/// `trips` of them until all searches have ended, decided by all ranks alike.
std::vector<TunedCall> settle(Seat& seat, const std::function<void()>& trip) {
  constexpr int kMostTimes = 60, kTripsEach = 4;
  std::vector<TunedCall> calls;
  for (int i = 0; i < kMostTimes; ++i) {
    for (int each = 0; each < kTripsEach; ++each) trip();
    calls = tuned_alike(seat);
    const auto settled = [](const TunedCall& one) { return one.settled; };
    if (!calls.empty() && std::all_of(calls.begin(), calls.end(), settled)) return calls;
  }
  need(false, "not settled:\n" + words_of(calls));
  return calls;
}

TEST_P(EngineTunerTest, SettlesAlikeWithinBoundsAndChangesNoBit) {
  tuned({}, [](Seat& seat, const World& world, const OnGpu& mine) {
    OwnStream own(seat.device);
    seat.meet();
    need(seat.group.tuning().empty(), "calls were tuned before any was made");
    const auto calls = settle(seat, [&] {
      Trip trip{.stream = &own.stream};
      const Plan plan = seat.group.plan(mine.routes_view(), {.stream = &own.stream});
      for (const RowOrder order : {RowOrder::rank_major, RowOrder::expert_major}) {
        trip.order = order;
        trip.alignment = order == RowOrder::expert_major ? 4 : 1;
        round_trip(seat.group, world, mine, plan, trip, seat.copier);
      }
    });
    need(calls.size() == 4, words_of(calls));  // each of two orders
    for (const TunedCall& one : calls) {
      need(one.num_sms >= kFewest && one.num_sms <= kMost, words_of(calls));
      need(one.probes >= 5 && one.probes <= 30 && one.seconds > 0, words_of(calls));
      need(one.tokens == 32 && one.ranks == seat.size(), words_of(calls));
    }
    seat.meet();
  });
}

/// The fused call, at full speed, of exact and of a worst case's size.
TEST_P(EngineTunerTest, CallsOnTheirWayAreTuned) {
  tuned({}, [](Seat& seat, const World& world, const OnGpu& mine) {
    OwnStream own(seat.device);
    seat.meet();
    const auto calls = settle(seat, [&] {
      for (const std::int64_t worst : {0, 200}) {
        const Trip trip{.max_recv_rows = worst, .stream = &own.stream};
        Received received;
        Combined combined;
        for (int i = 0; i < 6; ++i) {
          received =
              seat.group.dispatch(mine.x_view(), mine.routes_view(), dispatch_options(mine, trip));
          combined = seat.group.combine(received.x, received.plan, combine_options(received, trip));
        }
        combined.event.wait(60s);
        check_received(world, seat.rank(), trip, received, seat.copier);
        check_combined(world, seat.rank(), trip, combined, seat.copier);
      }
    });
    need(calls.size() == 2 && (calls[0].first || calls[1].first), words_of(calls));
    seat.meet();
  });
}

TEST_P(EngineTunerTest, GraphsKeepTheirsAndAreNotTimed) {
  tuned({}, [](Seat& seat, const World& world, const OnGpu& mine) {
    OwnStream own(seat.device);
    seat.meet();
    Trip trip{.max_recv_rows = 200, .stream = &own.stream};
    Plan plan;
    Received received;
    Combined combined;
    const auto exchange = [&] {
      plan = seat.group.plan(mine.routes_view(), {.stream = &own.stream});
      received = seat.group.dispatch(mine.x_view(), plan, dispatch_options(mine, trip));
      combined = seat.group.combine(received.x, plan, combine_options(received, trip));
    };
    const auto check = [&] {
      check_received(world, seat.rank(), trip, received, seat.copier);
      check_combined(world, seat.rank(), trip, combined, seat.copier);
    };
    exchange();  // once without a graph
    combined.event.wait(60s);
    const auto before = tuned_alike(seat);
    const Graph graph(own.raw, exchange);
    for (int i = 0; i < 50; ++i) graph.run();
    check();
    const auto after = tuned_alike(seat);
    need(words_of(before) == words_of(after), words_of(before) + "then:\n" + words_of(after));
    seat.meet();
    settle(seat, [&] {  // calls beside the graph's
      graph.run();
      check();
      round_trip(seat.group, world, mine, seat.group.plan(mine.routes_view()), {}, seat.copier);
    });
    seat.meet();
  });
}

TEST_P(EngineTunerTest, KeepsToAFileThatIsSettled) {
  TunedCall dispatch{.call = "dispatch", .dtype = Dtype::f32};
  TunedCall combine = dispatch;
  combine.call = "combine";
  dispatch.num_sms = 4;
  combine.num_sms = 40;  // beyond the bounds
  dispatch.settled = combine.settled = true;
  tuned({dispatch, combine}, [](Seat& seat, const World& world, const OnGpu& mine) {
    seat.meet();
    const Plan plan = seat.group.plan(mine.routes_view());
    for (int i = 0; i < 40; ++i) round_trip(seat.group, world, mine, plan, {}, seat.copier);
    for (const TunedCall& one : tuned_alike(seat)) {
      need(one.settled && one.probes == 0, one.why);
      need(one.num_sms == (one.call == "dispatch" ? 4 : kMost), std::to_string(one.num_sms));
    }
    seat.meet();
  });
}

TEST_P(EngineTunerTest, MemoryIsWhatTheHintSays) {
  tuned({}, [](Seat& seat, const World&, const OnGpu&) {
    need(seat.group.memory() == Group::memory_hint(seat.group.config(), seat.size()),
         "memory() is not memory_hint()");
    seat.group.barrier();
  });
}

}  // namespace
}  // namespace ferry::test

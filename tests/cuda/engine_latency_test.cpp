// Latency mode of the CUDA engine: both paths, weights with the dispatch, hooks, graphs, waits.
// Skips without a GPU.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "engine_graph.hpp"
#include "engine_latency.hpp"
#include "engine_seat.hpp"

namespace ferry::test {
namespace {

constexpr std::uint64_t kLatencySeed = 20261125;

TEST_P(EngineTest, LatencyExchangesByEitherPath) {
  const Shape shape;
  each(shape, kLatencySeed, [&](Seat& seat, const World&, const OnGpu& mine) {
    OwnStream own(seat.device);
    LatencyExchange latency(seat.group, latency_config(shape));
    seat.meet();
    for (unsigned choice = 0; choice < 16; ++choice) {
      const World world = seat.refill(mine, kLatencySeed + choice);
      LatencyTrip trip;
      trip.path = choice % 2 == 0 ? CombinePath::per_rank : CombinePath::per_slot;
      trip.weights_with_dispatch = choice / 2 % 2 == 0;
      trip.hooks = choice / 4 % 2 == 0;
      trip.stream = choice / 8 % 2 == 0 ? &own.stream : nullptr;
      latency_trip(latency, world, seat.rank(), mine, trip, seat.copier);
    }
  });
}

/// As LL, as LL128, and as LL128 of several parts.
TEST_P(EngineTest, LatencyRowsOf16BitsCarryTheirGeneration) {
  for (const auto& [tokens, hidden] : {std::pair{8, 1040}, {40, 1040}, {40, 7168}}) {
    const Shape shape{.tokens = tokens, .hidden = hidden, .dtype = Dtype::bf16};
    each(shape, kLatencySeed, [&](Seat& seat, const World& world, const OnGpu& mine) {
      LatencyExchange latency(seat.group, latency_config(shape));
      seat.meet();
      for (const CombinePath path : {CombinePath::per_rank, CombinePath::per_slot}) {
        latency_trips(latency, world, seat.rank(), mine, path, seat.copier);
      }
    });
  }
}

TEST_P(EngineTest, LatencyWeightsComeOnce) {
  const Shape shape;
  each(shape, kLatencySeed + 20, [&](Seat& seat, const World& world, const OnGpu& mine) {
    LatencyExchange latency(seat.group, latency_config(shape));
    seat.meet();
    LatencyTrip with{.weights_with_dispatch = true};
    const LatencyReceived weighted = latency_dispatch(latency, mine, with);
    const LatencyReceived plain = latency_dispatch(latency, mine, {});
    const auto refused = std::optional(ErrorKind::invalid_argument);
    need(kind_of([&] { (void)latency_combine(latency, mine, weighted, {}); }) == refused,
         "weights were taken twice");
    need(kind_of([&] { (void)latency_combine(latency, mine, plain, with); }) == refused,
         "a combine had no weights");
    need(kind_of([&] { (void)latency_dispatch(latency, mine, {}); }) == ErrorKind::exhausted,
         "a third result");
    for (const CombinePath path : {CombinePath::per_rank, CombinePath::per_slot}) {
      LatencyTrip trip = path == CombinePath::per_rank ? with : LatencyTrip{};
      trip.path = path;
      const LatencyReceived& received = path == CombinePath::per_rank ? weighted : plain;
      const LatencyCombined combined = latency_combine(latency, mine, received, trip);
      check_latency_sums(world, seat.rank(), path, combined.x, seat.copier);
    }
  });
}

/// Ranks that differ in having weights find out, and nobody gets wrong rows.
TEST_P(EngineTest, LatencyWeightsOfSomeRanksAreAMismatch) {
  const Shape shape;
  each(shape, kLatencySeed + 21, [&](Seat& seat, const World&, const OnGpu& mine) {
    LatencyExchange latency(seat.group, latency_config(shape));
    seat.meet();
    LatencyTrip trip{.weights_with_dispatch = seat.rank() == 1};
    const auto kind = kind_of([&] { (void)latency_dispatch(latency, mine, trip); });
    need(kind == ErrorKind::mismatch || kind == ErrorKind::peer_failed, "it went on");
    seat.meet();
  });
}

/// Other routes and fewer tokens in each replay, both results alive.
TEST_P(EngineTest, LatencyExchangesAreReplayed) {
  const Shape shape;
  each(shape, [&](Seat& seat) {
    World world(seat.size(), shape, kLatencySeed + 30);
    const OnGpu mine = seat.on_gpu(world);
    OwnStream own(seat.device);
    LatencyExchange latency(seat.group, latency_config(shape));
    seat.meet();
    LatencyTrip by_rank{CombinePath::per_rank, true, false, &own.stream, {}};
    LatencyTrip by_slot{CombinePath::per_slot, false, true, &own.stream, {}};
    LatencyExchanged one, two;
    const Graph graph(own.raw, [&] {
      one.received = latency_dispatch(latency, mine, by_rank);
      one.combined = latency_combine(latency, mine, one.received, by_rank);
      two.received = latency_dispatch(latency, mine, by_slot);
      two.combined = latency_combine(latency, mine, two.received, by_slot);
    });
    for (std::uint64_t i = 0; i < 6; ++i) {
      world = World(seat.size(), shape, kLatencySeed + 31 + i);
      for (std::size_t r = 0; r < world.inputs.size(); ++r) {  // fewer tokens: the rest go nowhere
        Sent& sent = world.inputs[r];
        const auto used = static_cast<std::size_t>(shape.topk) * ((i * 11 + r * 5) % 37);
        for (std::size_t s = used; s < sent.topk_idx.size(); ++s) sent.topk_idx[s] = -1;
      }
      mine.fill(world.sent(seat.rank()), seat.copier);
      seat.meet();
      graph.run();
      check_latency_rows(world, seat.rank(), one.received, seat.copier);
      check_latency_rows(world, seat.rank(), two.received, seat.copier);
      check_latency_sums(world, seat.rank(), by_rank.path, one.combined.x, seat.copier);
      check_latency_sums(world, seat.rank(), by_slot.path, two.combined.x, seat.copier);
    }
    seat.meet();
  });
}

TEST_P(EngineTest, LatencyReplaysAndEagerExchangesTakeTurns) {
  const Shape shape;
  each(shape, kLatencySeed + 50, [&](Seat& seat, const World&, const OnGpu& mine) {
    OwnStream own(seat.device);
    LatencyExchange latency(seat.group, latency_config(shape));
    seat.meet();
    LatencyTrip trip{CombinePath::per_rank, true, false, &own.stream, {}};
    LatencyCombined sums;
    const Graph graph(own.raw, [&] {  // results end with the capture
      sums = latency_combine(latency, mine, latency_dispatch(latency, mine, trip), trip);
    });
    for (std::uint64_t i = 0; i < 8; ++i) {
      const World world = seat.refill(mine, kLatencySeed + 51 + i);
      graph.run();
      check_latency_sums(world, seat.rank(), trip.path, sums.x, seat.copier);
      LatencyTrip eager = trip;
      eager.path = i % 2 == 0 ? CombinePath::per_slot : CombinePath::per_rank;
      eager.hooks = i % 3 == 0;
      for (std::uint64_t n = 0; n <= i % 3; ++n) {
        latency_trip(latency, world, seat.rank(), mine, eager, seat.copier);
      }
    }
    seat.meet();
  });
}

/// What an eager dispatch brought outlives replays, and a captured result that stays alive leaves a
/// buffer to eager dispatches.
TEST_P(EngineTest, LatencyResultsOfGraphsStayApart) {
  const Shape shape;
  each(shape, kLatencySeed + 60, [&](Seat& seat, const World& world, const OnGpu& mine) {
    const World other(seat.size(), shape, kLatencySeed + 61);
    OwnStream own(seat.device);
    LatencyExchange latency(seat.group, latency_config(shape));
    seat.meet();
    const LatencyTrip trip{CombinePath::per_rank, true, false, &own.stream, {}};
    {
      const Graph graph(own.raw, [&] {
        for (int layer = 0; layer < 3; ++layer) {
          (void)latency_combine(latency, mine, latency_dispatch(latency, mine, trip), trip);
        }
      });
      const LatencyReceived kept = latency_dispatch(latency, mine, trip);
      await_latency(kept.event, trip);
      mine.fill(other.sent(seat.rank()), seat.copier);
      seat.meet();
      for (int i = 0; i < 2; ++i) graph.run();
      check_latency_rows(world, seat.rank(), kept, seat.copier);
      seat.meet();
    }
    LatencyExchanged captured;
    const Graph graph(own.raw, [&] {
      captured.received = latency_dispatch(latency, mine, trip);
      captured.combined = latency_combine(latency, mine, captured.received, trip);
    });
    for (int i = 0; i < 4; ++i) {
      latency_trip(latency, other, seat.rank(), mine, trip, seat.copier);
      graph.run();
      check_latency_rows(other, seat.rank(), captured.received, seat.copier);
    }
    seat.meet();
  });
}

/// The caller's own output may lie anywhere but in the rows.
TEST_P(EngineTest, LatencySumsGoWhereTheCallerSays) {
  const Shape shape;
  each(shape, kLatencySeed + 62, [&](Seat& seat, const World& world, const OnGpu& mine) {
    LatencyExchange latency(seat.group, latency_config(shape));
    const Extents extents{world.sent(seat.rank()).tokens, shape.hidden};
    const auto bytes = static_cast<std::size_t>(extents[0] * extents[1]) * sizeof(float);
    const Buffer memory(bytes + 16);
    const Device where{DeviceKind::cuda, seat.device};
    for (const std::size_t skip : {std::size_t{0}, std::size_t{4}, std::size_t{8}}) {
      LatencyCombineOptions options;
      options.path = CombinePath::per_rank;
      options.hook = skip == 8;
      options.out = TensorView(static_cast<std::byte*>(static_cast<void*>(memory.data())) + skip,
                               Dtype::f32, extents, where);
      seat.meet();
      const LatencyReceived received =
          latency_dispatch(latency, mine, {CombinePath::per_rank, true, false, nullptr, {}});
      LatencyCombineOptions inside = options;
      inside.out = TensorView(received.x.data(), Dtype::f32, extents, where);
      if (extents[0] > 0) {  // nothing overlaps a rank's sums of no tokens
        need(kind_of([&] { (void)latency.combine(received.x, received, inside); }) ==
                 ErrorKind::invalid_argument,
             "sums over the rows that are read");
      }
      LatencyCombined combined = latency.combine(received.x, received, options);
      if (options.hook) combined.receive();
      need(combined.x.data() == options.out->data, "sums elsewhere");
      check_latency_sums(world, seat.rank(), options.path, combined.x, seat.copier);
    }
    seat.meet();
  });
}

/// What a call waits for a late rank stands in the caller's tensor.
TEST_P(EngineTest, LatencyWaitsNameTheLateRank) {
  const Shape shape;
  each(shape, kLatencySeed + 70, [&](Seat& seat, const World& world, const OnGpu& mine) {
    const Buffer memory(static_cast<std::size_t>(seat.size()) * 8);
    const std::vector<std::int64_t> before(static_cast<std::size_t>(seat.size()), 1000);
    const TensorView wait_ns(memory.data(), Dtype::i64, {seat.size()},
                             {DeviceKind::cuda, seat.device});
    LatencyExchange latency(seat.group, latency_config(shape));
    for (const bool hooks : {false, true}) {
      seat.copier.put(memory.data(), before);
      LatencyTrip trip{CombinePath::per_rank, true, hooks, nullptr, wait_ns};
      seat.meet();
      if (seat.rank() == 0) std::this_thread::sleep_for(100ms);
      latency_trip(latency, world, seat.rank(), mine, trip, seat.copier);
      const Tensor told{wait_ns, {}};
      const auto ns = seat.copier.get<std::int64_t>(told, seat.size());
      for (const std::int64_t one : ns) need(one >= 1000, "waits are added to what was there");
      if (seat.rank() == 1) {
        need(ns[0] > 20'000'000, "waited " + std::to_string(ns[0]) + " ns for the late rank");
        need(ns[1] < ns[0], "and longer for itself");
      }
      seat.meet();
    }
  });
}

}  // namespace
}  // namespace ferry::test

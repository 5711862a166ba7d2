// The CUDA engine in CUDA graphs: who keeps whose memory, and for how long. Skips without a GPU.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "engine_graph.hpp"
#include "engine_seat.hpp"

namespace ferry::test {
namespace {

constexpr std::uint64_t kGraphSeed = 20261123;

/// What one captured exchange leaves.
struct Exchanged {
  Plan plan;
  Received received;
  Combined combined;
};

void exchange(Seat& seat, const OnGpu& mine, Stream& stream, Trip trip, Exchanged& got) {
  trip.stream = &stream;
  got.received = seat.group.dispatch(mine.x_view(), got.plan, dispatch_options(mine, trip));
  got.combined = seat.group.combine(got.received.x, got.plan, combine_options(got.received, trip));
}

/// Waits until so many bytes are handed out: a graph's go back in a thread of their own.
void await_used(const Group& group, std::size_t bytes) {
  const auto until = std::chrono::steady_clock::now() + 10s;
  while (group.memory().arena_used_bytes != bytes) {
    need(std::chrono::steady_clock::now() < until, std::to_string(group.memory().arena_used_bytes) +
                                                       " bytes are handed out, expected " +
                                                       std::to_string(bytes));
    std::this_thread::sleep_for(1ms);
  }
}

TEST_P(EngineTest, ACachedDispatchOfExactSizeIsCaptured) {
  const Shape shape;
  each(shape, [&](Seat& seat) {
    World world(seat.size(), shape, kGraphSeed);
    const OnGpu mine = seat.on_gpu(world);
    OwnStream own(seat.device);
    seat.meet();
    Exchanged got{seat.group.plan(mine.routes_view()), {}, {}};
    round_trip(seat.group, world, mine, got.plan, {}, seat.copier);
    const Graph graph(own.raw, [&] { exchange(seat, mine, own.stream, {}, got); });
    for (int i = 0; i < 4; ++i) {
      for (Sent& sent : world.inputs) {  // other rows and weights, the same routes
        for (std::int64_t at = 0; at < sent.tokens * shape.hidden; ++at) {
          const float value = conformance::load(sent.x.data(), shape.dtype, at);
          conformance::store(sent.x.data(), shape.dtype, at, value + 0.5f);
        }
        for (float& value : sent.weights) value += 0.25f;
      }
      mine.fill(world.sent(seat.rank()), seat.copier);
      seat.meet();
      graph.run();
      check_received(world, seat.rank(), {}, got.received, seat.copier);
      check_combined(world, seat.rank(), {}, got.combined, seat.copier);
      round_trip(seat.group, world, mine, got.plan, {}, seat.copier);
    }
    seat.meet();
  });
}

TEST_P(EngineTest, GraphReplaysWithOtherRoutes) {
  each({}, kGraphSeed + 4, [&](Seat& seat, const World& first, const OnGpu& mine) {
    OwnStream own(seat.device);
    seat.meet();
    {  // once without a graph
      const Plan plan = seat.group.plan(mine.routes_view());
      round_trip(seat.group, first, mine, plan, {}, seat.copier);
    }
    seat.meet();
    Trip trip;
    trip.max_recv_rows = 200;
    Exchanged got;
    const Graph graph(own.raw, [&] {
      got.plan = seat.group.plan(mine.routes_view(), {.stream = &own.stream});
      exchange(seat, mine, own.stream, trip, got);
    });
    for (std::uint64_t i = 0; i < 5; ++i) {
      const World world = seat.refill(mine, kGraphSeed + 10 + i);
      graph.run();
      check_received(world, seat.rank(), trip, got.received, seat.copier);
      check_combined(world, seat.rank(), trip, got.combined, seat.copier);
    }
    seat.meet();
  });
}

/// Enough rows that their fan-out runs beside their dispatch, which comes directly after the plan;
/// then once more, when it is known where slots go.
TEST_P(EngineTest, FanOutsInAGraphFollowTheRows) {
  Shape shape;
  shape.tokens = 1300;
  shape.hidden = 4096;
  each(shape, kGraphSeed + 5, [&](Seat& seat, const World& world, const OnGpu& mine) {
    OwnStream own(seat.device);
    Trip trip;
    trip.max_recv_rows = 4000;
    trip.order = RowOrder::expert_major;
    seat.meet();
    Exchanged first, again;
    const Graph graph(own.raw, [&] {
      first.plan = seat.group.plan(mine.routes_view(), {.stream = &own.stream});
      again.plan = first.plan;
      exchange(seat, mine, own.stream, trip, first);
      exchange(seat, mine, own.stream, trip, again);
    });
    for (int i = 0; i < 3; ++i) {
      seat.meet();
      graph.run();
      for (const Exchanged* got : {&first, &again}) {
        check_received(world, seat.rank(), trip, got->received, seat.copier);
        check_combined(world, seat.rank(), trip, got->combined, seat.copier);
      }
    }
    seat.meet();
  });
}

TEST_P(EngineTest, TensorsOutliveTheirGraphAndGraphsTheirTensors) {
  each({}, kGraphSeed + 1, [&](Seat& seat, const World& world, const OnGpu& mine) {
    OwnStream own(seat.device);
    Trip trip;
    trip.max_recv_rows = 150;
    {
      const Plan plan = seat.group.plan(mine.routes_view());
      round_trip(seat.group, world, mine, plan, {}, seat.copier);
    }
    const std::size_t before = seat.group.memory().arena_used_bytes;
    const auto captured = [&](Exchanged& got) {
      return std::make_unique<Graph>(own.raw, [&] {
        got.plan = seat.group.plan(mine.routes_view(), {.stream = &own.stream});
        exchange(seat, mine, own.stream, trip, got);
      });
    };
    const auto others = [&] {  // would use memory that went back too early
      for (int i = 0; i < 3; ++i) {
        const Plan plan = seat.group.plan(mine.routes_view());
        round_trip(seat.group, world, mine, plan, {}, seat.copier);
      }
    };
    seat.meet();
    Exchanged got;
    auto graph = captured(got);
    seat.meet();
    graph->run();
    graph.reset();
    others();
    check_received(world, seat.rank(), trip, got.received, seat.copier);
    check_combined(world, seat.rank(), trip, got.combined, seat.copier);
    got = {};
    await_used(seat.group, before);
    seat.meet();
    graph = captured(got);
    got = {};
    for (int i = 0; i < 3; ++i) {
      seat.meet();
      others();
      seat.meet();
      graph->run();
    }
    others();
    need(seat.group.memory().arena_used_bytes > before, "the graph lost its memory");
    graph.reset();
    await_used(seat.group, before);
    seat.meet();
  });
}

}  // namespace
}  // namespace ferry::test

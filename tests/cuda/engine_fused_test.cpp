// A dispatch that makes its plan, and plans whose end nobody has marked. Skips without a GPU.
#include <gtest/gtest.h>

#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

#include "cuda/throughput/engine.hpp"
#include "engine_graph.hpp"
#include "engine_seat.hpp"
#include "touch.hpp"

namespace ferry::test {
namespace {

constexpr std::uint64_t kFusedSeed = 20261126;

struct Both {
  Received received;
  Combined combined;
};

/// One dispatch with the rank's routes and the combine after it.
Both there_and_back(Seat& seat, const OnGpu& mine, const Trip& trip) {
  Both both;
  both.received =
      seat.group.dispatch(mine.x_view(), mine.routes_view(), dispatch_options(mine, trip));
  both.combined =
      seat.group.combine(both.received.x, both.received.plan, combine_options(both.received, trip));
  return both;
}

void check(const World& world, Seat& seat, const Trip& trip, const Both& both) {
  check_received(world, seat.rank(), trip, both.received, seat.copier);
  check_combined(world, seat.rank(), trip, both.combined, seat.copier);
}

TEST_P(EngineTest, DispatchMakesItsPlan) {
  const Shape shape;
  each(shape, [&](Seat& seat) {
    OwnStream own(seat.device);
    std::uint64_t seed = kFusedSeed;
    const World any(seat.size(), shape, seed);
    const OnGpu mine = seat.on_gpu(any);
    const std::size_t before = seat.group.memory().arena_used_bytes;
    for (const RowOrder order : {RowOrder::rank_major, RowOrder::expert_major}) {
      for (const std::int64_t worst : {0, 200}) {
        for (Stream* stream : {&own.stream, static_cast<Stream*>(nullptr), &own.stream}) {
          const World world = seat.refill(mine, ++seed);
          Trip trip;
          trip.order = order;
          trip.max_recv_rows = worst;
          trip.stream = stream;
          const Both both = there_and_back(seat, mine, trip);
          both.received.event.wait(60s);
          both.combined.event.wait(60s);
          check(world, seat, trip, both);
          // A plan like any other.
          round_trip(seat.group, world, mine, both.received.plan, trip, seat.copier);
        }
      }
    }
    need(seat.group.memory().arena_used_bytes == before, "memory was lost");
  });
}

TEST_P(EngineTest, GraphOfADispatchThatMakesItsPlan) {
  const Shape shape;
  each(shape, [&](Seat& seat) {
    const World first(seat.size(), shape, kFusedSeed + 50);
    const OnGpu mine = seat.on_gpu(first);
    OwnStream own(seat.device);
    Trip trip;
    trip.max_recv_rows = 200;
    trip.stream = &own.stream;
    seat.meet();
    Both both;
    const Graph graph(own.raw, [&] { both = there_and_back(seat, mine, trip); });
    for (std::uint64_t i = 0; i < 5; ++i) {
      const World world = seat.refill(mine, kFusedSeed + 51 + i);
      graph.run();
      check(world, seat, trip, both);
    }
    seat.meet();
  });
}

TEST_P(EngineTest, ADispatchSaysWhyItsPlanFailed) {
  const Shape shape;
  each(shape, kFusedSeed + 80, [&](Seat& seat, const World& world, const OnGpu& mine) {
    OwnStream own(seat.device);
    for (const std::int64_t worst : {200, 0}) {
      Sent bad = world.sent(seat.rank());
      if (seat.rank() == 0) bad.topk_idx[5] = shape.experts;
      mine.fill(bad, seat.copier);
      seat.meet();
      DispatchOptions options;
      options.topk_weights = mine.weights_view();
      options.max_recv_rows = worst;
      options.stream = &own.stream;
      std::string said;
      try {
        seat.group.dispatch(mine.x_view(), mine.routes_view(), options).event.wait(60s);
      } catch (const Error& error) {
        said = error.what();
        need(error.peer() == 0, "names another rank: " + said);
        need(seat.rank() != 0 || said.rfind("dispatch: topk_idx: got", 0) == 0, "said: " + said);
      }
      need(said.find("no expert") != std::string::npos, "said: " + said);
      // The group goes on.
      mine.fill(world.sent(seat.rank()), seat.copier);
      seat.meet();
      Trip trip{.stream = &own.stream};
      const Both both = there_and_back(seat, mine, trip);
      both.combined.event.wait(60s);
      check(world, seat, trip, both);
    }
  });
}

/// Rank 0 learns it when its peers have counted the plan and are in the dispatch.
TEST_P(EngineTest, AnOutThatIsTooSmallIsRefusedOnAllRanks) {
  const Shape shape;
  each(shape, kFusedSeed + 100, [&](Seat& seat, const World& world, const OnGpu& mine) {
    const Buffer out(static_cast<std::size_t>(shape.hidden) * sizeof(float));
    OwnStream own(seat.device);
    for (const RowOrder order : {RowOrder::rank_major, RowOrder::expert_major}) {
      for (Stream* stream : {&own.stream, static_cast<Stream*>(nullptr)}) {
        DispatchOptions options{.order = order, .stream = stream};
        if (seat.rank() == 0) {
          options.out = TensorView(out.data(), Dtype::f32, {1, shape.hidden},
                                   Device{DeviceKind::cuda, seat.device});
        }
        seat.meet();
        const auto start = std::chrono::steady_clock::now();
        try {
          seat.group.dispatch(mine.x_view(), mine.routes_view(), options).event.wait(60s);
          need(false, "an out of one row was taken");
        } catch (const Error& error) {
          const bool own_error = seat.rank() == 0;
          need(error.kind() == (own_error ? ErrorKind::invalid_argument : ErrorKind::exhausted) &&
                   std::string(error.what()).find("out") != std::string::npos,
               error.what());
        }
        need(std::chrono::steady_clock::now() - start < 5s, "somebody waited");
        Trip trip{.stream = stream};
        const Both both = there_and_back(seat, mine, trip);
        both.combined.event.wait(60s);
        check(world, seat, trip, both);
      }
    }
  });
}

/// Rank 0 is told to stop (Ctrl-C) when it has made the plan, and not the dispatch.
TEST_P(EngineTest, ARankThatStopsBetweenPlanAndDispatchIsNotWaitedFor) {
  const Shape shape;
  static thread_local bool stop = false;
  GroupConfig config = config_for(shape);
  config.on_wait = [] {
    if (stop) throw std::runtime_error("stop");
  };
  on_ranks(GetParam().ranks, GetParam().threads, config, [&](Seat& seat) {
    const World world(seat.size(), shape, kFusedSeed + 110);
    const OnGpu mine = seat.on_gpu(world);
    DispatchOptions options;
    options.order = RowOrder::expert_major;  // exact, so its rows must be known
    seat.meet();
    stop = seat.rank() == 0;
    if (!stop) std::this_thread::sleep_for(500ms);
    const auto start = std::chrono::steady_clock::now();
    std::string said;
    try {
      (void)seat.group.dispatch(mine.x_view(), mine.routes_view(), options);
    } catch (const std::exception& error) {
      said = error.what();
    }
    stop = false;
    need(!said.empty(), "a dispatch without a rank");
    need(seat.rank() != 0 || said == "stop", said);
    need(std::chrono::steady_clock::now() - start < 5s, "somebody waited: " + said);
    seat.meet();  // so nobody has left
  });
}

TEST_P(EngineTest, APlansEndIsMarkedForWhoNeedsIt) {
  each({}, kFusedSeed + 90, [&](Seat& seat, const World& world, const OnGpu& mine) {
    OwnStream other(seat.device);
    read_later(other.raw, 0ms);
    need(cudaStreamSynchronize(other.raw), "read_later");
    Trip trip;
    trip.max_recv_rows = 200;
    for (int i = 0; i < 4; ++i) {
      OwnStream own(seat.device);
      seat.meet();
      read_later(own.raw, 20ms);
      Plan plan = seat.group.plan(mine.routes_view(), {.stream = &own.stream});
      const auto made = std::static_pointer_cast<cuda::CudaPlan>(Access::state(plan))->made;
      need(made->marked() == nullptr, "an event lies between a plan and what follows");
      trip.stream = i % 2 == 0 ? &other.stream : &own.stream;
      if (i < 2) {
        round_trip(seat.group, world, mine, plan, trip, seat.copier);
      } else {
        plan = {};
      }
      need(made->marked() != nullptr, "nobody can wait for the plan");
      need(cudaStreamSynchronize(own.raw), "cudaStreamSynchronize");
    }
    trip.stream = &other.stream;  // the one of the last plan is gone
    const Both both = there_and_back(seat, mine, trip);
    both.combined.event.wait(60s);
    check(world, seat, trip, both);
  });
}

}  // namespace
}  // namespace ferry::test

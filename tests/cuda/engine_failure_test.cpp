// What goes wrong with the CUDA engine, and what must not: refused calls, ranks that end, failures
// that come later. Skips without a GPU.
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <thread>

#include "cuda/throughput/engine.hpp"
#include "engine_seat.hpp"

namespace ferry::test {
namespace {

constexpr std::uint64_t kFailureSeed = 20261122;

/// The kind of error that the event throws; `deadline` when it does not.
ErrorKind event_kind(const Event& event) {
  return test::kind_of([&] { event.wait(60s); }).value_or(ErrorKind::deadline);
}

TEST_P(EngineTest, UsersOfRoutesThatDidNotComeAreRefused) {
  each({}, kFailureSeed, [&](Seat& seat, const World& world, const OnGpu& mine) {
    OwnStream own(seat.device);
    seat.meet();
    for (int i = 0; i < 3; ++i) {
      const Plan plan = seat.group.plan(mine.routes_view());
      DispatchOptions options;
      options.stream = &own.stream;
      options.max_recv_rows = 1;
      const Received carrier = seat.group.dispatch(mine.x_view(), plan, options);
      options.max_recv_rows = 200;
      const Received rows = seat.group.dispatch(mine.x_view(), plan, options);
      options.order = RowOrder::expert_major;
      const Received slots = seat.group.dispatch(mine.x_view(), plan, options);
      CombineOptions back{.order = RowOrder::expert_major, .stream = &own.stream};
      const Combined combined = seat.group.combine(slots.x, plan, back);
      for (const Event& event : {carrier.event, rows.event, slots.event, combined.event}) {
        need(event_kind(event) == ErrorKind::exhausted, "a call without its routes went on");
      }
      Trip trip{.order = i % 2 == 0 ? RowOrder::expert_major : RowOrder::rank_major};
      round_trip(seat.group, world, mine, plan, trip, seat.copier);
    }
  });
}

/// Only rank 0 asks how the dispatch ended that was to bring the routes, so it alone would bring
/// them in the next one.
TEST_P(EngineTest, RanksThatKnowDifferentlyOfRoutesAreAllRefused) {
  each({}, kFailureSeed + 8, [&](Seat& seat, const World& world, const OnGpu& mine) {
    OwnStream own(seat.device);
    for (int i = 0; i < 2; ++i) {
      seat.meet();
      const Plan plan = seat.group.plan(mine.routes_view());
      DispatchOptions options;
      options.stream = &own.stream;
      options.max_recv_rows = 1;
      const Received carrier = seat.group.dispatch(mine.x_view(), plan, options);
      if (seat.rank() == 0) {
        need(event_kind(carrier.event) == ErrorKind::exhausted, "too many rows were taken");
      }
      options.max_recv_rows = 200;
      const Received rows = seat.group.dispatch(mine.x_view(), plan, options);
      const ErrorKind kind = event_kind(rows.event);
      const auto wanted = seat.rank() == 0 ? ErrorKind::invalid_argument : ErrorKind::exhausted;
      need(kind == wanted, "the dispatch between ended otherwise");
      // Now all know, though nobody else has asked the first one.
      round_trip(seat.group, world, mine, plan, {}, seat.copier);
    }
  });
}

TEST_P(EngineTest, ARefusedCallBeforeItLeavesAnExpertMajorCombineAlone) {
  each({}, kFailureSeed + 1, [&](Seat& seat, const World& world, const OnGpu& mine) {
    seat.meet();
    Trip trip{.order = RowOrder::expert_major, .alignment = 4};
    DispatchOptions options{.topk_weights = mine.weights_view()};
    const Plan plan = seat.group.plan(mine.routes_view());
    const Received routes = seat.group.dispatch(mine.x_view(), plan, options);
    options.order = trip.order;
    options.alignment = trip.alignment;
    const Received rows =
        seat.group.dispatch(mine.x_view(), seat.group.plan(mine.routes_view()), options);
    DispatchOptions tight;
    tight.max_recv_rows = 1;
    need_error(ErrorKind::exhausted, "too many rows were taken",
               [&] { (void)seat.group.dispatch(mine.x_view(), plan, tight); });
    CombineOptions back{.order = trip.order,
                        .alignment = trip.alignment,
                        .topk_weights = routes.topk_weights,
                        .apply_weights = true};
    check_combined(world, seat.rank(), trip, seat.group.combine(rows.x, plan, back), seat.copier);
  });
}

TEST_P(EngineTest, ARefusedDispatchLeavesNothingInItsPlan) {
  const Shape shape;
  each(shape, kFailureSeed + 9, [&](Seat& seat, const World& world, const OnGpu& mine) {
    OwnStream own(seat.device);
    seat.meet();
    for (const bool waits : {true, false}) {
      const Plan plan = seat.group.plan(mine.routes_view());
      need(plan.recv_rows() != 1, "one row is enough here");
      DispatchOptions tight;
      tight.max_recv_rows = 1;
      tight.stream = waits ? nullptr : &own.stream;
      need_error(ErrorKind::exhausted, "too many rows were taken", [&] {
        const Received refused = seat.group.dispatch(mine.x_view(), plan, tight);
        refused.event.wait(60s);
      });
      ConstTensorView one = mine.x_view();
      one.shape[0] = 1;
      const Error error =
          need_error(ErrorKind::invalid_argument, "rows of a refused dispatch were taken",
                     [&] { (void)seat.group.combine(one, plan); });
      need(std::string(error.what()).find("max_recv_rows") == std::string::npos, error.what());
      round_trip(seat.group, world, mine, plan, {}, seat.copier);
    }
  });
}

/// Refused calls between others that use the same plan: of as many rows as the carrier of the
/// routes had, and of more.
TEST_P(EngineTest, ARefusedCachedDispatchLeavesTheRoutesAlone) {
  each({}, kFailureSeed + 7, [&](Seat& seat, const World& world, const OnGpu& mine) {
    seat.meet();
    Trip trip;
    trip.max_recv_rows = 200;
    DispatchOptions options;
    options.topk_weights = mine.weights_view();
    options.max_recv_rows = trip.max_recv_rows;
    const Plan plan = seat.group.plan(mine.routes_view());
    const Received first = seat.group.dispatch(mine.x_view(), plan, options);
    for (const std::int64_t rows : {200, 300}) {
      DispatchOptions tight = options;
      tight.max_recv_rows = rows;
      tight.order = RowOrder::expert_major;
      tight.alignment = 1024;
      need_error(ErrorKind::exhausted, "too many expert-major rows were taken",
                 [&] { (void)seat.group.dispatch(mine.x_view(), plan, tight); });
      check_received(world, seat.rank(), trip, first, seat.copier);
      for (const std::int64_t worst : {std::int64_t{0}, trip.max_recv_rows, rows, rows + 10}) {
        for (const RowOrder order : {RowOrder::rank_major, RowOrder::expert_major}) {
          Trip again;
          again.max_recv_rows = worst;
          again.order = order;
          round_trip(seat.group, world, mine, plan, again, seat.copier);
        }
      }
    }
  });
}

TEST_P(EngineTest, AFailureLeavesTheEventsOfEarlierCallsAlone) {
  for (const bool graphs : {false, true}) {
    each({}, kFailureSeed + 2, [&](Seat& seat, const World&, const OnGpu& mine) {
      OwnStream own(seat.device);
      seat.meet();
      const Plan plan = seat.group.plan(mine.routes_view());
      DispatchOptions options;
      options.stream = &own.stream;
      options.max_recv_rows = 200;
      if (graphs) {  // the CPU cannot number the calls any more
        cudaGraph_t graph = nullptr;
        need(cudaStreamBeginCapture(own.raw, cudaStreamCaptureModeThreadLocal), "capture");
        {
          const Received captured = seat.group.dispatch(mine.x_view(), plan, options);
        }
        need(cudaStreamEndCapture(own.raw, &graph), "cudaStreamEndCapture");
        need(cudaGraphDestroy(graph), "cudaGraphDestroy");
      }
      // A message of rank 1 that cannot be, between the two calls.
      const auto engine = std::static_pointer_cast<cuda::CudaEngine>(Access::engine(seat.group));
      const std::uint64_t violation = std::uint64_t{1000000} << 32;
      const Received good = seat.group.dispatch(mine.x_view(), plan, options);
      if (seat.rank() == 0) {
        const auto& view = engine->view();
        for (std::size_t slot = 0; slot < cuda::kMailboxDepth; ++slot) {
          const std::size_t message = slot * static_cast<std::size_t>(seat.size()) + 1;
          need(cudaMemcpyAsync(
                   view.control + view.layout.mailbox + message * view.layout.message_bytes,
                   &violation, sizeof violation, cudaMemcpyHostToDevice, own.raw),
               "cudaMemcpyAsync");
        }
        const Received bad = seat.group.dispatch(mine.x_view(), plan, options);
        while (cudaStreamQuery(own.raw) == cudaErrorNotReady) std::this_thread::sleep_for(10us);
        good.event.wait(60s);
        need(event_kind(bad.event) == ErrorKind::mismatch, "the later call did not fail");
      } else {
        good.event.wait(60s);
      }
      seat.meet();
    });
  }
}

TEST_P(EngineTest, ARankThatLeavesInTheMidstOfACallIsMissed) {
  each({}, kFailureSeed + 5, [&](Seat& seat, const World&, const OnGpu& mine) {
    OwnStream own(seat.device);
    seat.meet();
    const Plan plan = seat.group.plan(mine.routes_view());
    DispatchOptions options;
    options.max_recv_rows = 200;
    options.stream = &own.stream;
    if (seat.rank() == 1) {
      const Received received = seat.group.dispatch(mine.x_view(), plan, options);
      seat.group.destroy();
      seat.meet();
      seat.meet();
      return;
    }
    seat.meet();
    const auto start = std::chrono::steady_clock::now();
    const Received received = seat.group.dispatch(mine.x_view(), plan, options);
    need_error(
        ErrorKind::peer_left, "a rank that left in the midst of a call was waited for in vain",
        [&] { received.event.wait(60s); }, 1);
    need(std::chrono::steady_clock::now() - start < 5s, "it took too long");
    seat.meet();
  });
}

TEST(EngineEndTest, ARankThatIsNotAwaitedMayEndItsProcess) {
  if (gpu_count() == 0) GTEST_SKIP() << "NO GPU";
  const Shape shape;
  const RankBody body = seated(config_for(shape), [&](Seat& seat) {
    const World world(2, shape, kFailureSeed + 3);
    const OnGpu mine = seat.on_gpu(world);
    seat.meet();
    const Plan plan = seat.group.plan(mine.routes_view());
    round_trip(seat.group, world, mine, plan, {}, seat.copier);
    if (seat.rank() == 1) _exit(0);
    std::this_thread::sleep_for(1s);
    (void)seat.group.empty({4, 4}, Dtype::f32);
    need_error(
        ErrorKind::peer_failed, "a barrier without rank 1", [&] { seat.group.barrier(); }, 1);
  });
  const auto problems = run_ranks(2, 1, body, 90);
  ASSERT_EQ(problems.size(), 1u) << (problems.empty() ? "" : problems[0]);
  EXPECT_NE(problems[0].find("rank 1: its process ended"), std::string::npos) << problems[0];
}

TEST(EngineEndTest, TensorsOutliveTheGroup) {
  if (gpu_count() == 0) GTEST_SKIP() << "NO GPU";
  const Shape shape;
  const auto problems = run_on_crew(2, 2, [&](Bootstrap& bootstrap) {
    const int device = take_gpu(bootstrap);
    const Copier copier;
    const World world(2, shape, kFailureSeed + 4);
    const OnGpu mine(world.inputs[static_cast<std::size_t>(bootstrap.rank())], shape, device,
                     copier);
    bootstrap.all_gather({}, 60s);
    Received received;
    {
      Group group(borrowed(bootstrap), config_for(shape));
      DispatchOptions options{.topk_weights = mine.weights_view()};
      received = group.dispatch(mine.x_view(), group.plan(mine.routes_view()), options);
      bootstrap.all_gather({}, 60s);
    }
    check_received(world, bootstrap.rank(), {}, received, copier);
    received = {};  // its memory goes back in the order of a stream of the group
    need(cudaGetLastError(), "an error is left");
    bootstrap.all_gather({}, 60s);
  });
  for (const std::string& problem : problems) ADD_FAILURE() << problem;
}

TEST(EngineStreamTest, ANumberIsNeverUsedAgain) {
  if (gpu_count() == 0) GTEST_SKIP() << "NO GPU";
  const auto problems = run_on_crew(1, 1, [&](Bootstrap&) {
    unsigned long long last = 0;
    for (int i = 0; i < 10; ++i) {
      cudaStream_t stream = nullptr;
      need(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
      const auto id = cuda::id_of(stream);
      need(id != last, "a stream has the number of one before");
      last = id;
      need(cudaStreamDestroy(stream), "cudaStreamDestroy");
    }
  });
  for (const std::string& problem : problems) ADD_FAILURE() << problem;
}

}  // namespace
}  // namespace ferry::test

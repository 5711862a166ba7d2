// The CUDA engine, through the public API: ranks as threads and as processes, on the GPUs that are
// there; against what the definition says. Skips without a GPU.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>

#include "engine_seat.hpp"

namespace ferry::test {
namespace {

constexpr std::uint64_t kSeed = 20261121;

INSTANTIATE_TEST_SUITE_P(Ranks, EngineTest, kAllRanks, ranks_name);

TEST_P(EngineTest, MemoryIsWhatTheHintSays) {
  each({}, [](Seat& seat) {
    need(seat.group.memory() == Group::memory_hint(seat.group.config(), seat.size()),
         "memory() is not memory_hint()");
    seat.group.barrier();
  });
}

/// The plainest use, for all numbers of ranks.
class EngineRanksTest : public EngineTest {};
INSTANTIATE_TEST_SUITE_P(Ranks, EngineRanksTest,
                         ::testing::Values(RankCount{1, true}, RankCount{2, true},
                                           RankCount{3, true}, RankCount{1, false},
                                           RankCount{2, false}, RankCount{3, false}),
                         ranks_name);

TEST_P(EngineRanksTest, RoundTrips) {
  each({}, kSeed, [&](Seat& seat, const World& world, const OnGpu& mine) {
    seat.meet();
    const Plan plan = seat.group.plan(mine.routes_view());
    need(plan.recv_rows() == world.rows(seat.rank()), "recv_rows");
    for (const RowOrder order : {RowOrder::rank_major, RowOrder::expert_major}) {
      for (const std::int64_t worst : {0, 200}) {
        for (const int ordinary : {0, 1, 2}) {  // rows of no rank, of all, of every second
          Trip trip;
          trip.order = order;
          trip.max_recv_rows = worst;
          trip.registered = ordinary == 0 || (ordinary == 2 && seat.rank() % 2 == 0);
          trip.alignment = order == RowOrder::expert_major ? 4 : 1;
          trip.num_sms = ordinary == 0 ? 0 : 3;
          round_trip(seat.group, world, mine, plan, trip, seat.copier);
        }
      }
    }
  });
}

TEST_P(EngineTest, TwoStreamsInOrder) {
  each({}, kSeed + 1, [&](Seat& seat, const World& world, const OnGpu& mine) {
    OwnStream a(seat.device), b(seat.device);
    seat.meet();
    for (int i = 0; i < 10; ++i) {
      Stream& first = i % 2 == 0 ? a.stream : b.stream;
      Stream& second = i % 3 == 0 ? a.stream : b.stream;
      const Plan plan = seat.group.plan(mine.routes_view(), {.stream = &first});
      Trip trip;
      trip.max_recv_rows = 150;
      trip.stream = &second;
      round_trip(seat.group, world, mine, plan, trip, seat.copier);
      trip.max_recv_rows = 0;
      trip.stream = &first;
      round_trip(seat.group, world, mine, plan, trip, seat.copier);
    }
  });
}

/// Enough rows that their fan-out follows them while they come.
TEST_P(EngineTest, FanOutFollowsTheRows) {
  Shape shape;
  shape.tokens = 1300;
  shape.hidden = 8192;
  each(shape, kSeed + 7, [&](Seat& seat, const World& world, const OnGpu& mine) {
    OwnStream own(seat.device);
    seat.meet();
    const Plan plan = seat.group.plan(mine.routes_view());
    Trip trip{.order = RowOrder::expert_major, .alignment = 4};
    round_trip(seat.group, world, mine, plan, trip, seat.copier);  // brings the routes
    trip.stream = &own.stream;
    round_trip(seat.group, world, mine, plan, trip, seat.copier);  // knows where slots go
    trip.max_recv_rows = 5000;
    trip.alignment = 1;
    for (int i = 0; i < 3; ++i) {  // does not know, then does
      round_trip(seat.group, world, mine, plan, trip, seat.copier);
    }
  });
}

TEST_P(EngineTest, GrowsWhenThereIsNoRoom) {
  Shape shape;
  shape.tokens = 600;
  shape.hidden = 8192;  // 20 MB a rank at most, and the group has 8
  each(shape, kSeed + 2, [&](Seat& seat, const World& world, const OnGpu& mine) {
    seat.meet();
    const Plan plan = seat.group.plan(mine.routes_view());
    round_trip(seat.group, world, mine, plan, {}, seat.copier);
    Trip worst;
    worst.max_recv_rows = 2500;
    round_trip(seat.group, world, mine, plan, worst, seat.copier);
    round_trip(seat.group, world, mine, plan, {}, seat.copier);
  });
}

TEST_P(EngineTest, RefusesWhatCannotBe) {
  const Shape shape;
  each(shape, [&](Seat& seat) {
    World world(seat.size(), shape, kSeed + 3);
    const OnGpu mine = seat.on_gpu(world);
    seat.meet();
    // Rank 0 gives a route that is no expert.
    Sent bad = world.inputs[static_cast<std::size_t>(seat.rank())];
    if (seat.rank() == 0) bad.topk_idx[5] = shape.experts;
    const OnGpu wrong(bad, shape, seat.device, seat.copier);
    seat.meet();
    try {
      seat.group.plan(wrong.routes_view());
      need(false, "a bad route was taken");
    } catch (const Error& error) {
      need(error.peer() == 0, std::string("names another rank: ") + error.what());
      const auto wanted = seat.rank() == 0 ? ErrorKind::invalid_argument : ErrorKind::peer_failed;
      need(error.kind() == wanted, error.what());
    }
    // More rows than max_recv_rows.
    const Plan plan = seat.group.plan(mine.routes_view());
    DispatchOptions options;
    options.max_recv_rows = 1;
    need_error(ErrorKind::exhausted, "too many rows were taken",
               [&] { (void)seat.group.dispatch(mine.x_view(), plan, options); });
    // Received rows fit, expert-major rows do not.
    options.max_recv_rows = seat.size() == 1 ? 40 : 80;
    options.order = RowOrder::expert_major;
    options.alignment = 64;
    need_error(ErrorKind::exhausted, "too many expert-major rows were taken",
               [&] { (void)seat.group.dispatch(mine.x_view(), plan, options); });
    // The group goes on.
    Trip trip{.order = RowOrder::expert_major};
    round_trip(seat.group, world, mine, plan, trip, seat.copier);
  });
}

TEST_P(EngineTest, DestroyedRanksAreNamed) {
  each({}, kSeed + 5, [&](Seat& seat, const World& world, const OnGpu& mine) {
    seat.meet();
    const Plan plan = seat.group.plan(mine.routes_view());
    round_trip(seat.group, world, mine, plan, {}, seat.copier);
    if (seat.rank() == 1) {
      seat.group.destroy();
      seat.meet();
      return;
    }
    const auto start = std::chrono::steady_clock::now();
    need_error(
        ErrorKind::peer_left, "a rank that left was waited for in vain",
        [&] { seat.group.barrier(); }, 1);
    need(std::chrono::steady_clock::now() - start < 3s, "it took too long");
    seat.meet();
  });
}

TEST(EngineKillTest, SurvivorsNameTheDead) {
  const int ranks = 3, victim = 1;
  if (gpu_count() == 0) GTEST_SKIP() << "NO GPU";
  const Shape shape;
  const RankBody body = seated(config_for(shape), [&](Seat& seat) {
    const World world(ranks, shape, kSeed + 6);
    const OnGpu mine = seat.on_gpu(world);
    seat.meet();
    const Plan plan = seat.group.plan(mine.routes_view());
    round_trip(seat.group, world, mine, plan, {}, seat.copier);
    if (seat.rank() == victim) kill(getpid(), SIGKILL);
    const auto start = std::chrono::steady_clock::now();
    try {
      for (;;) round_trip(seat.group, world, mine, plan, {}, seat.copier);
    } catch (const Error& error) {
      need(error.kind() == ErrorKind::peer_failed && error.peer() == victim, error.what());
    }
    need(std::chrono::steady_clock::now() - start < 3s, "it took too long");
    // The GPU is usable.
    const Buffer after(1 << 20);
    need(cudaMemset(after.data(), 0, 1 << 20), "cudaMemset");
    need(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  });
  const auto problems = run_ranks(ranks, 1, body, 90);
  ASSERT_EQ(problems.size(), 1u) << (problems.empty() ? "" : problems.back());
  EXPECT_NE(problems[0].find("rank 1: its process ended"), std::string::npos) << problems[0];
}

}  // namespace
}  // namespace ferry::test

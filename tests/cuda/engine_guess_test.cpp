// Dispatches of exact size that are launched before the CPU knows how many rows come: what is
// guessed is either narrowed or granted anew. Skips without a GPU.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "cuda/throughput/engine.hpp"
#include "engine_seat.hpp"
#include "touch.hpp"

namespace ferry::test {
namespace {

constexpr std::uint64_t kGuessSeed = 20261125;

/// All tokens go to one expert (-1: to none).
World world_to(int ranks, const Shape& shape, std::int64_t expert) {
  World world(ranks, shape, kGuessSeed);
  for (Sent& sent : world.inputs) {
    for (std::size_t i = 0; i < sent.topk_idx.size(); ++i) {
      sent.topk_idx[i] = i % static_cast<std::size_t>(shape.topk) == 0 ? expert : -1;
    }
  }
  return world;
}

/// The first `tokens` tokens of each rank go to all ranks, the others to none.
World world_of_few(int ranks, const Shape& shape, std::int64_t tokens) {
  World world(ranks, shape, kGuessSeed);
  const auto topk = static_cast<std::size_t>(shape.topk);
  for (Sent& sent : world.inputs) {
    for (std::size_t i = 0; i < sent.topk_idx.size(); ++i) {
      const auto to = static_cast<int>(i % topk);
      const bool goes = i / topk < static_cast<std::size_t>(tokens) && to < ranks;
      sent.topk_idx[i] = goes ? world.first_expert(to) : -1;
    }
  }
  return world;
}

/// Plans on a stream that is busy, so that nobody can know the counts, dispatches and combines.
void guessed_trip(Seat& seat, const World& world, const OnGpu& mine, OwnStream& own,
                  bool scales = false) {
  mine.fill(world.inputs[static_cast<std::size_t>(seat.rank())], seat.copier);
  seat.meet();
  read_later(own.raw, 20ms);
  const Plan plan = seat.group.plan(mine.routes_view(), {.stream = &own.stream});
  Trip trip{.stream = &own.stream};
  DispatchOptions options{.topk_weights = mine.weights_view(), .stream = &own.stream};
  if (scales) {  // the weights serve as scales
    options.scales = mine.weights_view();
  }
  const Received received = seat.group.dispatch(mine.x_view(), plan, options);
  received.event.wait(60s);
  check_received(world, seat.rank(), trip, received, seat.copier);
  need(received.x.rows() == world.rows(seat.rank()), "rows");
  if (scales) {
    World scaled = world;
    scaled.scale_columns = world.topk;
    for (Sent& sent : scaled.inputs) sent.scales = sent.weights;
    const auto expected = conformance::expect_dispatch(scaled, seat.rank(), trip.order, 1);
    need_same("scales", received.scales, expected.scales, seat.copier);
  }
  const Combined combined = seat.group.combine(received.x, plan, combine_options(received, trip));
  combined.event.wait(60s);
  check_combined(world, seat.rank(), trip, combined, seat.copier);
  // Another dispatch with the plan, of known size, and one of a worst case.
  round_trip(seat.group, world, mine, plan, trip, seat.copier);
  trip.max_recv_rows = world.rows(seat.rank()) + 5;
  round_trip(seat.group, world, mine, plan, trip, seat.copier);
  trip.max_recv_rows = 0;
  trip.order = RowOrder::expert_major;
  round_trip(seat.group, world, mine, plan, trip, seat.copier);
}

struct Counted {
  std::uint64_t made, too_low;
};
Counted counted(const Seat& seat) {
  auto& guesses = std::static_pointer_cast<cuda::CudaEngine>(Access::engine(seat.group))->guesses();
  return {guesses.made.load(), guesses.too_low.load()};
}

void warm_up(Seat& seat, OwnStream& own) {
  read_later(own.raw, 0ms);
  need(cudaStreamSynchronize(own.raw), "read_later");
  seat.meet();
}

TEST_P(EngineTest, GuessedRowsAreNarrowed) {
  const Shape shape;
  each(shape, [&](Seat& seat) {
    OwnStream own(seat.device);
    warm_up(seat, own);
    const World first(seat.size(), shape, kGuessSeed + 1);
    const OnGpu mine = seat.on_gpu(first);
    const std::size_t before = seat.group.memory().arena_used_bytes;
    for (std::uint64_t i = 0; i < 6; ++i) {
      const World world(seat.size(), shape, kGuessSeed + 1 + i);
      guessed_trip(seat, world, mine, own, i % 2 == 1);
    }
    const Counted now = counted(seat);
    // The last rank has no tokens: without history it cannot guess.
    need(now.made == (first.sent(seat.rank()).tokens == 0 ? 5u : 6u), std::to_string(now.made));
    need(now.too_low == 0, std::to_string(now.too_low) + " guesses were too low");
    need(seat.group.memory().arena_used_bytes == before, "memory was lost");
    seat.meet();
  });
}

/// From a group that is used to rows as `before` has them, to a plan of `after`.
struct Change {
  std::function<World(int ranks, const Shape&)> before, after;
  std::function<bool(int rank)> too_low;  ///< who has guessed too low then
};

void change_rows(const RankCount& on, const Change& change) {
  for (const bool wide : {false, true}) {  // with room; and the arena must grow meanwhile
    Shape shape;
    shape.tokens = 160;
    shape.hidden = wide ? 4096 : 256;
    GroupConfig config = config_for(shape);
    if (wide) config.memory_bytes = std::size_t{2} << 20;  // holds 42 rows, but not 160
    on_ranks(on.ranks, on.threads, config, [&](Seat& seat) {
      OwnStream own(seat.device);
      warm_up(seat, own);
      const World before = change.before(seat.size(), shape);
      const World after = change.after(seat.size(), shape);
      const OnGpu mine = seat.on_gpu(before);
      if (!wide) {
        for (int i = 0; i < 8; ++i) guessed_trip(seat, before, mine, own);
      } else {
        const Plan plan = seat.group.plan(mine.routes_view());  // known counts teach, too
        round_trip(seat.group, before, mine, plan, {}, seat.copier);
      }
      guessed_trip(seat, after, mine, own);
      const Counted now = counted(seat);
      need(now.too_low == (change.too_low(seat.rank()) ? 1u : 0u), std::to_string(now.too_low));
      if (!wide) guessed_trip(seat, before, mine, own);
      seat.meet();
    });
  }
}

TEST_P(EngineTest, WhatIsGuessedTooLowIsGrantedAnew) {
  change_rows(GetParam(),
              {[](int ranks, const Shape& s) { return world_to(ranks, s, s.experts - 1); },
               [](int ranks, const Shape& s) { return world_to(ranks, s, 0); },
               [](int rank) { return rank == 0; }});
}

TEST_P(EngineTest, AllMayGuessTooLowAtOnce) {
  change_rows(GetParam(), {[](int ranks, const Shape& s) { return world_of_few(ranks, s, 4); },
                           [](int ranks, const Shape& s) { return world_of_few(ranks, s, 160); },
                           [](int) { return true; }});
}

TEST(EngineGuessTest, ASecondGrantThatDoesNotComeIsMissed) {
  const Shape shape;
  GroupConfig config = config_for(shape);
  config.deadline = 2s;
  static std::atomic<bool> hold{false};
  config.on_wait = [] {
    if (hold.exchange(false)) std::this_thread::sleep_for(4s);
  };
  on_ranks(2, false, config, [&](Seat& seat) {
    Shape of = shape;
    of.tokens = 160;
    OwnStream own(seat.device);
    warm_up(seat, own);
    const World before = world_to(2, of, of.experts - 1), after = world_to(2, of, 0);
    const OnGpu mine = seat.on_gpu(before);
    {
      const Plan plan = seat.group.plan(mine.routes_view());
      round_trip(seat.group, before, mine, plan, {}, seat.copier);
    }
    mine.fill(after.sent(seat.rank()), seat.copier);
    seat.meet();
    read_later(own.raw, 200ms);  // so long that the wait for the counts calls on_wait
    const Plan plan = seat.group.plan(mine.routes_view(), {.stream = &own.stream});
    DispatchOptions options{.stream = &own.stream};
    hold = seat.rank() == 0;
    const Error error = need_error(
        ErrorKind::deadline, "rows came without a grant",
        [&] {
          const Received received = seat.group.dispatch(mine.x_view(), plan, options);
          received.event.wait(60s);
        },
        0);
    need(std::string(error.what())
                 .find(seat.rank() == 0 ? "this rank is in dispatch" : "rank 0 is in dispatch") !=
             std::string::npos,
         error.what());
    seat.meet();
  });
}

TEST_P(EngineTest, APlanThatFailedFailsItsDispatchOnAllRanks) {
  const Shape shape;
  each(shape, [&](Seat& seat) {
    OwnStream own(seat.device);
    warm_up(seat, own);
    const World world(seat.size(), shape, kGuessSeed + 20);
    const OnGpu mine = seat.on_gpu(world);
    for (int i = 0; i < 4; ++i) {
      Sent bad = world.sent(seat.rank());
      if (seat.rank() == 0) bad.topk_idx[3] = shape.experts;
      mine.fill(bad, seat.copier);
      seat.meet();
      read_later(own.raw, 20ms);
      const Plan plan = seat.group.plan(mine.routes_view(), {.stream = &own.stream});
      const auto wanted = seat.rank() == 0 ? ErrorKind::invalid_argument : ErrorKind::peer_failed;
      if ((seat.rank() + i) % 2 == 0) {  // some ranks know before they dispatch
        need_error(wanted, "counts of a plan that failed", [&] { (void)plan.recv_rows(); });
      }
      DispatchOptions options{.stream = &own.stream};
      if (i == 3 && seat.rank() == 0) options.max_recv_rows = 100;  // each rank's own choice
      const auto error =
          error_of([&] { seat.group.dispatch(mine.x_view(), plan, options).event.wait(60s); });
      need(error.has_value(), "a plan that failed was used");
      need(error->kind() == wanted || (i == 3 && seat.rank() == 0), error->what());
      guessed_trip(seat, world, mine, own);
    }
    seat.meet();
  });
}

TEST(EngineGuessTest, WaitingForTheStreamIsNotThePeersDelay) {
  const Shape shape;
  GroupConfig config = config_for(shape);
  config.deadline = 2s;
  on_ranks(2, false, config, [&](Seat& seat) {
    OwnStream own(seat.device);
    warm_up(seat, own);
    const World world(seat.size(), shape, kGuessSeed + 30);
    const OnGpu mine = seat.on_gpu(world);
    seat.meet();
    read_later(own.raw, 3000ms);
    const Plan plan = seat.group.plan(mine.routes_view(), {.stream = &own.stream});
    Trip trip{.stream = &own.stream};
    round_trip(seat.group, world, mine, plan, trip, seat.copier);
    seat.meet();
  });
}

}  // namespace
}  // namespace ferry::test

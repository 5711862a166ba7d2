// The CUDA engine without memory, and with more rows than there can be. Skips without a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>

#include "engine_hog.hpp"
#include "engine_seat.hpp"

namespace ferry::test {
namespace {

constexpr std::uint64_t kLimitsSeed = 20261127;
using Clock = std::chrono::steady_clock;

TEST_P(EngineTest, APlanWithoutMemoryIsRefusedOnAllRanks) {
  Shape shape;
  shape.topk = 8;
  each(shape, kLimitsSeed + 3, [&](Seat& seat, const World& world, const OnGpu& mine) {
    ConstTensorView routes = mine.routes_view();
    ConstTensorView x = mine.x_view();
    std::unique_ptr<Buffer> many;
    if (seat.rank() == 0) {
      routes.shape = {1 << 21, shape.topk};  // 64 MB of ids alone
      x.shape[0] = routes.shape[0];          // never read
      many = std::make_unique<Buffer>(routes.bytes());
      need(cudaMemset(many->data(), 0xff, routes.bytes()), "cudaMemset");
      need(cudaDeviceSynchronize(), "cudaMemset");
      routes.data = many->data();
    }
    OwnStream own(seat.device);
    // On a stream the others learn it in the dispatch, whose rows they know, guess or need not
    // know.
    struct Way {
      Stream* stream;
      std::int64_t max_recv_rows;
    };
    for (const Way way : {Way{nullptr, 0}, Way{&own.stream, 200}, Way{&own.stream, 0}}) {
      std::unique_ptr<Hog> hog;
      seat.meet();
      if (seat.rank() == 0) hog = std::make_unique<Hog>();
      seat.meet();
      const auto start = Clock::now();
      need_error(
          ErrorKind::exhausted, "a dispatch without a plan",
          [&] {
            const Plan plan = seat.group.plan(routes, {.stream = way.stream});
            need(way.stream != nullptr, "a plan without memory");
            DispatchOptions options;
            options.stream = way.stream;
            options.max_recv_rows = way.max_recv_rows;
            seat.group.dispatch(x, plan, options).event.wait(60s);
          },
          0);
      need(Clock::now() - start < 5s, "somebody waited");
      seat.meet();
      hog.reset();
      seat.meet();
      const Plan plan = seat.group.plan(mine.routes_view());
      round_trip(seat.group, world, mine, plan, {}, seat.copier);
    }
    seat.meet();
  });
}

/// The last rank that shares its GPU with none, so that it alone can be without memory; -1: none.
int last_alone(int ranks, int gpus) {
  for (int rank = ranks - 1; rank >= 0; --rank) {
    if (rank - gpus < 0 && rank + gpus >= ranks) return rank;
  }
  return -1;
}

/// Whatever the plan's call is refused for.
TEST_P(EngineTest, ARankWithoutMemoryForItsPlanTakesPartInTheDispatch) {
  const int poor = last_alone(GetParam().ranks, gpu_count());
  if (poor < 0) GTEST_SKIP() << "every rank shares its GPU";
  Shape shape;
  shape.topk = 8;
  each(shape, [&](Seat& seat) {
    const World world(seat.size(), shape, kLimitsSeed + 5);
    const Sent& sent = world.inputs[static_cast<std::size_t>(seat.rank())];
    const OnGpu mine(sent, shape, seat.device, seat.copier);
    ConstTensorView routes = mine.routes_view();
    ConstTensorView x = mine.x_view();
    std::unique_ptr<Buffer> many;
    if (seat.rank() == poor) {
      x.shape[0] = routes.shape[0] = 1 << 21;  // 64 MB of ids alone
      many = std::make_unique<Buffer>(routes.bytes());
      x.data = routes.data = many->data();  // never read
    }
    OwnStream own(seat.device);
    for (const bool bad : {false, true}) {
      for (const std::int64_t worst : {200, 0}) {
        std::unique_ptr<Hog> hog;
        Sent now = sent;
        if (bad && seat.rank() == 0) now.topk_idx[5] = shape.experts;
        mine.fill(now, seat.copier);
        seat.meet();
        if (seat.rank() == poor) hog = std::make_unique<Hog>();
        seat.meet();
        const auto start = Clock::now();
        try {
          DispatchOptions options;
          options.stream = &own.stream;
          options.max_recv_rows = worst;
          seat.group.dispatch(x, routes, options).event.wait(60s);
          need(false, "a dispatch without a plan");
        } catch (const Error& error) {
          need(error.peer() == (bad ? 0 : poor), error.what());
          need(bad || error.kind() == ErrorKind::exhausted, error.what());
        }
        need(Clock::now() - start < 5s, "somebody waited");
        seat.meet();
        hog.reset();
        mine.fill(sent, seat.copier);
        seat.meet();
        const Plan plan = seat.group.plan(mine.routes_view());
        round_trip(seat.group, world, mine, plan, {}, seat.copier);
      }
    }
    seat.meet();
  });
}

TEST_P(EngineTest, MoreRowsThanNumbersAreRefusedOnAllRanks) {
  constexpr std::int64_t kExperts = 2400;  // of a rank; each padded to 2^20 rows
  Shape shape;
  shape.tokens = 300;
  shape.hidden = 4;
  shape.topk = 8;
  shape.experts = kExperts * GetParam().ranks;
  each(shape, [&](Seat& seat) {
    World world(seat.size(), shape, kLimitsSeed + 4);
    for (Sent& sent : world.inputs) std::fill(sent.topk_idx.begin(), sent.topk_idx.end(), -1);
    Sent& first = world.inputs[0];
    for (std::size_t i = 0; i < first.topk_idx.size(); ++i) {
      first.topk_idx[i] = static_cast<std::int64_t>(i) % kExperts;  // rank 0's
    }
    const OnGpu mine = seat.on_gpu(world);
    seat.meet();
    const Plan plan = seat.group.plan(mine.routes_view());
    DispatchOptions options{.order = RowOrder::expert_major, .alignment = 1 << 20};
    const Error error = need_error(
        ErrorKind::exhausted, "2^31 rows",
        [&] { (void)seat.group.dispatch(mine.x_view(), plan, options); }, 0);
    need(std::string(error.what()).find("2147483647") != std::string::npos, error.what());
    round_trip(seat.group, world, mine, plan, {}, seat.copier);
  });
}

}  // namespace
}  // namespace ferry::test

// What happens to a host group in unusual hands: uneven growth, failed calls, several threads.
#include <atomic>
#include <future>
#include <mutex>

#include "engine/test_groups.hpp"

namespace ferry::host::test {

using namespace engine::test;
namespace {

GroupConfig small(std::chrono::nanoseconds deadline = 20s) {
  GroupConfig config;
  config.memory_bytes = 4096;
  config.deadline = deadline;
  return config;
}

// Ranks that grew at other times number their segments differently.
void latency_after_uneven_growth(FabricKind fabric) {
  GroupConfig config = small();
  config.fabric = fabric;
  with_groups(3, config, [](Group& group) {
    const Batch big(group.rank(), 64, 256, 0);  // all to rank 0: only it grows
    const Plan plan = group.plan(big.ids());
    {
      const Received got = group.dispatch(big.x(), plan);
    }
    LatencyExchange exchange(group, {.capacity = 8, .hidden = 64, .topk = 1, .dtype = Dtype::f32});
    for (int i = 0; i < 4; ++i) {
      const Batch batch(group.rank(), 5, 64, (group.rank() + i) % 8);
      LatencyReceived got = exchange.dispatch(batch.x(), batch.ids());
      const std::vector<float> weights(5, 2.0f);
      const LatencyCombined back =
          exchange.combine(got.x, got, {weights.data(), Dtype::f32, {5, 1}});
      EXPECT_TRUE(same_rows(back.x, batch, 2)) << "rank " << group.rank();
    }
    group.barrier();
  });
}
TEST(HostEngine, LatencyAfterUnevenGrowthLocal) {
  latency_after_uneven_growth(FabricKind::local);
}
TEST(HostEngine, LatencyAfterUnevenGrowthSim) {
  latency_after_uneven_growth(FabricKind::sim);
}

TEST(HostEngine, DispatchMakesItsPlan) {
  with_groups(3, small(), [](Group& group) {
    const Batch batch(group.rank(), 7, 64, (group.rank() + 1) % 8);
    const Received got = group.dispatch(batch.x(), batch.ids());
    ASSERT_TRUE(got.plan);
    EXPECT_EQ(got.plan.recv_rows(), got.x.rows());
    EXPECT_FALSE(group.dispatch(batch.x(), got.plan).plan);
    EXPECT_TRUE(same_rows(group.combine(got.x, got.plan).x, batch, 1)) << "rank " << group.rank();
  });
}

// Rows of ordinary memory, more than stay in the caches: this rank's own are read where they are.
TEST(HostEngine, CombineOfManyOrdinaryRows) {
  with_groups(3, small(), [](Group& group) {
    constexpr std::int64_t kTokens = 700, kHidden = 2048;
    Batch batch(group.rank(), kTokens, kHidden, 0);
    for (std::size_t t = 0; t < kTokens; ++t) {
      batch.routes[t] = static_cast<std::int64_t>(t % 3) * 3;  // of 8 experts a rank has 3 or 2
    }
    const Received got = group.dispatch(batch.x(), batch.ids());
    const auto* first = got.x.as<float>();
    const std::vector<float> rows(first, first + got.x.rows() * kHidden);
    const ConstTensorView ordinary(rows.data(), Dtype::f32, {got.x.rows(), kHidden});
    EXPECT_TRUE(same_rows(group.combine(ordinary, got.plan).x, batch, 1)) << group.rank();
  });
}

TEST(HostEngine, GrowthAddsAtLeastHalf) {
  with_groups(2, small(), [](Group& group) {
    std::vector<Received> held;
    std::size_t before = group.memory().arena_bytes;
    int segments = 0;
    for (int i = 0; i < 120; ++i) {
      const Batch batch(group.rank(), 64, 1024, (group.rank() + 1) % 2 * 4);  // 256 KiB each
      held.push_back(group.dispatch(batch.x(), group.plan(batch.ids())));
      const std::size_t now = group.memory().arena_bytes;
      if (now == before) continue;
      EXPECT_GE(now - before, before / 2);
      ++segments;
      before = now;
    }
    EXPECT_GE(segments, 2);
    EXPECT_LE(segments, 9);  // 30 MiB from 4 KiB; 2 MiB at a time it would be 15
    group.barrier();
  });
}

TEST(HostEngine, ExhaustedOnOneRankIsToldToAllAndLeavesTheGroupUsable) {
  with_groups(3, small(), [](Group& group) {
    const Batch batch(group.rank(), 2, 1 << 14, 0);
    const Plan plan = group.plan(batch.ids());
    DispatchOptions options;
    options.max_recv_rows = group.rank() == 1 ? (std::int64_t{1} << 31) - 1 : 8;  // 128 TiB
    expect_error(ErrorKind::exhausted, {"rank 1", "could not register"},
                 [&] { group.dispatch(batch.x(), plan, options); });
    const Received got = group.dispatch(batch.x(), plan);
    EXPECT_TRUE(same_rows(group.combine(got.x, plan).x, batch));
  });
}

TEST(HostEngine, ARefusedDispatchLeavesNothingInItsPlan) {
  with_groups(2, small(), [](Group& group) {
    const Batch batch(group.rank(), 6, 16, 0);  // 12 rows come to rank 0
    const Plan plan = group.plan(batch.ids());
    DispatchOptions options;
    options.max_recv_rows = group.rank() == 0 ? 7 : 20;
    expect_error(ErrorKind::exhausted, {"rank 0", "12 rows"},
                 [&] { group.dispatch(batch.x(), plan, options); });
    const std::vector<float> rows(std::size_t{20} * 16);
    const std::int64_t given = options.max_recv_rows;
    expect_error(ErrorKind::invalid_argument,
                 {"rows", group.rank() == 0 ? "expected 12, the plan's" : "expected 0, the plan's"},
                 [&] { group.combine({rows.data(), Dtype::f32, {given, 16}}, plan); });
    const Received got = group.dispatch(batch.x(), plan);
    EXPECT_TRUE(same_rows(group.combine(got.x, plan).x, batch));
  });
}

TEST(HostEngine, WorstCaseRowsThatDidNotComeHaveNoPlace) {
  GroupConfig config = small();
  config.memory_bytes = 1 << 20;
  with_groups(2, config, [](Group& group) {
    const Batch batch(group.rank(), 6, 16, 0);
    const Plan plan = group.plan(batch.ids());
    DispatchOptions options;
    options.order = RowOrder::expert_major;
    options.max_recv_rows = 100;
    for (int i = 0; i < 3; ++i) {  // memory of earlier results is used again
      const Received got = group.dispatch(batch.x(), plan, options);
      const auto* places = got.slot_rows.as<std::int64_t>();
      const int rows = group.rank() == 0 ? 12 : 0;
      ASSERT_EQ(got.slot_rows.rows(), 100);
      for (int row = 0; row < 100; ++row) {
        EXPECT_EQ(places[row], row < rows ? row : -1) << "row " << row;
      }
      std::fill_n(got.slot_rows.as<std::int64_t>(), 100, 77);
    }
  });
}

TEST(HostEngine, TheNextDispatchCarriesTheRoutesWhenTheFirstFailed) {
  GroupConfig config = small();
  config.memory_bytes = 1 << 20;  // so that a call on a stream does not have to make room
  with_groups(2, config, [](Group& group) {
    Stream stream;
    const Batch batch(group.rank(), 6, 16, 0);
    const Plan plan = group.plan(batch.ids());
    DispatchOptions options{.stream = &stream};
    options.max_recv_rows = group.rank() == 0 ? 1 : 100;  // 12 rows come to rank 0
    const Received first = group.dispatch(batch.x(), plan, options);
    options.max_recv_rows = 12;
    const Received second = group.dispatch(batch.x(), plan, options);  // before it is known
    expect_error(ErrorKind::exhausted, {"rank 0", "12 rows"}, [&] { first.event.wait(20s); });
    second.event.wait(20s);
    if (group.rank() == 0) {
      for (int i = 0; i < 12; ++i) {
        EXPECT_EQ(second.topk_idx.as<std::int64_t>()[i], 0);
        EXPECT_EQ(second.source_token.as<std::int32_t>()[i], i % 6);
        EXPECT_EQ(second.x.as<float>()[i * 16], 1000 * (i / 6) + i % 6);
      }
    }
    CombineOptions back;
    EXPECT_TRUE(same_rows(group.combine(second.x, plan, back).x, batch));
  });
}

TEST(HostEngine, AFailedPlanIsRefusedAndTheGroupGoesOn) {
  with_groups(2, small(), [](Group& group) {
    Stream stream;
    const Batch batch(group.rank(), 4, 16, 0);
    const std::vector<std::int64_t> wide(8, 1);
    const ConstTensorView other{wide.data(), Dtype::i64, {4, 2}};
    const Plan bad = group.plan(group.rank() == 0 ? batch.ids() : other, {.stream = &stream});
    while (!bad || !stream.record().ready()) std::this_thread::sleep_for(1ms);
    expect_error(ErrorKind::mismatch, {"topk"}, [&] { group.combine(batch.x(), bad); });
    expect_error(ErrorKind::mismatch, {"topk"}, [&] { bad.recv_rows(); });
    // Ranks in different calls: both are told, and the numbers of the plans stay together.
    expect_error(ErrorKind::mismatch, {"plan", "barrier"}, [&] {
      if (group.rank() == 0) group.barrier();
      group.plan(batch.ids());
    });
    const std::uint64_t digest = 7 + static_cast<std::uint64_t>(group.rank());
    expect_error(ErrorKind::mismatch, {"placement_digest", "7", "8"},
                 [&] { group.plan(batch.ids(), {.placement_digest = digest}); });
    const Plan plan = group.plan(batch.ids());
    EXPECT_TRUE(same_rows(group.combine(group.dispatch(batch.x(), plan).x, plan).x, batch));
  });
}

TEST(HostEngine, TwoThreadsOfOneRankAreSerialised) {
  with_groups(2, small(), [](Group& group) {
    const Batch batch(group.rank(), 9, 64, 7);
    const Plan plan = group.plan(batch.ids());
    std::atomic<int> good{0};
    on_ranks(3, [&](int) {
      Stream stream;
      for (int i = 0; i < 10; ++i) {
        DispatchOptions options;
        if (i % 2 == 1) options.stream = &stream;
        const Received got = group.dispatch(batch.x(), plan, options);
        got.event.wait(20s);
        const auto rows = plan.recv_rows();
        bool same = got.x.rows() == rows;
        for (std::int64_t r = 0; r < rows; ++r) {
          same = same && got.x.as<float>()[r * 64] == 1000 * (r / 9) + r % 9 &&
                 got.topk_idx.as<std::int64_t>()[r] == 3;
        }
        good += same ? 1 : 0;
      }
    });
    EXPECT_EQ(good, 30);
    group.barrier();
  });
}

TEST(HostEngine, ResultsAreDroppedOnAnotherThreadWhileTheArenaGrows) {
  with_groups(2, small(), [](Group& group) {
    std::mutex mutex;
    std::vector<LatencyReceived> to_drop;
    std::atomic<bool> stop{false};
    std::thread dropper([&] {
      while (!stop) {
        std::vector<LatencyReceived> mine;
        const std::lock_guard lock(mutex);
        mine.swap(to_drop);
      }
    });
    LatencyExchange exchange(group, {.capacity = 4, .hidden = 64, .topk = 1, .dtype = Dtype::f32});
    const Batch little(group.rank(), 4, 64, 5);
    std::vector<Received> held;
    for (int i = 1; i <= 12; ++i) {
      const Batch batch(group.rank(), 64 * i, 256, 0);
      while (true) {
        try {
          LatencyReceived got = exchange.dispatch(little.x(), little.ids());
          const std::lock_guard lock(mutex);
          to_drop.push_back(std::move(got));
          break;
        } catch (const Error& e) {  // the dropper is late
          ASSERT_EQ(e.kind(), ErrorKind::exhausted) << e.what();
        }
      }
      held.push_back(group.dispatch(batch.x(), group.plan(batch.ids())));
    }
    stop = true;
    dropper.join();
    to_drop.clear();
    group.barrier();
  });
}

TEST(HostEngine, ABlockedStreamEndsAtTheDeadline) {
  with_groups(2, small(400ms), [](Group& group) {
    Stream stream;
    std::promise<void> release;
    const Batch batch(group.rank(), 4, 16, 0);
    const Plan plan = group.plan(batch.ids());
    stream.submit([&] { release.get_future().wait(); });
    DispatchOptions options{.stream = &stream};
    const Received got = group.dispatch(batch.x(), plan, options);
    const auto start = Clock::now();
    expect_error(ErrorKind::deadline, {"barrier", "stream"}, [&] { group.barrier(); });
    EXPECT_LT(Clock::now() - start, 10s);
    release.set_value();
    EXPECT_THROW(got.event.wait(20s), Error);  // the group has failed: it does not go on alone
    EXPECT_THROW(group.barrier(), Error);
  });
}

TEST(HostEngine, DestroyWhileAnotherThreadWaitsForPeers) {
  const auto bootstraps = thread_bootstrap(2);
  std::promise<void> over;
  auto hold = over.get_future().share();
  on_ranks(2, [&](int r) {
    GroupConfig config = small();
    config.experts = 4;
    Group group(bootstraps[static_cast<std::size_t>(r)], config);
    if (r == 1) {
      hold.wait();
      return;
    }
    auto waiting = std::async(std::launch::async, [&] {
      expect_error(ErrorKind::destroyed, {"destroyed"}, [&] { group.barrier(); });
    });
    std::this_thread::sleep_for(30ms);
    const auto start = Clock::now();
    group.destroy();
    waiting.get();
    EXPECT_LT(Clock::now() - start, 5s);
    over.set_value();
  });
}

TEST(HostEngine, ATensorOutlivesItsGroup) {
  std::vector<Tensor> kept(2);
  std::vector<LatencyReceived> results(2);
  with_groups(2, small(), [&](Group& group) {
    const auto r = static_cast<std::size_t>(group.rank());
    const Batch batch(group.rank(), 3, 16, 0);
    kept[r] = group.dispatch(batch.x(), group.plan(batch.ids())).x;
    LatencyExchange exchange(group, {.capacity = 4, .hidden = 16, .topk = 1, .dtype = Dtype::f32});
    results[r] = exchange.dispatch(batch.x(), batch.ids());
  });
  EXPECT_EQ(kept[0].rows(), 6);
  EXPECT_EQ(kept[0].as<float>()[5 * 16], 1002);
  EXPECT_EQ(results[0].x.as<float>()[5 * 16], 1002);
}

TEST(HostEngine, DispatchFromAReceivedTensor) {
  with_groups(2, small(), [](Group& group) {
    const Batch batch(group.rank(), 4, 16, group.rank() == 0 ? 4 : 0);
    Plan plan = group.plan(batch.ids());
    Received got = group.dispatch(batch.x(), plan);
    for (int i = 0; i < 5; ++i) {  // ping-pong: even rounds hold the other rank's rows
      got = group.dispatch(got.x, plan);
      const Batch expected((group.rank() + i) % 2, 4, 16, 0);
      EXPECT_TRUE(same_rows(got.x, expected)) << "round " << i;
    }
    group.barrier();
  });
}

TEST(HostEngine, SizesBeyondReasonAreRefused) {
  with_groups(1, small(), [](Group& group) {
    constexpr std::int64_t kHuge = std::int64_t{1} << 40;
    const auto invalid = ErrorKind::invalid_argument;
    const Batch batch(0, 2, 16, 0);
    const Plan plan = group.plan(batch.ids());
    expect_error(invalid, {"empty", "shape"}, [&] { group.empty({kHuge, kHuge}, Dtype::f32); });
    expect_error(invalid, {"empty", "shape"},
                 [&] { group.empty({kHuge, kHuge, kHuge}, Dtype::u8); });
    DispatchOptions options;
    options.max_recv_rows = std::int64_t{1} << 60;  // × 64 bytes is 0 in 64 bits
    expect_error(invalid, {"max_recv_rows"}, [&] { group.dispatch(batch.x(), plan, options); });
    expect_error(invalid, {"capacity"}, [&] {
      LatencyExchange(group,
                      {.capacity = 1 << 20, .hidden = 1 << 24, .topk = 64, .dtype = Dtype::f32});
    });
    const auto* odd = reinterpret_cast<const char*>(batch.rows.data()) + 2;
    expect_error(invalid, {"rows", "aligned"},
                 [&] { group.combine({odd, Dtype::f32, {2, 16}}, plan); });
    CombineOptions overlapping;
    std::vector<float> memory(4 * 16);
    overlapping.out = TensorView{memory.data() + 16, Dtype::f32, {2, 16}};
    expect_error(invalid, {"out", "overlaps"},
                 [&] { group.combine({memory.data(), Dtype::f32, {2, 16}}, plan, overlapping); });
    EXPECT_TRUE(same_rows(group.combine(group.dispatch(batch.x(), plan).x, plan).x, batch));
  });
}

}  // namespace
}  // namespace ferry::host::test

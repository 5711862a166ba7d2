// Exchanges on streams: nothing blocks the caller but the count of an exact-sized output.
#include <atomic>
#include <chrono>
#include <thread>

#include "compare.hpp"
#include "exchange.hpp"
#include "fleet_test.hpp"

namespace ferry::conformance {
namespace {

class Streams : public OnFabric {};
FERRY_ON_EVERY_FABRIC(Streams);

std::uint64_t stream_seed(std::uint64_t which) {
  return mix(base_seed(), 91, which) >> 1;
}

void pause(std::int64_t ms) {
  std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

TEST_P(Streams, CallsReturnBeforePeersCome) {
  run(3, [](Rank& rank) {
    Case c = small_case(rank, stream_seed(1));
    Group group(rank.bootstrap(), group_config(rank, c.experts()));
    const auto everybody = [&] {  // not an exchange of the group
      rank.bootstrap()->all_gather({}, std::chrono::seconds(10));
    };
    Stream stream;
    std::unique_ptr<Exchange> exchange;
    Received received;
    Combined combined;
    const auto enqueue = [&] {
      exchange = std::make_unique<Exchange>(rank, group, c, &stream);
      received = exchange->dispatch(0, 200);
      combined = exchange->combine(0);
    };
    // Rank 0 comes only after the others have made all of their calls.
    if (rank.rank() != 0) {
      enqueue();
      rank.check(!received.event.ready() && !combined.event.ready(),
                 "an exchange ended without rank 0");
      everybody();
    } else {
      everybody();
      enqueue();
    }
    exchange->check(combined, 0);
    rank.check(received.event.ready(), "combine ended before the dispatch before it");
    exchange->check(received, 0);
    stream.synchronize();
    group.barrier();
  });
}

TEST_P(Streams, ExactSizeBlocksForTheCountOnly) {
  run(3, [](Rank& rank) {
    const Case c = small_case(rank, stream_seed(2));
    Group group(rank.bootstrap(), group_config(rank, c.experts()));
    const auto everybody = [&] { rank.bootstrap()->all_gather({}, std::chrono::seconds(10)); };
    Stream stream;
    Exchange exchange(rank, group, c);  // the counts are known
    // Rank 0's stream is busy until all have enqueued: nobody's dispatch can end before.
    std::atomic<bool> go{false};
    if (rank.rank() == 0) {
      stream.submit([&] {
        while (!go) pause(1);
      });
    }
    const World& world = exchange.world(0);
    const RankInput& own = world.inputs[static_cast<std::size_t>(rank.rank())];
    DispatchOptions options{.stream = &stream};
    const ConstTensorView weights(own.weights.data(), Dtype::f32, {own.tokens, c.topk});
    options.topk_weights = weights;
    const Received received =
        group.dispatch({own.x.data(), c.dtype, {own.tokens, c.hidden}}, exchange.plan(), options);
    rank.check(!received.event.ready(), "a dispatch ended without rank 0");
    everybody();
    go = true;
    exchange.check(received, 0);
    group.barrier();
  });
}

TEST_P(Streams, CallsOfTwoStreamsRunInTheOrderOfTheCalls) {
  run(4, [](Rank& rank) {
    Group group(rank.bootstrap(), group_config(rank, small_case(rank, 1).experts()));
    Stream streams[2];
    std::vector<std::unique_ptr<Exchange>> all;
    std::vector<Received> received;
    std::vector<Combined> combined;
    Random delays(mix(stream_seed(3), static_cast<std::uint64_t>(rank.rank())));  // each its own
    for (std::uint64_t i = 0; i < 12; ++i) {
      Case c = small_case(rank, stream_seed(100 + i));
      c.order = i % 3 == 0 ? RowOrder::expert_major : RowOrder::rank_major;
      Stream& stream = streams[i % 2];
      const std::int64_t ms = delays.below(4);
      stream.submit([ms] { pause(ms); });
      all.push_back(std::make_unique<Exchange>(rank, group, c, &stream));
      received.push_back(all.back()->dispatch(0, 200));
      combined.push_back(all.back()->combine(0));
      if (i % 5 == 4) group.barrier();  // without a stream, between them
    }
    for (std::size_t i = 0; i < all.size(); ++i) {
      all[i]->check(received[i], 0);
      all[i]->check(combined[i], 0);
    }
    group.barrier();
  });
}

TEST_P(Streams, EventsOrderTwoStreams) {
  run(1, [](Rank& rank) {
    Stream first, second;
    std::atomic<int> step{0};
    const Event done = first.submit([&] {
      pause(20);
      step = 1;
    });
    second.wait(done);
    int seen = -1;
    second.submit([&] { seen = step; });
    second.synchronize();
    rank.equal(seen, 1, "step seen by the second stream");
    first.submit([] { throw std::runtime_error("work failed"); });
    bool thrown = false;
    try {
      first.synchronize();
    } catch (const std::runtime_error&) {
      thrown = true;
    }
    rank.check(thrown, "synchronize() lost the error of the work");
    first.synchronize();  // said once
    rank.check(Event().ready(), "a default event is not complete");
    std::atomic<bool> go{false};
    const Event late = first.submit([&] {
      while (!go) pause(1);
    });
    expect_error(rank, ErrorKind::deadline, "Event::wait",
                 [&] { late.wait(std::chrono::milliseconds(20)); });
    rank.check(!late.ready(), "work ended early");
    go = true;
    late.wait();
  });
}

TEST_P(Streams, GrowthOnAStream) {
  run(3, [](Rank& rank) {
    Case c = small_case(rank, stream_seed(5));
    c.hidden = 2048;
    Group group(rank.bootstrap(), group_config(rank, c.experts(), 4096));
    Stream stream;
    std::vector<std::unique_ptr<Exchange>> all;
    std::vector<Received> received;
    std::vector<Combined> combined;
    for (std::uint64_t i = 0; i < 4; ++i) {
      c.seed = stream_seed(200 + i);
      c.order = i % 2 == 0 ? RowOrder::rank_major : RowOrder::expert_major;
      all.push_back(std::make_unique<Exchange>(rank, group, c, &stream));
      received.push_back(all.back()->dispatch(0, i < 2 ? 150 : 0));
      combined.push_back(all.back()->combine(0));
    }
    for (std::size_t i = 0; i < all.size(); ++i) {
      all[i]->check(received[i], 0);
      all[i]->check(combined[i], 0);
    }
    group.barrier();
  });
}

TEST_P(Streams, LatencyOnAStream) {
  run(2, [](Rank& rank) {
    Case c = small_case(rank, stream_seed(6));
    Group group(rank.bootstrap(), group_config(rank, c.experts()));
    LatencyExchange exchange(group, {16, c.hidden, c.topk, c.dtype});
    Stream stream;
    c.mode = Mode::latency;
    c.capacity = 16;
    for (std::uint64_t i = 0; i < 20; ++i) {
      c.seed = stream_seed(300 + i);
      const World world = make_world(c);
      const RankInput& own = world.inputs[static_cast<std::size_t>(rank.rank())];
      LatencyDispatchOptions options{.stream = &stream};
      LatencyReceived received =
          exchange.dispatch({own.x.data(), c.dtype, {own.tokens, c.hidden}},
                            {own.topk_idx.data(), Dtype::i64, {own.tokens, c.topk}}, options);
      LatencyCombineOptions combine{.stream = &stream};
      // The rows are what arrived: enqueued before it did.
      const LatencyCombined combined = exchange.combine(
          received.x, received, {own.weights.data(), Dtype::f32, {own.tokens, c.topk}}, combine);
      combined.event.wait(std::chrono::seconds(10));
      const Bytes expected = expect_latency_combine(
          world, rank.rank(), [&](int d, std::int64_t e, std::int64_t place, std::byte* to) {
            const auto row =
                expect_latency(world, d)
                    .rows[static_cast<std::size_t>(e)][static_cast<std::size_t>(place)];
            const Bytes& x = world.inputs[static_cast<std::size_t>(row.source)].x;
            std::copy_n(x.data() + static_cast<std::size_t>(row.token) * world.row_bytes(),
                        world.row_bytes(), to);
          });
      same_values(rank, "combined", c.dtype, combined.x.data(), expected.data(), own.tokens,
                  c.hidden);
    }
    group.barrier();
  });
}

}  // namespace
}  // namespace ferry::conformance

// Latency mode of the host engine: what a caller may do with results.
#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <utility>

#include "core/stream_state.hpp"
#include "engine/test_groups.hpp"

namespace ferry::host::test {

using namespace engine::test;
namespace {

ConstTensorView ones(const std::vector<float>& values, std::int64_t tokens) {
  return {values.data(), Dtype::f32, {tokens, 1}};
}

TEST(HostLatency, WritingIntoTheCountsChangesNothing) {
  with_groups(2, {}, [](Group& group) {
    LatencyExchange latency(group, {4, 16, 1, Dtype::f32});
    const Batch batch(group.rank(), 4, 16, 5);
    const std::vector<float> weights(4, 1.0F);
    for (const std::int32_t nonsense : {100'000'000, 0, -1}) {
      const LatencyReceived received = latency.dispatch(batch.x(), batch.ids());
      auto* counts = received.counts.as<std::int32_t>();
      std::fill_n(counts, group.local_experts(), nonsense);
      const LatencyCombined back = latency.combine(received.x, received, ones(weights, 4));
      EXPECT_TRUE(same_rows(back.x, batch)) << "counts " << nonsense;
    }
  });
}

/// A stream that takes no work the first time.
struct FullQueue final : Stream::Queue {
  Stream behind{};
  bool full = true;
  Event submit(std::function<void()> work) override {
    if (std::exchange(full, false)) throw std::bad_alloc();
    return behind.submit(std::move(work));
  }
  Event record() override { return behind.record(); }
  void wait(const Event& event) override { behind.wait(event); }
  void synchronize() override { behind.synchronize(); }
};

TEST(HostLatency, ACombineThatCouldNotBeginMayBeRepeated) {
  with_groups(2, {}, [](Group& group) {
    LatencyExchange latency(group, {4, 16, 1, Dtype::f32});
    const Batch batch(group.rank(), 4, 16, 5);
    const std::vector<float> weights(4, 1.0F);
    const LatencyReceived received = latency.dispatch(batch.x(), batch.ids());
    Stream stream(std::make_shared<FullQueue>());
    LatencyCombineOptions options{.stream = &stream};
    EXPECT_THROW(latency.combine(received.x, received, ones(weights, 4), options), std::bad_alloc);
    const LatencyCombined back = latency.combine(received.x, received, ones(weights, 4), options);
    back.event.wait();
    EXPECT_TRUE(same_rows(back.x, batch));
    expect_error(ErrorKind::invalid_argument, {"combined already"},
                 [&] { latency.combine(received.x, received, ones(weights, 4), options); });
  });
}

void drop_unreceived(FabricKind fabric, int ranks) {
  GroupConfig config;
  config.fabric = fabric;
  with_groups(ranks, config, [](Group& group) {
    LatencyExchange latency(group, {4, 16, 1, Dtype::f32});
    const Batch batch(group.rank(), 4, 16, 5);
    const std::vector<float> weights(4, 1.0F);
    for (int round = 0; round < 20; ++round) {
      for (int i = 0; i < round % 5; ++i) latency.dispatch(batch.x(), batch.ids(), {.hook = true});
      const LatencyReceived received = latency.dispatch(batch.x(), batch.ids());
      EXPECT_TRUE(same_rows(latency.combine(received.x, received, ones(weights, 4)).x, batch));
    }
    group.barrier();
  });
}

TEST(HostLatency, ResultsMayBeDroppedUnreceived) {
  drop_unreceived(FabricKind::local, 2);
  drop_unreceived(FabricKind::local, 4);
}

TEST(HostLatency, ResultsMayBeDroppedUnreceivedOverANetwork) {
  drop_unreceived(FabricKind::sim, 3);
}

TEST(HostLatency, AResultOutlivesTheSettlingOfOneDroppedUnreceived) {
  with_groups(2, {.deadline = 5s}, [](Group& group) {
    LatencyExchange latency(group, {4, 16, 1, Dtype::f32});
    const Batch batch(group.rank(), 4, 16, 5);
    latency.dispatch(batch.x(), batch.ids(),
                     {.hook = true});  // dropped before its rows were received
    latency.dispatch(batch.x(), batch.ids());
    // This call takes the buffer of the first one, and waits for the rows that nobody received.
    const LatencyReceived kept = latency.dispatch(batch.x(), batch.ids());
    const LatencyReceived other = latency.dispatch(batch.x(), batch.ids());
    expect_error(ErrorKind::exhausted, {"still alive"},
                 [&] { latency.dispatch(batch.x(), batch.ids()); });
    const std::vector<float> weights(4, 1.0F);
    for (const LatencyReceived* one : {&kept, &other}) {
      EXPECT_TRUE(same_rows(latency.combine(one->x, *one, ones(weights, 4)).x, batch));
    }
  });
}

TEST(HostLatency, WeightsThatDoNotComeAreNamed) {
  GroupConfig config;
  config.deadline = 2s;
  std::atomic<int> gave_up{0};
  with_groups(3, config, [&](Group& group) {
    const std::shared_ptr<void> ends(nullptr, [&](void*) { ++gave_up; });
    LatencyExchange latency(group, {4, 16, 1, Dtype::f32});
    const Batch batch(group.rank(), 4, 16, 5);
    const std::vector<float> weights(4, 1.0F);
    const LatencyReceived received = latency.dispatch(batch.x(), batch.ids());
    if (group.rank() == 1) {
      while (gave_up < 2) std::this_thread::sleep_for(1ms);
      return;
    }
    try {
      latency.combine(received.x, received, ones(weights, 4), {.path = CombinePath::per_rank});
      ADD_FAILURE() << "rank 1 gave no weights";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("latency combine: weights"), std::string::npos)
          << error.what();
      EXPECT_NE(std::string(error.what()).find("rank 1"), std::string::npos) << error.what();
    }
  });
}

TEST(HostLatency, ARankMajorResultMayBeTheRowsOfItsCombine) {
  with_groups(2, {}, [](Group& group) {
    LatencyExchange latency(group, {4, 16, 1, Dtype::f32});
    const Batch batch(group.rank(), 4, 16, 5);
    LatencyDispatchOptions options{.order = RowOrder::rank_major};
    // More results than buffers: what lies where peers write next is not written too early.
    for (int round = 0; round < 20; ++round) {
      options.hook = round % 2 == 1;
      LatencyReceived received = latency.dispatch(batch.x(), batch.ids(), options);
      if (options.hook) received.receive();
      EXPECT_TRUE(same_rows(latency.combine(received.x, received).x, batch)) << "round " << round;
    }
  });
}

TEST(HostLatency, StridesOfExtentsBelowTwoSayNothing) {
  with_groups(1, {}, [](Group& group) {
    const std::vector<float> row(16, 3.0F);
    const std::int64_t route = 0;
    const ConstTensorView x(row.data(), Dtype::f32, {1, 16}, {999, 1}, {});
    const Plan plan = group.plan({&route, Dtype::i64, {1, 1}});
    EXPECT_EQ(group.dispatch(x, plan).x.as<float>()[15], 3.0F);
  });
}

TEST(HostCombine, OutMayBeTheBiasButNotOverlapIt) {
  with_groups(1, {}, [](Group& group) {
    const Batch batch(0, 4, 16, 0);
    std::vector<float> memory(6 * 16, 1.0F);
    const Plan plan = group.plan(batch.ids());
    const Received received = group.dispatch(batch.x(), plan);
    CombineOptions options{.bias0 = ConstTensorView(memory.data(), Dtype::f32, {4, 16}),
                           .out = TensorView(memory.data() + 16, Dtype::f32, {4, 16})};
    expect_error(ErrorKind::invalid_argument, {"out", "bias0"},
                 [&] { group.combine(received.x, plan, options); });
    options.out = TensorView(memory.data(), Dtype::f32, {4, 16});
    group.combine(received.x, plan, options);
    EXPECT_EQ(memory[16], 2.0F);  // token 1 plus a bias of 1
  });
}

}  // namespace
}  // namespace ferry::host::test

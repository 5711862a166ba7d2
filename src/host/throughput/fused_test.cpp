// A dispatch that makes its plan: what is refused before the plan, and after it.
#include <atomic>
#include <cmath>
#include <future>
#include <stdexcept>

#include "engine/test_groups.hpp"

namespace ferry::host::test {

using namespace engine::test;
namespace {

GroupConfig small_config() {
  GroupConfig config;
  config.memory_bytes = 4096;
  config.deadline = 20s;
  return config;
}

/// A good call of all ranks.
void exchange(Group& group, const Batch& batch) {
  const Received got = group.dispatch(batch.x(), batch.ids());
  EXPECT_TRUE(same_rows(group.combine(got.x, got.plan).x, batch)) << "rank " << group.rank();
}

TEST(HostFused, ABadArgumentOfOneRankIsRefusedBeforeThePlan) {
  const std::vector<std::pair<std::string, std::function<void(DispatchOptions&)>>> changes{
      {"alignment", [](DispatchOptions& o) { o.alignment = 3; }},
      {"order", [](DispatchOptions& o) { o.order = static_cast<RowOrder>(5); }},
      {"max_recv_rows", [](DispatchOptions& o) { o.max_recv_rows = -1; }},
      {"scale_format", [](DispatchOptions& o) { o.scale_format = ScaleFormat::f32_pow2; }},
      {"topk_weights",
       [](DispatchOptions& o) { o.topk_weights = ConstTensorView(nullptr, Dtype::f32, {3, 1}); }},
      {"out",
       [](DispatchOptions& o) {
         static float row[16];
         o.out = TensorView(row, Dtype::f32, {1, 16});
         o.max_recv_rows = 24;
       }},
  };
  const auto start = Clock::now();
  with_groups(3, small_config(), [&](Group& group) {
    const Batch batch(group.rank(), 5, 16, 7), other(group.rank(), 4, 16, 7);
    for (const auto& [argument, change] : changes) {
      DispatchOptions options;
      change(options);
      if (group.rank() == 1) {
        expect_error(ErrorKind::invalid_argument, {"dispatch", argument},
                     [&] { group.dispatch(batch.x(), batch.ids(), options); });
      }
      exchange(group, batch);
    }
    if (group.rank() == 1) {
      expect_error(ErrorKind::invalid_argument, {"x", "4 rows"},
                   [&] { group.dispatch(other.x(), batch.ids()); });
    }
    exchange(group, batch);
  });
  EXPECT_LT(Clock::now() - start, 10s);
}

TEST(HostFused, AnOutThatIsTooSmallIsRefusedOnAllRanks) {
  const auto start = Clock::now();
  with_groups(3, small_config(), [](Group& group) {
    const Batch batch(group.rank(), 5, 16, 7);  // 15 rows to rank 2
    std::vector<float> out(5 * 16);
    Stream stream;
    for (const RowOrder order : {RowOrder::rank_major, RowOrder::expert_major}) {
      for (Stream* on : {static_cast<Stream*>(nullptr), &stream}) {
        DispatchOptions options{.order = order, .stream = on};
        if (group.rank() == 2) options.out = TensorView(out.data(), Dtype::f32, {5, 16});
        const bool own = group.rank() == 2;
        expect_error(own ? ErrorKind::invalid_argument : ErrorKind::exhausted,
                     {"out", own ? "got 5 rows" : "rank 2", "15"},
                     [&] { group.dispatch(batch.x(), batch.ids(), options).event.wait(20s); });
        exchange(group, batch);
      }
    }
  });
  EXPECT_LT(Clock::now() - start, 10s);
}

/// Rank 0 waits for the counts, which a stream brings, when it is told to stop (Ctrl-C).
TEST(HostFused, ARankThatStopsBetweenPlanAndDispatchIsNotWaitedFor) {
  static thread_local bool stop = false;
  GroupConfig config = small_config();
  config.on_wait = [] {
    if (stop) throw std::runtime_error("stop");
  };
  std::promise<void> all_saw;
  const auto seen = all_saw.get_future().share();
  std::atomic<int> left{3};
  with_groups(3, config, [&](Group& group) {
    const Batch batch(group.rank(), 5, 16, 7);
    Stream stream;
    std::promise<void> open;
    DispatchOptions options{.stream = &stream};
    if (group.rank() == 0) {
      stream.submit([opened = open.get_future().share()] { opened.wait(); });
    }
    stop = group.rank() == 0;
    const auto start = Clock::now();
    EXPECT_THROW(group.dispatch(batch.x(), batch.ids(), options).event.wait(60s), std::exception);
    stop = false;
    open.set_value();
    EXPECT_LT(Clock::now() - start, 10s) << "rank " << group.rank();
    if (--left == 0) all_saw.set_value();
    seen.wait();  // so nobody has left
  });
}

/// Every rank's own choice: the scales of a row say what its source did.
TEST(HostFused, RanksMayRoundTheirScalesDifferently) {
  with_groups(3, small_config(), [](Group& group) {
    const Batch batch(group.rank(), 5, 128, 0);  // all to rank 0
    DispatchOptions options{.format = WireFormat::e4m3};
    if (group.rank() == 1) options.scale_format = ScaleFormat::f32_pow2;
    const Received got = group.dispatch(batch.x(), batch.ids(), options);
    group.barrier();
    if (group.rank() != 0) return;
    ASSERT_EQ(got.scales.rows(), 15);
    for (int row = 5; row < 15; ++row) {
      const float scale = got.scales.as<float>()[row];
      int exponent = 0;
      EXPECT_EQ(std::frexp(scale, &exponent) == 0.5f, row < 10) << scale;
    }
  });
}

}  // namespace
}  // namespace ferry::host::test

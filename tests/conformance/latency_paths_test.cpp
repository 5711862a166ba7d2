// Orders, paths and weights of latency mode: what a rank may choose alone, and what not.
#include <functional>
#include <vector>

#include "ferry/ferry.hpp"
#include "fleet_test.hpp"

namespace ferry::conformance {
namespace {

class LatencyPaths : public OnFabric {};
FERRY_ON_EVERY_FABRIC(LatencyPaths);

/// A small exchange over f32: a token's value is its rank's number, plus 1.
struct Tiny {
  Tiny(Rank& r, int topk_, std::int64_t capacity_)
      : rank(r),
        topk(topk_),
        capacity(capacity_),
        group(r.bootstrap(), group_config(r, 2 * r.size())),
        exchange(group, {capacity_, 32, topk_, Dtype::f32}),
        x(static_cast<std::size_t>((capacity_ + 1) * 32), static_cast<float>(r.rank() + 1)),
        weights(static_cast<std::size_t>((capacity_ + 1) * topk_), 0.5f) {}

  LatencyReceived dispatch(const std::vector<std::int64_t>& ids,
                           const LatencyDispatchOptions& options = {}) {
    tokens = static_cast<std::int64_t>(ids.size()) / topk;
    return exchange.dispatch({x.data(), Dtype::f32, {tokens, 32}},
                             {ids.data(), Dtype::i64, {tokens, topk}}, options);
  }
  ConstTensorView own_weights() const { return {weights.data(), Dtype::f32, {tokens, topk}}; }

  Rank& rank;
  int topk;
  std::int64_t capacity;
  std::int64_t tokens = 0;
  Group group;
  LatencyExchange exchange;
  std::vector<float> x;
  std::vector<float> weights;
};

TEST_P(LatencyPaths, RankMajorCapacityFilledAndOneOver) {
  run(3, [](Rank& rank) {
    Tiny tiny(rank, 2, 5);
    LatencyDispatchOptions options{.order = RowOrder::rank_major};
    // Both slots of all tokens name one expert of rank 0: a token takes one row there.
    std::vector<std::int64_t> ids;
    for (int t = 0; t < 5; ++t) ids.insert(ids.end(), {1, -1});
    {
      tiny.tokens = 5;
      options.topk_weights = tiny.own_weights();
      const LatencyReceived received = tiny.dispatch(ids, options);
      for (int source = 0; source < rank.size(); ++source) {
        rank.equal(received.counts.as<std::int32_t>()[source], rank.rank() == 0 ? 5 : 0, "rows");
      }
      if (rank.rank() == 0) {
        rank.equal(received.x.as<float>()[(2 * 5 + 4) * 32], 3.0f, "the last row of rank 2");
        rank.equal(received.topk_idx.as<std::int32_t>()[28], 1, "its first slot");
        rank.equal(received.topk_idx.as<std::int32_t>()[29], -1, "its second slot");
        rank.equal(received.topk_weights.as<float>()[28], 0.5f, "its weight");
      }
      const LatencyCombined sum = tiny.exchange.combine(received.x, received);
      for (std::size_t i = 0; i < 5 * 32; ++i) {
        if (!rank.equal(sum.x.as<float>()[i], tiny.x[i], "the sum of one row")) break;
      }
    }
    ids.insert(ids.end(), {1, -1});
    tiny.tokens = 6;
    options.topk_weights = tiny.own_weights();
    expect_text(rank,
                expect_error(rank, ErrorKind::invalid_argument, "one token too many",
                             [&] { (void)tiny.dispatch(ids, options); }),
                "capacity");
    options.topk_weights.reset();
    (void)tiny.dispatch({0, 2}, options);
    tiny.group.barrier();
  });
}

TEST_P(LatencyPaths, RanksMayTakeTheirResultsInDifferentOrders) {
  run(3, [](Rank& rank) {
    Tiny tiny(rank, 2, 4);
    const std::vector<std::int64_t> ids{0, 3, 5, -1, 2, 2};
    LatencyDispatchOptions options;
    tiny.tokens = 3;
    options.topk_weights = tiny.own_weights();
    options.order = rank.rank() == 1 ? RowOrder::rank_major : RowOrder::expert_major;
    const LatencyReceived received = tiny.dispatch(ids, options);
    if (rank.rank() == 1) {  // the sums of its own
      const auto* weights = received.topk_weights.as<float>();
      for (std::int64_t row = 0; row < 3 * 4; ++row) {
        for (std::int64_t i = 0; i < 32; ++i) {
          received.x.as<float>()[row * 32 + i] *= weights[2 * row] + weights[2 * row + 1];
        }
      }
    }
    const LatencyCombined sum =
        tiny.exchange.combine(received.x, received, {.path = CombinePath::per_rank});
    const float x = tiny.x[0];
    for (std::size_t i = 0; i < 3 * 32; ++i) {
      if (!rank.equal(sum.x.as<float>()[i], i / 32 == 1 ? x / 2 : x, "a sum")) break;
    }
    tiny.group.barrier();
  });
}

TEST_P(LatencyPaths, WeightsAreGivenOnce) {
  run(2, [](Rank& rank) {
    Tiny tiny(rank, 2, 4);
    const std::vector<std::int64_t> ids{0, 3, 2, -1};
    const ErrorKind invalid = ErrorKind::invalid_argument;
    tiny.tokens = 2;
    LatencyDispatchOptions ahead{.topk_weights = tiny.own_weights()};
    for (const CombinePath path : {CombinePath::per_slot, CombinePath::per_rank}) {
      LatencyCombineOptions options{.path = path};
      const LatencyReceived with = tiny.dispatch(ids, ahead);
      expect_text(
          rank,
          expect_error(
              rank, invalid, "weights twice",
              [&] { (void)tiny.exchange.combine(with.x, with, tiny.own_weights(), options); }),
          "with the dispatch");
      // Half and half of one token, and half of another.
      const LatencyCombined sum = tiny.exchange.combine(with.x, with, options);
      rank.equal(sum.x.as<float>()[31], tiny.x[0], "two slots");
      rank.equal(sum.x.as<float>()[32], tiny.x[0] / 2, "one slot");
    }
    const LatencyReceived without = tiny.dispatch(ids);
    expect_text(rank,
                expect_error(rank, invalid, "no weights",
                             [&] { (void)tiny.exchange.combine(without.x, without); }),
                "brought none");
    LatencyDispatchOptions by_rank{.order = RowOrder::rank_major};
    const LatencyReceived rows = tiny.dispatch(ids, by_rank);
    expect_text(
        rank,
        expect_error(rank, invalid, "weights for sums",
                     [&] { (void)tiny.exchange.combine(rows.x, rows, tiny.own_weights()); }),
        "weighted sum");
    expect_error(rank, invalid, "rows of another order",
                 [&] { (void)tiny.exchange.combine(without.x, rows); });
    LatencyDispatchOptions wrong;
    wrong.topk_weights = ConstTensorView(tiny.weights.data(), Dtype::f32, {1, 2});
    expect_text(rank,
                expect_error(rank, invalid, "weights of another shape",
                             [&] { (void)tiny.dispatch(ids, wrong); }),
                "topk_weights");
    tiny.group.barrier();
  });
}

TEST(LatencyDisagreement, RoomToFanOutIsAgreedOn) {
  const auto failures = run_fleet({FabricKind::local, 2}, [](Rank& rank) {
    Group group(rank.bootstrap(), group_config(rank, 4));
    LatencyConfig config{4, 32, 2, Dtype::f32};
    if (rank.rank() == 1) config.order = RowOrder::rank_major;
    expect_text(rank,
                expect_error(rank, ErrorKind::mismatch, "exchanges of different orders",
                             [&] { LatencyExchange(group, config); }),
                "order");
  });
  EXPECT_TRUE(failures.empty()) << joined(failures);
}

/// Ranks that do different things hear it, each from the other, long before a deadline.
void expect_disagreement(const std::function<void(Tiny&)>& body, const char* what) {
  const auto failures = run_fleet({FabricKind::local, 2}, [&](Rank& rank) {
    Tiny tiny(rank, 2, 4);
    try {
      body(tiny);
      rank.fail("different calls were accepted");
    } catch (const Error& error) {
      rank.check(error.kind() == ErrorKind::mismatch || error.kind() == ErrorKind::peer_failed,
                 error.what());
      expect_text(rank, error.what(), what);
    }
  });
  EXPECT_TRUE(failures.empty()) << joined(failures);
}

TEST(LatencyDisagreement, IsNamed) {
  const std::vector<std::int64_t> ids{0, 3, 2, 1};
  const auto combine = [&](Tiny& tiny, const LatencyCombineOptions& options) {
    const LatencyReceived received = tiny.dispatch(ids);
    (void)tiny.exchange.combine(received.x, received, tiny.own_weights(), options);
  };
  expect_disagreement(
      [&](Tiny& tiny) {
        LatencyDispatchOptions options;
        tiny.tokens = 2;
        if (tiny.rank.rank() == 0) options.topk_weights = tiny.own_weights();
        (void)tiny.dispatch(ids, options);
      },
      "topk_weights");
  expect_disagreement(
      [&](Tiny& tiny) {
        combine(tiny,
                {.path = tiny.rank.rank() == 0 ? CombinePath::per_slot : CombinePath::per_rank});
      },
      "path");
  expect_disagreement(
      [&](Tiny& tiny) {
        combine(tiny,
                {.format = tiny.rank.rank() == 0 ? CombineFormat::e4m3 : CombineFormat::logfmt10});
      },
      "format");
  expect_disagreement(
      [&](Tiny& tiny) {
        // Rank 1 needs weights of rank 0, which has rows of its own making.
        LatencyDispatchOptions options;
        if (tiny.rank.rank() == 0) options.order = RowOrder::rank_major;
        const LatencyReceived received = tiny.dispatch(ids, options);
        if (tiny.rank.rank() == 0) {
          (void)tiny.exchange.combine(received.x, received);
        } else {
          (void)tiny.exchange.combine(received.x, received, tiny.own_weights(),
                                      {.path = CombinePath::per_rank});
        }
      },
      "weights");
}

}  // namespace
}  // namespace ferry::conformance

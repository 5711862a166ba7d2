// Calls that cannot succeed: what they say, and that the group goes on afterwards.
#include <atomic>
#include <chrono>
#include <thread>

#include "compare.hpp"
#include "exchange.hpp"
#include "fleet_test.hpp"

namespace ferry::conformance {
namespace {

class Refusals : public OnFabric {};
FERRY_ON_EVERY_FABRIC_AND_DOMAINS(Refusals);

std::uint64_t refusal_seed(std::uint64_t which) {
  return mix(base_seed(), 101, which) >> 1;
}

TEST_P(Refusals, DifferentConfigurations) {
  struct Difference {
    const char* field;
    void (*change)(GroupConfig&);
  };
  static constexpr Difference kDifferences[] = {
      {"experts", [](GroupConfig& c) { c.experts = 9; }},
      {"deadline", [](GroupConfig& c) { c.deadline = std::chrono::seconds(7); }},
      {"memory_bytes", [](GroupConfig& c) { c.memory_bytes += 4096; }},
      {"sim_seed", [](GroupConfig& c) { c.sim_seed = 99; }},
  };
  run(3, [](Rank& rank) {
    for (const Difference& difference : kDifferences) {
      GroupConfig config = group_config(rank, 8);
      if (rank.rank() == 2) difference.change(config);
      const std::string text = expect_error(rank, ErrorKind::mismatch, difference.field,
                                            [&] { Group group(rank.bootstrap(), config); });
      expect_text(rank, text, difference.field);
      expect_text(rank, text, "rank 2");
    }
    // The bootstrap still serves.
    Group group(rank.bootstrap(), group_config(rank, small_case(rank, 1).experts()));
    Exchange(rank, group, small_case(rank, refusal_seed(1))).run();
    group.barrier();
  });
}

/// Rank 1 makes another call than the others; afterwards everything works.
void different_calls(Rank& rank, const char* field,
                     const std::function<void(Group&, Exchange&, bool)>& call) {
  rank.begin(field);
  const Case c = small_case(rank, refusal_seed(2));
  Group group(rank.bootstrap(), group_config(rank, c.experts()));
  Exchange exchange(rank, group, c);
  const Received before = exchange.dispatch_and_check(0);
  const std::string text = expect_error(rank, ErrorKind::mismatch, field,
                                        [&] { call(group, exchange, rank.rank() == 1); });
  expect_text(rank, text, field);
  expect_text(rank, text, rank.rank() == 1 ? "rank 0" : "rank 1");
  exchange.check(before, 0);
  exchange.run(1);
  Exchange(rank, group, small_case(rank, refusal_seed(3))).run();  // a new plan
  group.barrier();
}

TEST_P(Refusals, DifferentCalls) {
  run(3, [](Rank& rank) {
    const std::vector<std::int64_t> routes(4 * 5, 0);
    const Bytes zeros(1 << 16);
    const auto tokens = [&](Exchange& e) {
      return e.world(0).inputs[static_cast<std::size_t>(rank.rank())].tokens;
    };
    different_calls(rank, "topk", [&](Group& g, Exchange&, bool odd) {
      (void)g.plan({routes.data(), Dtype::i64, {4, odd ? 5 : 3}});
    });
    different_calls(rank, "dtype", [&](Group& g, Exchange& e, bool odd) {
      const Dtype dtype = odd ? Dtype::f16 : Dtype::bf16;
      (void)g.dispatch({zeros.data(), dtype, {tokens(e), 64}}, e.plan());
    });
    different_calls(rank, "hidden", [&](Group& g, Exchange& e, bool odd) {
      (void)g.dispatch({zeros.data(), Dtype::bf16, {tokens(e), odd ? 72 : 64}}, e.plan());
    });
    different_calls(rank, "dtype", [&](Group& g, Exchange& e, bool odd) {
      DispatchOptions options{.format = odd ? WireFormat::e4m3 : WireFormat::as_is};
      (void)g.dispatch({zeros.data(), Dtype::bf16, {tokens(e), 64}}, e.plan(), options);
    });
    different_calls(rank, "order", [&](Group& g, Exchange& e, bool odd) {
      DispatchOptions options{.order = odd ? RowOrder::expert_major : RowOrder::rank_major};
      (void)g.dispatch({zeros.data(), Dtype::bf16, {tokens(e), 64}}, e.plan(), options);
    });
    different_calls(rank, "scales", [&](Group& g, Exchange& e, bool odd) {
      DispatchOptions options;
      options.scales = ConstTensorView(zeros.data(), Dtype::f32, {tokens(e), odd ? 2 : 1});
      (void)g.dispatch({zeros.data(), Dtype::e4m3, {tokens(e), 64}}, e.plan(), options);
    });
    different_calls(rank, "topk_weights", [&](Group& g, Exchange& e, bool odd) {
      DispatchOptions options;
      if (odd) options.topk_weights = ConstTensorView(zeros.data(), Dtype::f32, {tokens(e), 3});
      (void)g.dispatch({zeros.data(), Dtype::bf16, {tokens(e), 64}}, e.plan(), options);
    });
    different_calls(rank, "dtype", [&](Group& g, Exchange& e, bool odd) {
      const Dtype dtype = odd ? Dtype::f16 : Dtype::bf16;
      (void)g.combine({zeros.data(), dtype, {e.expected_rows(), 64}}, e.plan());
    });
    different_calls(rank, "the call", [&](Group& g, Exchange& e, bool odd) {
      if (odd) {
        (void)g.plan({routes.data(), Dtype::i64, {4, 3}});
      } else {
        (void)g.dispatch({zeros.data(), Dtype::bf16, {tokens(e), 64}}, e.plan());
      }
    });
    different_calls(rank, "the call", [&](Group& g, Exchange& e, bool odd) {
      if (odd) {
        g.barrier();
      } else {
        (void)g.combine({zeros.data(), Dtype::bf16, {e.expected_rows(), 64}}, e.plan());
      }
    });
    different_calls(rank, "capacity", [&](Group& g, Exchange&, bool odd) {
      LatencyExchange exchange(g, {odd ? 4 : 8, 64, 2, Dtype::bf16});
    });
  });
}

TEST_P(Refusals, DifferentPlans) {
  run(2, [](Rank& rank) {
    different_calls(rank, "plan", [&](Group& g, Exchange& e, bool odd) {
      // Two plans on every rank, used in another order on rank 1.
      const Exchange a(rank, g, small_case(rank, refusal_seed(4))),
          b(rank, g, small_case(rank, refusal_seed(5)));
      (void)e;
      const Bytes zeros(1 << 16);
      (void)g.dispatch({zeros.data(), Dtype::bf16, {9, 64}}, (odd ? a : b).plan());
    });
  });
}

TEST_P(Refusals, WorstCaseTooSmall) {
  run(3, [](Rank& rank) {
    Case c = small_case(rank, refusal_seed(6));
    Group group(rank.bootstrap(), group_config(rank, c.experts()));
    for (const RowOrder order : {RowOrder::rank_major, RowOrder::expert_major}) {
      c.order = order;
      c.seed += 2;
      Exchange exchange(rank, group, c);
      // Rank 1 alone has too little room; everybody hears of it.
      const std::int64_t rows = rank.rank() == 1 ? exchange.expected_rows() - 1 : 500;
      const std::string text = expect_error(rank, ErrorKind::exhausted, "max_recv_rows",
                                            [&] { (void)exchange.dispatch(0, rows); });
      expect_text(rank, text, "rank 1");
      expect_text(rank, text, "max_recv_rows");
      const Received exact = exchange.dispatch(1, rank.rank() == 1 ? rows + 1 : 0);
      exchange.check(exact, 1);
      exchange.run(0);
    }
    rank.check(group.memory().arena_used_bytes == 0, "a refused dispatch kept memory");
    group.barrier();
  });
}

TEST_P(Refusals, WorstCaseTooSmallOnAStream) {
  run(3, [](Rank& rank) {
    Case c = small_case(rank, refusal_seed(7));
    Group group(rank.bootstrap(), group_config(rank, c.experts()));
    Stream stream;
    std::atomic<bool> go{false};
    stream.submit([&] {
      while (!go) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
    Exchange exchange(rank, group, c, &stream);
    // Both are enqueued before the first is refused: the second then brings the routes.
    const Received refused = exchange.dispatch(0, 1);
    const Received good = exchange.dispatch(1, 300);
    const Tensor neighbour = group.empty({1 << 16}, Dtype::u8);  // what lies behind its memory
    poison(neighbour);
    const Combined combined = exchange.combine(1);
    go = true;
    expect_error(rank, ErrorKind::exhausted, "max_recv_rows", [&] { refused.event.wait(); });
    exchange.check(good, 1);
    exchange.check(combined, 1);
    rank.check(is_poison(neighbour.data(), neighbour.view().bytes()),
               "a dispatch wrote past its memory");
    exchange.check(exchange.dispatch(2, 0), 2);
    group.barrier();
  });
}

TEST_P(Refusals, OutputTooSmall) {
  // Refused before anything moves, on every rank alike.
  run(2, [](Rank& rank) {
    const Case c = small_case(rank, refusal_seed(8));
    Group group(rank.bootstrap(), group_config(rank, c.experts()));
    Exchange exchange(rank, group, c);
    Bytes x(1 << 16);
    DispatchOptions options;
    options.out = TensorView(x.data(), c.dtype, {exchange.expected_rows() - 1, c.hidden});
    const std::string text = expect_error(rank, ErrorKind::invalid_argument, "out", [&] {
      (void)group.dispatch({x.data(), c.dtype, {c.tokens, c.hidden}}, exchange.plan(), options);
    });
    expect_text(rank, text, "out");
    exchange.run(0);
    const std::string rows = expect_error(rank, ErrorKind::invalid_argument, "combine rows", [&] {
      (void)group.combine({x.data(), c.dtype, {exchange.expected_rows() - 1, c.hidden}},
                          exchange.plan());
    });
    expect_text(rank, rows, "rows");
    exchange.run(1);
    group.barrier();
  });
}

}  // namespace
}  // namespace ferry::conformance

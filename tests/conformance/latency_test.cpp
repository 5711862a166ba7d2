// The rules of latency mode: two buffers, their order, and what is refused.
#include <chrono>
#include <optional>
#include <thread>

#include "compare.hpp"
#include "exchange.hpp"
#include "fleet_test.hpp"

namespace ferry::conformance {
namespace {

class Latency : public OnFabric {};
FERRY_ON_EVERY_FABRIC_AND_DOMAINS(Latency);

constexpr std::int64_t kLatencyHidden = 32;
constexpr int kTopk = 2;
constexpr std::int64_t kCapacity = 6;

/// A latency exchange over f32, with tokens whose value says who they are.
struct Small {
  explicit Small(Rank& r, std::int64_t experts)
      : rank(r),
        group(r.bootstrap(), group_config(r, experts)),
        exchange(group, {kCapacity, kLatencyHidden, kTopk, Dtype::f32}) {}

  LatencyReceived dispatch(std::int64_t tokens, const std::vector<std::int64_t>& ids,
                           bool hook = false) {
    x.assign(static_cast<std::size_t>(tokens * kLatencyHidden), 0.0f);
    for (std::size_t i = 0; i < x.size(); ++i) {
      x[i] = static_cast<float>(rank.rank() * 1000 + static_cast<int>(i) / kLatencyHidden);
    }
    routes = ids;
    LatencyDispatchOptions options{.hook = hook};
    return exchange.dispatch({x.data(), Dtype::f32, {tokens, kLatencyHidden}},
                             {routes.data(), Dtype::i64, {tokens, kTopk}}, options);
  }
  LatencyCombined combine(const LatencyReceived& received, bool hook = false) {
    const auto tokens = static_cast<std::int64_t>(routes.size()) / kTopk;
    weights.assign(routes.size(), 0.5f);
    LatencyCombineOptions options{.hook = hook};
    return exchange.combine(received.x, received, {weights.data(), Dtype::f32, {tokens, kTopk}},
                            options);
  }
  std::vector<std::int64_t> some_routes(std::int64_t tokens, std::uint64_t seed) const {
    Random random(mix(base_seed(), seed, static_cast<std::uint64_t>(rank.rank())));
    std::vector<std::int64_t> ids(static_cast<std::size_t>(tokens * kTopk));
    for (std::size_t i = 0; i < ids.size(); i += kTopk) {
      ids[i] = random.below(group.experts());
      ids[i + 1] = (ids[i] + 1) % group.experts();
    }
    return ids;
  }
  void round_trip(std::uint64_t seed) {
    const LatencyReceived received = dispatch(4, some_routes(4, seed));
    check(combine(received));
  }
  /// Both slots are used, each with weight ½: the sum is the token itself.
  void check(const LatencyCombined& combined) {
    same_values(rank, "combined", Dtype::f32, combined.x.data(), x.data(), combined.x.rows(),
                kLatencyHidden);
  }

  Rank& rank;
  Group group;
  LatencyExchange exchange;
  std::vector<float> x{};
  std::vector<std::int64_t> routes{};
  std::vector<float> weights{};
};

TEST_P(Latency, AThirdResultIsRefused) {
  run(3, [](Rank& rank) {
    Small small(rank, 7);
    std::optional<LatencyReceived> first = small.dispatch(3, small.some_routes(3, 1));
    std::optional<LatencyReceived> second = small.dispatch(3, small.some_routes(3, 2));
    const std::string text = expect_error(rank, ErrorKind::exhausted, "a third dispatch", [&] {
      (void)small.dispatch(3, small.some_routes(3, 3));
    });
    expect_text(rank, text, "drop");
    // A copy of a tensor keeps the buffer.
    std::optional<Tensor> copy = first->x;
    first.reset();
    expect_error(rank, ErrorKind::exhausted, "a third dispatch beside a copy",
                 [&] { (void)small.dispatch(3, small.some_routes(3, 3)); });
    copy.reset();
    for (std::uint64_t i = 0; i < 6; ++i) {
      first = small.dispatch(3, small.some_routes(3, 10 + i));
      std::swap(first, second);
      first.reset();
    }
    second.reset();
    small.round_trip(4);
    small.group.barrier();
  });
}

TEST_P(Latency, ResultsDroppedInAnyOrder) {
  run(3, [](Rank& rank) {
    Small small(rank, 6);
    Random order(mix(base_seed(), 5, static_cast<std::uint64_t>(rank.rank())));  // each its own
    for (std::uint64_t i = 0; i < 40; ++i) {
      std::optional<LatencyReceived> first = small.dispatch(4, small.some_routes(4, 20 + i));
      std::optional<LatencyReceived> second = small.dispatch(2, small.some_routes(2, 60 + i));
      small.check(small.combine(*second));
      (order.one_in(2) ? first : second).reset();
    }
    small.round_trip(6);
    small.group.barrier();
  });
}

TEST_P(Latency, RowsWaitForASlowReceiver) {
  // Rank 1 has not received two generations when the others already send the third: they must wait
  // for its credit, not write over what it has not read.
  run(3, [](Rank& rank) {
    Small small(rank, 6);
    const auto every = [&](std::uint64_t g) {  // all tokens of generation g to all of six experts
      Random random(mix(base_seed(), 13, g));
      std::vector<std::int64_t> ids;
      for (std::int64_t t = 0; t < kCapacity; ++t) {
        const std::int64_t first = random.below(6);
        ids.insert(ids.end(), {first, (first + 1 + random.below(5)) % 6});
      }
      return ids;
    };
    const auto check = [&](const LatencyReceived& received, std::uint64_t g) {
      // Everybody has the same routes, so what arrives follows from this rank's own.
      const std::vector<std::int64_t> ids = every(g);
      for (std::int64_t e = 0; e < 2; ++e) {
        std::size_t place = 0;
        for (int source = 0; source < rank.size(); ++source) {
          for (std::size_t i = 0; i < ids.size(); ++i) {
            if (ids[i] != rank.rank() * 2 + e) continue;
            const auto row = static_cast<std::size_t>(e * rank.size() * kCapacity) + place++;
            rank.equal(received.x.as<float>()[row * kLatencyHidden],
                       static_cast<float>(source * 1000 + static_cast<int>(i) / kTopk),
                       "a row that waited");
          }
        }
        rank.equal(received.counts.as<std::int32_t>()[e], static_cast<std::int32_t>(place),
                   "rows that waited");
      }
    };
    for (std::uint64_t g = 0; g < 6; g += 2) {
      std::optional<LatencyReceived> one = small.dispatch(kCapacity, every(g), true);
      std::optional<LatencyReceived> two;
      if (rank.rank() == 1) {
        two = small.dispatch(kCapacity, every(g + 1), true);
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
        one->receive();
        check(*one, g);
      } else {
        one->receive();
        check(*one, g);
        one.reset();
        two = small.dispatch(kCapacity, every(g + 1), true);
      }
      two->receive();
      check(*two, g + 1);
    }
    small.group.barrier();
  });
}

TEST_P(Latency, ResultsDroppedUnreceived) {
  run(3, [](Rank& rank) {
    Small small(rank, 6);
    Random random(mix(base_seed(), 14, static_cast<std::uint64_t>(rank.rank())));  // each its own
    for (std::uint64_t i = 0; i < 30; ++i) {
      // Some ranks never look at what they are sent; the next exchange is whole again.
      std::optional<LatencyReceived> unread =
          small.dispatch(4, small.some_routes(4, 300 + i), true);
      if (random.one_in(2)) unread->receive();
      unread.reset();
      small.round_trip(400 + i);
      LatencyReceived received = small.dispatch(4, small.some_routes(4, 500 + i));
      LatencyCombined combined = small.combine(received, true);
      if (random.one_in(2)) {
        combined.receive();
        small.check(combined);
      }
    }
    small.round_trip(9);
    small.group.barrier();
  });
}

TEST_P(Latency, CapacityFilledAndOneOver) {
  run(3, [](Rank& rank) {
    Small small(rank, 4);
    // Every rank sends all that fits to expert 0 and as much to the last.
    std::vector<std::int64_t> ids;
    for (std::int64_t t = 0; t < kCapacity; ++t) ids.insert(ids.end(), {0, 3});
    {
      const LatencyReceived received = small.dispatch(kCapacity, ids);
      if (rank.rank() == 0) {
        rank.equal(received.counts.as<std::int32_t>()[0],
                   static_cast<std::int32_t>(kCapacity * rank.size()), "rows of expert 0");
        const float* last = received.x.as<float>() + (kCapacity * rank.size() - 1) * kLatencyHidden;
        rank.equal(*last, static_cast<float>(2000 + kCapacity - 1), "the last row of expert 0");
      }
      small.check(small.combine(received));
    }
    const auto over = small.some_routes(kCapacity + 1, 7);
    expect_text(rank,
                expect_error(rank, ErrorKind::invalid_argument, "one token too many",
                             [&] { (void)small.dispatch(kCapacity + 1, over); }),
                "capacity");
    // Duplicates: one expert named more often than its block has places for a rank.
    std::vector<std::int64_t> twice(static_cast<std::size_t>(kCapacity * kTopk), 1);
    expect_text(rank,
                expect_error(rank, ErrorKind::invalid_argument, "one expert too often",
                             [&] { (void)small.dispatch(kCapacity, twice); }),
                "expert 1");
    small.round_trip(8);
    small.group.barrier();
  });
}

TEST_P(Latency, CallsInTheWrongOrderAreRefused) {
  run(2, [](Rank& rank) {
    Small small(rank, 5);
    LatencyReceived hooked = small.dispatch(4, small.some_routes(4, 9), true);
    const ErrorKind invalid = ErrorKind::invalid_argument;
    expect_error(rank, invalid, "combine before receive", [&] { (void)small.combine(hooked); });
    hooked.receive();
    expect_error(rank, invalid, "receive twice", [&] { hooked.receive(); });
    LatencyCombined combined = small.combine(hooked, true);
    expect_error(rank, invalid, "combine twice", [&] { (void)small.combine(hooked); });
    combined.receive();
    expect_error(rank, invalid, "receive a sum twice", [&] { combined.receive(); });
    small.check(combined);
    LatencyReceived plain = small.dispatch(4, small.some_routes(4, 10));
    expect_error(rank, invalid, "receive without a hook", [&] { plain.receive(); });
    LatencyExchange other(small.group, {kCapacity, kLatencyHidden, kTopk, Dtype::f32});
    expect_error(rank, invalid, "a result of another exchange", [&] {
      (void)other.combine(plain.x, plain, {small.weights.data(), Dtype::f32, {4, kTopk}});
    });
    expect_error(rank, invalid, "an empty result", [&] { (void)small.combine({}); });
    expect_error(rank, invalid, "receive of an empty result", [&] { LatencyReceived{}.receive(); });
    small.check(small.combine(plain));
    small.group.barrier();
  });
}

TEST_P(Latency, TwoExchangesOfOneGroup) {
  run(3, [](Rank& rank) {
    Small small(rank, 7);
    LatencyExchange other(small.group, {3, 64, 1, Dtype::f32});
    const std::vector<float> x(3 * 64, static_cast<float>(rank.rank() + 1));
    const std::vector<float> ones(3, 1.0f);
    const std::vector<std::int64_t> ids{0, 6, -1};
    for (std::uint64_t i = 0; i < 10; ++i) {
      const LatencyReceived mine = small.dispatch(4, small.some_routes(4, 80 + i));
      const LatencyReceived theirs =
          other.dispatch({x.data(), Dtype::f32, {3, 64}}, {ids.data(), Dtype::i64, {3, 1}});
      const LatencyCombined sum =
          other.combine(theirs.x, theirs, {ones.data(), Dtype::f32, {3, 1}});
      rank.equal(sum.x.as<float>()[64], x[0], "the second token of the other exchange");
      rank.equal(sum.x.as<float>()[128], 0.0f, "the token that goes nowhere");
      small.check(small.combine(mine));
    }
    small.group.barrier();
  });
}

TEST_P(Latency, ResultsOutliveExchangeAndGroup) {
  run(2, [](Rank& rank) {
    auto small = std::make_unique<Small>(rank, 4);
    std::optional<LatencyReceived> received = small->dispatch(4, small->some_routes(4, 11));
    const std::int32_t count = received->counts.as<std::int32_t>()[0];
    std::vector<float> copy(received->x.as<float>(),
                            received->x.as<float>() + count * kLatencyHidden);
    small->group.barrier();
    small.reset();
    same_bytes(rank, "x after the group", received->x.data(), copy.data(),
               static_cast<std::size_t>(count), kLatencyHidden * sizeof(float));
    received.reset();
  });
}

TEST_P(Latency, DifferentWireFormatsAreNamed) {
  run(2, [](Rank& rank) {
    Small small(rank, 4);
    const std::vector<float> x(kLatencyHidden, 1.0f);
    const std::vector<std::int64_t> ids{0, 3};
    LatencyDispatchOptions options;
    options.format = rank.rank() == 0 ? WireFormat::as_is : WireFormat::e4m3;
    // One rank may hear first of the failure of the other.
    try {
      (void)small.exchange.dispatch({x.data(), Dtype::f32, {1, kLatencyHidden}},
                                    {ids.data(), Dtype::i64, {1, kTopk}}, options);
      rank.fail("different formats were accepted");
    } catch (const Error& error) {
      rank.check(error.kind() == ErrorKind::mismatch || error.kind() == ErrorKind::peer_failed,
                 error.what());
    }
  });
}

}  // namespace
}  // namespace ferry::conformance

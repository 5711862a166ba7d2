// Both paths and all formats of a latency combine: how far their sums are from exact ones, and what
// ranks may not do differently.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "compare.hpp"
#include "core/number.hpp"
#include "fleet_test.hpp"
#include "inputs.hpp"

namespace ferry::conformance {
namespace {

class LatencyPaths : public OnFabric {};
FERRY_ON_EVERY_FABRIC(LatencyPaths);

/// Half a unit in the last place of a bf16 number around `value`.
double half_ulp_bf16(double value) {
  const double magnitude = std::max(std::fabs(value), 0x1p-126);
  return std::ldexp(1.0, std::ilogb(magnitude) - 8);
}

/// How far a value may be from what its owner takes it for: docs/guide.md derives both.
double format_error(CombineFormat format, double value, double least, double most) {
  if (format == CombineFormat::as_is) return 0;
  if (format == CombineFormat::e4m3) {
    return std::max(std::fabs(value) / 16, most / 448 * 0x1p-10) + std::fabs(value) * 0x1p-22;
  }
  const double octaves = std::log2(most / least);
  return std::fabs(value) * ((std::exp2(octaves / 505) - 1) / 2 + 5e-6);
}

struct Extremes {
  double least = std::numeric_limits<double>::infinity(), most = 0;
  void add(double value) {
    if (value == 0) return;
    least = std::min(least, std::fabs(value));
    most = std::max(most, std::fabs(value));
  }
};

/// The rows of one small exchange: what rank d's expert gives for each (source, token, slot) that
/// it was sent, drawn without special values.
struct Rows {
  World world;
  std::uint64_t seed;
  void fill(int d, std::int64_t expert, std::int64_t place, std::byte* out) const {
    fill_row(mix(seed, 31, static_cast<std::uint64_t>(d),
                 static_cast<std::uint64_t>(expert << 32 | place)),
             world.dtype, false, world.hidden, out);
  }
  std::vector<double> values(int d, const ExpectedLatency& at, int source, std::int64_t t,
                             int k) const {
    const std::int64_t expert = world.id(source, t, k) - world.first_expert(d);
    const auto& rows = at.rows[static_cast<std::size_t>(expert)];
    const auto found = std::find_if(rows.begin(), rows.end(), [&](const auto& r) {
      return r.source == source && r.token == t && r.slot == k;
    });
    Bytes row(world.row_bytes());
    fill(d, expert, found - rows.begin(), row.data());
    std::vector<double> result;
    for (std::int64_t i = 0; i < world.hidden; ++i) {
      result.push_back(static_cast<double>(load(row.data(), world.dtype, i)));
    }
    return result;
  }
};

/// The exact sum of one token, and how far the partial sums' may be from it: half a unit of the
/// output, half a unit of each rank's row, the row's format, and of every fp32 operation 2^-24 of
/// what it has in hand. One block of 128 channels, so that extremes are those of the row.
void check_token(Rank& rank, const Rows& rows, const std::vector<ExpectedLatency>& at,
                 std::int64_t t, const float* got, CombineFormat format) {
  const World& world = rows.world;
  const auto hidden = static_cast<std::size_t>(world.hidden);
  std::vector<double> sum(hidden), bound(hidden), fp32(hidden);
  for (int d = 0; d < world.ranks; ++d) {
    std::vector<double> partial(hidden);
    bool any = false;
    for (int k = 0; k < world.topk; ++k) {
      const std::int64_t id = world.id(rank.rank(), t, k);
      if (id < 0 || world.rank_of(id) != d) continue;
      any = true;
      const float w = world.inputs[static_cast<std::size_t>(rank.rank())]
                          .weights[static_cast<std::size_t>(t * world.topk + k)];
      const auto row = rows.values(d, at[static_cast<std::size_t>(d)], rank.rank(), t, k);
      for (std::size_t i = 0; i < hidden; ++i) {
        partial[i] += static_cast<double>(w) * row[i];
        fp32[i] += std::fabs(static_cast<double>(w) * row[i]);
      }
    }
    Extremes extremes;
    for (const double value : partial) {
      extremes.add(static_cast<double>(to_float(from_float<Bf16>(static_cast<float>(value)))));
    }
    for (std::size_t i = 0; any && i < hidden; ++i) {
      sum[i] += partial[i];
      const double rounded = std::fabs(partial[i]) + half_ulp_bf16(partial[i]);
      bound[i] +=
          half_ulp_bf16(partial[i]) + format_error(format, rounded, extremes.least, extremes.most);
    }
  }
  for (std::size_t i = 0; i < hidden; ++i) {
    const double operations = world.topk + world.ranks;
    const double allowed =
        half_ulp_bf16(sum[i]) + bound[i] + operations * 0x1p-24 * (fp32[i] + bound[i]);
    const double error = std::fabs(static_cast<double>(got[i]) - sum[i]);
    if (error <= allowed * 1.01) continue;  // the bound's own terms are rounded
    rank.fail("token " + std::to_string(t) + ", channel " + std::to_string(i) + ": error " +
              std::to_string(error) + ", at most " + std::to_string(allowed));
    return;
  }
}

TEST_P(LatencyPaths, PartialSumsAreAsNearAsDerived) {
  run(3, [](Rank& rank) {
    Case c;
    c.mode = Mode::latency;
    c.ranks = rank.size();
    c.hidden = 128;
    c.topk = 4;
    c.dtype = Dtype::bf16;
    c.expert_kind = ExpertKind::even;
    c.tokens = 6;
    c.capacity = 12;
    c.seed = mix(base_seed(), 91) >> 1;
    const Rows rows{make_world(c), c.seed};
    Group group(rank.bootstrap(), group_config(rank, c.experts()));
    LatencyExchange exchange(group, {c.capacity, c.hidden, c.topk, c.dtype});
    const RankInput& own = rows.world.inputs[static_cast<std::size_t>(rank.rank())];
    std::vector<ExpectedLatency> at;
    for (int d = 0; d < c.ranks; ++d) at.push_back(expect_latency(rows.world, d));
    for (const CombineFormat format :
         {CombineFormat::as_is, CombineFormat::e4m3, CombineFormat::logfmt10}) {
      const LatencyReceived received =
          exchange.dispatch({own.x.data(), c.dtype, {own.tokens, c.hidden}},
                            {own.topk_idx.data(), Dtype::i64, {own.tokens, c.topk}});
      const auto& mine = at[static_cast<std::size_t>(rank.rank())].rows;
      for (std::size_t e = 0; e < mine.size(); ++e) {
        for (std::size_t i = 0; i < mine[e].size(); ++i) {
          const auto place = e * static_cast<std::size_t>(c.ranks * c.capacity) + i;
          rows.fill(rank.rank(), static_cast<std::int64_t>(e), static_cast<std::int64_t>(i),
                    received.x.as<std::byte>() + place * rows.world.row_bytes());
        }
      }
      LatencyCombineOptions options;
      options.path = CombinePath::per_rank;
      options.format = format;
      const LatencyCombined sums = exchange.combine(
          received.x, received, {own.weights.data(), Dtype::f32, {own.tokens, c.topk}}, options);
      for (std::int64_t t = 0; t < own.tokens; ++t) {
        std::vector<float> got;
        for (std::int64_t i = 0; i < c.hidden; ++i) {
          got.push_back(
              load(sums.x.as<std::byte>() + static_cast<std::size_t>(t) * rows.world.row_bytes(),
                   c.dtype, i));
        }
        check_token(rank, rows, at, t, got.data(), format);
      }
    }
    group.barrier();
  });
}

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
    LatencyDispatchOptions options;
    options.order = RowOrder::rank_major;
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

TEST_P(LatencyPaths, WeightsAreGivenOnce) {
  run(2, [](Rank& rank) {
    Tiny tiny(rank, 2, 4);
    const std::vector<std::int64_t> ids{0, 3, 2, -1};
    const ErrorKind invalid = ErrorKind::invalid_argument;
    tiny.tokens = 2;
    LatencyDispatchOptions ahead;
    ahead.topk_weights = tiny.own_weights();
    for (const CombinePath path : {CombinePath::per_slot, CombinePath::per_rank}) {
      LatencyCombineOptions options;
      options.path = path;
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
    LatencyDispatchOptions by_rank;
    by_rank.order = RowOrder::rank_major;
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

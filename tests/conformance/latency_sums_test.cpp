// How far the sums of latency mode are from exact ones, for all formats of rows in flight.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/number.hpp"
#include "ferry/ferry.hpp"
#include "fleet_test.hpp"
#include "inputs.hpp"

namespace ferry::conformance {
namespace {

class LatencySums : public OnFabric {};
FERRY_ON_EVERY_FABRIC(LatencySums);

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

TEST_P(LatencySums, PartialSumsAreAsNearAsDerived) {
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
      LatencyCombineOptions options{.path = CombinePath::per_rank, .format = format};
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

}  // namespace
}  // namespace ferry::conformance

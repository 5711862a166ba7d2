// Reductions that cross between domains in codes: bit for bit by the definition, on every rank;
// what cannot be encoded falls back in its own call.
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <random>
#include <tuple>

#include "core/collective_shares.hpp"
#include "host/collectives/engine.hpp"
#include "host/collectives/test_collectives.hpp"
#include "host/kernels/test_codec.hpp"

namespace ferry::host::test {
namespace {

using Floats = std::vector<float>;
constexpr ReduceFormat kCoded[] = {ReduceFormat::bf16, ReduceFormat::f16, ReduceFormat::e4m3,
                                   ReduceFormat::e5m2};

/// Elements of a round of all_reduce: half a window, and what the inboxes hold.
std::int64_t round_of(const Domains& domains) {
  const CollectiveStaging staging = CollectiveStaging::of(domains);
  const ShareCutter cutter(domains);
  const auto inbox =
      static_cast<std::int64_t>(staging.inbox_bytes / CollectiveStaging::kInboxes / 4);
  std::int64_t round =
      cutter.longest_round(static_cast<std::int64_t>(staging.window_bytes / 2 / 4), inbox);
  while (CodedPlaces(cutter.cut(round), domains).bytes() > index(inbox) * 4 / 2) {
    round -= (round / 8 + kShareUnit - 1) / kShareUnit * kShareUnit;
  }
  return round;
}

/// Like gradients: of another size in each part. Kept, as `inputs_of`.
const std::vector<Floats>& gradients_of(std::int64_t count, int ranks, unsigned seed) {
  static std::mutex mutex;
  static std::map<std::tuple<std::int64_t, int, unsigned>, std::vector<Floats>> drawn;
  const std::scoped_lock lock(mutex);
  std::vector<Floats>& all = drawn[{count, ranks, seed}];
  if (!all.empty()) return all;
  std::mt19937 random(kSeed + seed);
  std::normal_distribution<float> normal;
  for (int r = 0; r < ranks; ++r) {
    Floats& mine = all.emplace_back(index(count));
    for (std::size_t i = 0; i < mine.size(); ++i) {
      mine[i] = normal(random) * (i / 1000 % 2 == 0 ? 1e-3f : 0.1f);
    }
  }
  return all;
}

bool is_fp8(ReduceFormat format) {
  return format == ReduceFormat::e4m3 || format == ReduceFormat::e5m2;
}

/// A chunk as it arrives; how often it fell back is counted.
Floats crossed(const Floats& values, ReduceFormat format, int& fell_back) {
  bool finite = true, fits = true;
  for (const float value : values) {
    finite &= std::isfinite(value);
    fits &=
        std::fabs(value) < (format == ReduceFormat::f16 ? 65520.0f : 3.396e38f) || is_fp8(format);
  }
  if (!finite) {
    ++fell_back;
    return values;
  }
  const Known known = known_of(format, values);
  const double ulp = format == ReduceFormat::e5m2   ? 0x1p-2
                     : format == ReduceFormat::e4m3 ? 0x1p-3
                                                    : 0x1p-10;
  const bool spikes = known.told.error > ulp * ulp / 8 * known.told.signal;  // 3 times ulp² / 24
  if (format == ReduceFormat::bf16 || (fits && !spikes)) return known.values;
  ++fell_back;
  return known_of(ReduceFormat::bf16, values).values;
}

Floats chunk_of(const Floats& values, std::int64_t first, std::int64_t end) {
  return {values.begin() + first, values.begin() + end};
}

/// The sum of a domain's ranks.
Floats sum_of(const std::vector<Floats>& inputs, const std::vector<int>& ranks) {
  Floats sum(inputs[0].size(), 0.0f);
  for (const int rank : ranks) {
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += inputs[index(rank)][i];
  }
  return sum;
}

/// Elements [first, end) in chunks, owned by `domain`; `result_crosses`: all_reduce.
void reduce_chunks(const std::vector<Floats>& sums, std::int64_t first, std::int64_t end,
                   int domain, float divisor, ReduceFormat format, bool result_crosses, Floats& out,
                   int& fell_back) {
  for (std::int64_t at = first; at < end; at += kCodedChunk) {
    const std::int64_t stop = std::min(end, at + kCodedChunk);
    Floats total(index(stop - at), 0.0f);
    for (std::size_t d = 0; d < sums.size(); ++d) {
      const Floats own = chunk_of(sums[d], at, stop);
      const Floats came = static_cast<int>(d) == domain ? own : crossed(own, format, fell_back);
      for (std::size_t i = 0; i < total.size(); ++i) total[i] += came[i];
    }
    for (float& value : total) value /= divisor;
    if (result_crosses) total = crossed(total, format, fell_back);
    std::copy(total.begin(), total.end(), out.begin() + at);
  }
}

std::vector<Floats> sums_of(const std::vector<Floats>& inputs, const Domains& domains) {
  std::vector<Floats> sums;
  for (int d = 0; d < domains.count(); ++d) sums.push_back(sum_of(inputs, domains.members(d)));
  return sums;
}

Floats all_reduced(const std::vector<Floats>& inputs, const Domains& domains, ReduceOp op,
                   ReduceFormat format, int& fell_back) {
  const std::vector<Floats> sums = sums_of(inputs, domains);
  const float divisor = op == ReduceOp::mean ? static_cast<float>(domains.ranks()) : 1.0f;
  const auto count = static_cast<std::int64_t>(inputs[0].size());
  Floats out(inputs[0].size());
  if (domains.count() == 1) format = ReduceFormat::exact;
  const ShareCutter cutter(domains);
  const std::int64_t longest = domains.count() > 1 ? round_of(domains) : count;
  for (std::int64_t round = 0; round < count; round += longest) {
    for (const Share& share : cutter.cut(std::min(longest, count - round))) {
      if (domains.count() > 1) {
        reduce_chunks(sums, round + share.first, round + share.end, share.domain, divisor, format,
                      true, out, fell_back);
        continue;
      }
      for (std::int64_t i = round + share.first; i < round + share.end; ++i) {
        out[index(i)] = sums[0][index(i)] / divisor;
      }
    }
  }
  return out;
}

Floats scattered(const std::vector<Floats>& inputs, const Domains& domains, ReduceFormat format,
                 int rank) {
  const std::vector<Floats> sums = sums_of(inputs, domains);
  const auto block = static_cast<std::int64_t>(inputs[0].size()) / domains.ranks();
  const std::int64_t round = (1 << 20) / 4 / domains.ranks() / kShareUnit * kShareUnit;
  Floats out(inputs[0].size());
  int fell_back = 0;
  for (std::int64_t at = 0; at < block; at += round) {
    reduce_chunks(sums, rank * block + at, rank * block + std::min(block, at + round),
                  domains.of(rank), 1.0f, format, false, out, fell_back);
  }
  return chunk_of(out, rank * block, (rank + 1) * block);
}

bool same_floats(const Floats& a, const Floats& b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) && std::isnan(b[i])) continue;
    if (std::memcmp(&a[i], &b[i], sizeof(float)) != 0) return false;
  }
  return a.size() == b.size();
}

struct Known3 {
  std::vector<Floats> inputs{};
  ReduceOp op = ReduceOp::sum;
  ReduceFormat format = ReduceFormat::bf16;
  Floats expected{};
};

TEST(CodedCollectives, ReduceAsDefined) {
  for (const World& world : worlds()) {
    std::vector<Known3> all_known;
    for (const ReduceFormat format : kCoded) {
      for (const std::int64_t count : {5'000, 70'003, kSanitizer ? 270'001 : 1'200'001}) {
        if (count > 100'000 && (!is_fp8(format) || world.ranks > 5)) continue;
        if (world.brief && count > 100'000) continue;
        Known3 known{gradients_of(count, world.ranks, 1),
                     count < 10'000 ? ReduceOp::mean : ReduceOp::sum,
                     format,
                     {}};
        int fell_back = 0;
        known.expected = all_reduced(known.inputs, world.domains(), known.op, format, fell_back);
        if (format != ReduceFormat::f16) {
          EXPECT_EQ(fell_back, 0);
        }
        all_known.push_back(std::move(known));
      }
    }
    with_collectives(world, [&](Collectives& all) {
      for (const Known3& known : all_known) {
        const Floats& input = known.inputs[index(all.rank())];
        Floats x = input;
        const auto count = static_cast<std::int64_t>(x.size());
        all.all_reduce({x.data(), Dtype::f32, {count}}, {.op = known.op, .format = known.format});
        ASSERT_TRUE(same_floats(x, known.expected)) << "all_reduce in " << name_of(known.format)
                                                    << " of " << count << ", rank " << all.rank();
        const std::int64_t block = count / all.size();
        std::vector<Floats> whole = known.inputs;
        for (Floats& one : whole) one.resize(index(block * all.size()));
        Floats out(index(block));
        all.reduce_scatter({input.data(), Dtype::f32, {block * all.size()}},
                           {out.data(), Dtype::f32, {block}}, {.format = known.format});
        ASSERT_TRUE(same_floats(out, scattered(whole, world.domains(), known.format, all.rank())))
            << "reduce_scatter in " << name_of(known.format) << " of " << block << ", rank "
            << all.rank();
      }
    });
  }
}

// Whichever algorithm is asked for: what is short is not worth a code.
TEST(CodedCollectives, ShortTensorsAreExact) {
  with_collectives({4, 2}, [](Collectives& all) {
    const auto count = static_cast<std::int64_t>(eager_bytes(all.size()) / sizeof(float));
    const Floats input = gradients_of(count, 4, 7)[index(all.rank())];
    const auto reduced = [&](const ReduceOptions& options) {
      Floats x = input;
      all.all_reduce({x.data(), Dtype::f32, {count}}, options);
      return x;
    };
    const auto block_of = [&](ReduceFormat format) {
      Floats out(index(count / 4));
      all.reduce_scatter({input.data(), Dtype::f32, {count}}, {out.data(), Dtype::f32, {count / 4}},
                         {.format = format});
      return out;
    };
    const Floats exact = reduced({}), block = block_of(ReduceFormat::exact);
    for (const ReduceFormat format : kCoded) {
      for (const Algorithm algorithm : {Algorithm::automatic, Algorithm::one_shot,
                                        Algorithm::direct, Algorithm::hierarchical}) {
        EXPECT_TRUE(same_floats(reduced({.algorithm = algorithm, .format = format}), exact))
            << name_of(format) << ", " << name_of(algorithm);
      }
      EXPECT_TRUE(same_floats(block_of(format), block)) << name_of(format);
    }
    EXPECT_EQ(all.compression(), CompressionStats{});
  });
}

// NaN, infinity and a spike of one rank: only their chunks are in another format, and NaN is NaN on
// every rank.
TEST(CodedCollectives, FallBackInTheCallItself) {
  constexpr std::int64_t kCount = 140'000;
  constexpr std::size_t kOdd = 131'001;
  const float infinity = std::numeric_limits<float>::infinity();
  for (const World& world : {World{2, 1}, World{4, 2}, World{3, 2}}) {
    if (kSanitizer && world.ranks != 3) continue;  // nothing that the others do not do
    for (const ReduceFormat format : kCoded) {
      for (const float odd : {std::nanf(""), infinity, -infinity, 3e7f, 3e38f}) {
        if (kSanitizer && odd != infinity && odd != 3e38f) continue;  // other values, the same code
        auto inputs = gradients_of(kCount, world.ranks, 3);
        inputs[1][kOdd] = odd;
        int fell_back = 0;
        const Floats expected =
            all_reduced(inputs, world.domains(), ReduceOp::sum, format, fell_back);
        std::vector<CompressionStats> stats(index(world.ranks));
        with_collectives(world, [&](Collectives& all) {
          Floats x = inputs[index(all.rank())];
          all.all_reduce({x.data(), Dtype::f32, {kCount}}, {.format = format});
          ASSERT_TRUE(same_floats(x, expected)) << name_of(format) << " of " << odd;
          EXPECT_EQ(std::isnan(x[kOdd]), std::isnan(odd));
          EXPECT_EQ(std::isinf(x[kOdd]), std::isinf(odd));
          stats[index(all.rank())] = all.compression();
        });
        std::uint64_t fallen = 0, nonfinite = 0, reasons = 0;
        for (const CompressionStats& one : stats) {
          fallen += one.fallen_back;
          nonfinite += one.nonfinite;
          reasons += one.nonfinite + one.overflows + one.spikes;
          EXPECT_EQ(one.calls, 1u);
        }
        // What 3e7 leaves of its block bf16 and e5m2 still hold; of 3e38 it is 1 part in 256.
        const bool holds = format == ReduceFormat::bf16 || format == ReduceFormat::e5m2;
        if (!holds || !std::isfinite(odd)) {
          EXPECT_GE(fallen, 1u);
        }
        EXPECT_EQ(nonfinite > 0, !std::isfinite(odd));
        EXPECT_EQ(reasons, static_cast<std::uint64_t>(fell_back));
      }
    }
  }
}

TEST(CodedCollectives, AutomaticSettlesOnE4m3AndLeavesItForAWhile) {
  with_collectives({4, 2}, [](Collectives& all) {
    constexpr std::int64_t kCount = 100'000;
    const Floats input = gradients_of(kCount, 4, 5)[index(all.rank())];
    std::uint64_t before = 0;
    const auto ratio = [&](float odd) {
      Floats x = input;
      x[12345] = odd;
      all.all_reduce({x.data(), Dtype::f32, {kCount}}, {.format = ReduceFormat::automatic});
      const CompressionStats stats = all.compression();
      const std::uint64_t wire = stats.wire_bytes - std::exchange(before, stats.wire_bytes);
      return double(stats.exact_bytes) / double(stats.calls) / double(wire);
    };
    for (std::uint64_t i = 0; i < CompressionPolicy::kWarmUp; ++i) {
      EXPECT_NEAR(ratio(0.01f), 2, 0.1) << i;
    }
    for (int i = 0; i < 3; ++i) EXPECT_NEAR(ratio(0.01f), 3.88, 0.1);
    ratio(std::nanf(""));
    for (std::uint64_t i = 0; i < CompressionPolicy::kHold; ++i) {
      EXPECT_NEAR(ratio(0.01f), 2, 0.1) << i;
    }
    EXPECT_NEAR(ratio(0.01f), 3.88, 0.1);
    const CompressionStats stats = all.compression();
    EXPECT_GT(stats.relative_error, 0.02);
    EXPECT_LT(stats.relative_error, 0.03);
  });
}

TEST(CodedCollectives, RegisteredMemoryAndStreams) {
  with_collectives({4, 2}, [](Collectives& all) {
    constexpr std::int64_t kCount = 300'000;
    const auto inputs = gradients_of(kCount, 4, 9);
    int fell_back = 0;
    const Floats expected =
        all_reduced(inputs, Domains::blocks(4, 2), ReduceOp::mean, ReduceFormat::e4m3, fell_back);
    Stream stream;
    Tensor registered = all.empty({kCount}, Dtype::f32);
    for (const int with : {0, 1, 4}) {
      Floats ordinary = inputs[index(all.rank())];
      float* x = all.rank() < with ? static_cast<float*>(registered.data()) : ordinary.data();
      std::copy(inputs[index(all.rank())].begin(), inputs[index(all.rank())].end(), x);
      all.all_reduce({x, Dtype::f32, {kCount}},
                     {.op = ReduceOp::mean, .stream = &stream, .format = ReduceFormat::e4m3})
          .wait();
      EXPECT_TRUE(same_floats(Floats(x, x + kCount), expected)) << with << " registered";
    }
  });
}

TEST(CodedCollectives, WhatCannotBeIsRefused) {
  with_collectives({2, 1}, [](Collectives& all) {
    Floats x(10'000, 1.0f);
    const auto call = [&](Dtype dtype, ReduceOp op, ReduceFormat format) {
      all.all_reduce({x.data(), dtype, {5'000}}, {.op = op, .format = format});
    };
    expect_error(ErrorKind::invalid_argument, {"format: got e4m3 for the sum of bf16"},
                 [&] { call(Dtype::bf16, ReduceOp::sum, ReduceFormat::e4m3); });
    expect_error(ErrorKind::invalid_argument, {"format: got bf16 for the max of f32"},
                 [&] { call(Dtype::f32, ReduceOp::max, ReduceFormat::bf16); });
    expect_error(ErrorKind::invalid_argument, {"format: got f16 by ring"}, [&] {
      all.all_reduce({x.data(), Dtype::f32, {5'000}},
                     {.algorithm = Algorithm::ring, .format = ReduceFormat::f16});
    });
    call(Dtype::bf16, ReduceOp::sum, ReduceFormat::automatic);
    call(Dtype::f32, ReduceOp::max, ReduceFormat::automatic);
    EXPECT_EQ(all.compression(), CompressionStats{});
    expect_error(ErrorKind::mismatch, {"format is"}, [&] {
      call(Dtype::f32, ReduceOp::sum, all.rank() == 0 ? ReduceFormat::e4m3 : ReduceFormat::bf16);
    });
    call(Dtype::f32, ReduceOp::sum, ReduceFormat::e4m3);
    EXPECT_EQ(all.compression().calls, 1u);
  });
}

/// In places of all shares nothing overlaps.
TEST(CodedCollectives, PlacesDoNotOverlap) {
  for (const World& world : worlds()) {
    const Domains domains = world.domains();
    for (const std::int64_t count : {1, 5'000, 262'144, 1'000'000}) {
      const std::vector<Share> shares = ShareCutter(domains).cut(count);
      const CodedPlaces places(shares, domains);
      std::vector<std::vector<std::pair<std::size_t, std::size_t>>> used(2 * index(world.ranks));
      for (std::size_t s = 0; s < shares.size(); ++s) {
        const std::size_t room = coded_room(shares[s].count());
        for (int d = 0; d < domains.count(); ++d) {
          if (d == shares[s].domain) continue;
          const std::size_t sum = places.sum(s, d), result = places.result(s, d);
          used[index(rank_of(shares[s], shares[s].domain, domains))].push_back({sum, sum + room});
          used[index(world.ranks + rank_of(shares[s], d, domains))].push_back(
              {result, result + room});
        }
      }
      for (auto& one : used) {
        std::sort(one.begin(), one.end());
        for (std::size_t i = 0; i < one.size(); ++i) {
          EXPECT_LE(one[i].second, i + 1 < one.size() ? one[i + 1].first : places.bytes());
        }
      }
    }
  }
}

}  // namespace
}  // namespace ferry::host::test

// Every algorithm of all_reduce against its definition, bit for bit, and what a call that forces
// one may not do.
#include "host/collectives/test_collectives.hpp"

namespace ferry::host::test {
namespace {

std::vector<int> domain_after_domain(const Domains& domains) {
  std::vector<int> order;
  for (int d = 0; d < domains.count(); ++d) {
    for (const int rank : domains.members(d)) order.push_back(rank);
  }
  return order;
}

/// The elements of a rank and below it, summed.
template <class T, class Acc>
Acc tree_sum(ReduceOp op, const std::vector<Bytes>& inputs, const Domains& domains, int domain,
             std::size_t at, std::int64_t i) {
  const std::vector<int>& members = domains.members(domain);
  Acc sum = element<T, Acc>(inputs[static_cast<std::size_t>(members[at])], i);
  if (op == ReduceOp::sum || op == ReduceOp::mean) sum = Acc{} + sum;
  for (const std::size_t below : {2 * at + 1, 2 * at + 2}) {
    if (below >= members.size()) continue;
    sum = apply(op, sum, tree_sum<T, Acc>(op, inputs, domains, domain, below, i));
  }
  for (const int below : {2 * domain + 1, 2 * domain + 2}) {
    if (at > 0 || below >= domains.count()) continue;
    sum = apply(op, sum, tree_sum<T, Acc>(op, inputs, domains, below, 0, i));
  }
  return sum;
}

template <class T, class Acc>
Acc ring_sum(ReduceOp op, const std::vector<Bytes>& inputs, const std::vector<int>& order,
             std::int64_t count, std::int64_t i) {
  const auto ranks = static_cast<std::int64_t>(order.size());
  const std::int64_t units = (count + 127) / 128;
  std::int64_t part = 0;
  while (i >= units * (part + 1) / ranks * 128 && part + 1 < ranks) ++part;
  std::optional<Acc> sum;
  for (std::int64_t k = 1; k <= ranks; ++k) {
    const int rank = order[static_cast<std::size_t>((part + k) % ranks)];
    const Acc next = element<T, Acc>(inputs[static_cast<std::size_t>(rank)], i);
    const bool adds = op == ReduceOp::sum || op == ReduceOp::mean;
    sum = sum ? apply(op, *sum, next) : adds ? Acc{} + next : next;
  }
  return *sum;
}

/// By the definition in ferry/collectives.hpp.
template <class T, class Acc>
Bytes chained_as(Algorithm algorithm, ReduceOp op, const std::vector<Bytes>& inputs,
                 const Domains& domains) {
  const auto count = static_cast<std::int64_t>(inputs[0].size() / sizeof(T));
  const std::vector<int> order = domain_after_domain(domains);
  Bytes out(inputs[0].size());
  for (std::int64_t i = 0; i < count; ++i) {
    Acc sum = algorithm == Algorithm::ring ? ring_sum<T, Acc>(op, inputs, order, count, i)
                                           : tree_sum<T, Acc>(op, inputs, domains, 0, 0, i);
    T result;
    if constexpr (std::is_integral_v<T>) {
      result = static_cast<T>(sum);
    } else {
      if (op == ReduceOp::mean) sum /= static_cast<float>(domains.ranks());
      result = from_float<T>(sum);
    }
    std::memcpy(out.data() + static_cast<std::size_t>(i) * sizeof(T), &result, sizeof(T));
  }
  return out;
}

Bytes expected(Algorithm algorithm, Dtype dtype, ReduceOp op, const std::vector<Bytes>& inputs,
               const Domains& domains) {
  if (algorithm != Algorithm::ring && algorithm != Algorithm::tree) {
    return reduced(dtype, op, inputs, domains);
  }
  switch (dtype) {
    case Dtype::bf16: return chained_as<Bf16, float>(algorithm, op, inputs, domains);
    case Dtype::f16: return chained_as<Fp16, float>(algorithm, op, inputs, domains);
    case Dtype::f32: return chained_as<float, float>(algorithm, op, inputs, domains);
    default: return reduced(dtype, op, inputs, domains);  // integers: any order
  }
}

struct Forced {
  Algorithm algorithm = Algorithm::automatic;
  Dtype dtype = Dtype::f32;
  ReduceOp op = ReduceOp::sum;
  std::int64_t count = 0;
};

std::vector<Forced> forced_calls() {
  std::vector<Forced> all;
  for (const Algorithm algorithm : {Algorithm::one_shot, Algorithm::direct, Algorithm::hierarchical,
                                    Algorithm::ring, Algorithm::tree}) {
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::i32, Dtype::i64}) {
      all.push_back({algorithm, dtype, ReduceOp::sum, 1000});
      if (algorithm != Algorithm::one_shot) {
        all.push_back({algorithm, dtype, ReduceOp::sum, 20'001});
      }
    }
    for (const std::int64_t count : {0, 1}) {
      all.push_back({algorithm, Dtype::f32, ReduceOp::sum, count});
    }
    for (const ReduceOp op : {ReduceOp::mean, ReduceOp::product, ReduceOp::max}) {
      all.push_back({algorithm, Dtype::bf16, op, 1500});
      all.push_back({algorithm, Dtype::f32, op, 1500});
    }
    if (algorithm == Algorithm::one_shot) continue;
    // Several rounds and pieces, of the widest elements and of the narrowest.
    all.push_back({algorithm, Dtype::i64, ReduceOp::sum, 900'001});
    all.push_back({algorithm, Dtype::bf16, ReduceOp::sum, 1'500'001});
  }
  return all;
}

TEST(Algorithms, ReduceAsDefined) {
  for (const World& world : worlds()) {
    struct Known {
      Forced call;
      std::vector<Bytes> inputs;
      Bytes expected;
    };
    std::vector<Known> all_known;
    for (const Forced& call : forced_calls()) {
      if (call.count > (world.brief ? kBriefCount : kSanitizer ? 100'000 : call.count)) continue;
      Known known{call, inputs_of(call.dtype, call.count, world.ranks, 3), {}};
      known.expected = expected(call.algorithm, call.dtype, call.op, known.inputs, world.domains());
      all_known.push_back(std::move(known));
    }
    with_collectives(world, [&](Collectives& all) {
      for (const auto& [call, inputs, right] : all_known) {
        Bytes mine = inputs[static_cast<std::size_t>(all.rank())];
        all.all_reduce({mine.data(), call.dtype, {call.count}},
                       {.op = call.op, .algorithm = call.algorithm});
        ASSERT_TRUE(same(call.dtype, mine, right))
            << name_of(call.algorithm) << ", rank " << all.rank() << ": " << name_of(call.dtype)
            << " " << name_of(call.op) << " of " << call.count;
      }
    });
  }
}

// Each leaves the staging buffers and the flags as the others need them.
TEST(Algorithms, OneAfterAnother) {
  for (const World& world : {World{.ranks = 2}, World{.ranks = 5, .domain_size = 2},
                             World{.ranks = 3, .fabric = FabricKind::sim}}) {
    with_collectives(world, [&](Collectives& all) {
      std::mt19937 random(kSeed);  // the same on all ranks
      for (int i = 0; i < (kSanitizer ? 20 : 80); ++i) {
        const auto algorithm = static_cast<Algorithm>(random() % 6);
        const bool tiny = algorithm == Algorithm::one_shot || random() % 2 == 0;
        const std::int64_t count = 1 + random() % (tiny ? 500 : kSanitizer ? 400'000 : 1'400'000);
        std::vector<std::int32_t> x(static_cast<std::size_t>(count), i + all.rank());
        all.all_reduce({x.data(), Dtype::i32, {count}}, {.algorithm = algorithm});
        const int sum = all.size() * i + all.size() * (all.size() - 1) / 2;
        ASSERT_EQ(x, std::vector<std::int32_t>(x.size(), sum))
            << i << ": " << name_of(algorithm) << " of " << count;
      }
    });
  }
}

// Who reduces what changes no bits, even if some reduce nothing.
TEST(Algorithms, BitsDoNotDependOnShares) {
  struct Uneven {
    World world;
    std::vector<std::vector<int>> shares;
  };
  const Uneven all_uneven[] = {
      {{.ranks = 4, .domain_size = 1},
       {{1, 1, 1, 1}, {0, 1, 1, 1}, {0, 0, 0, 9}, {7, 1, 65535, 0}}},
      {{.ranks = 5, .domain_size = 2}, {{1, 0, 0}, {0, 0, 1}, {3, 2, 9}}},
      {{.ranks = 3, .fabric = FabricKind::sim}, {{5, 0, 1}, {0, 1, 0}}},
      {{.ranks = 4, .domain_size = 2, .fabric = FabricKind::shm}, {{1, 0}, {1, 3}}}};
  for (const auto& [world, shares] : all_uneven) {
    for (const std::int64_t count : {1, 5000, 700'001}) {
      if (kSanitizer && count > 100'000) continue;
      const auto inputs = inputs_of(Dtype::bf16, count, world.ranks, 9);
      const Bytes right = reduced(Dtype::bf16, ReduceOp::sum, inputs, world.domains());
      with_collectives(world, [&](Collectives& all) {
        for (const std::vector<int>& uneven : shares) {
          Bytes mine = inputs[static_cast<std::size_t>(all.rank())];
          all.all_reduce({mine.data(), Dtype::bf16, {count}},
                         {.algorithm = Algorithm::hierarchical, .shares = uneven});
          ASSERT_TRUE(same(Dtype::bf16, mine, right)) << "rank " << all.rank() << ", " << count;
        }
      });
    }
  }
}

// All ranks decide alike, in many calls of which some try another way; sums of integers are exact
// in any order.
TEST(Algorithms, TheChoiceIsTheSameOnAllRanks) {
  for (const World& world :
       {World{.ranks = 4, .domain_size = 1}, World{.ranks = 5, .domain_size = 2},
        World{.ranks = 3, .fabric = FabricKind::sim},
        World{.ranks = 4, .fabric = FabricKind::shm}}) {
    with_collectives(world, [&](Collectives& all) {
      for (int i = 0; i < (kSanitizer ? 20 : 130); ++i) {
        const std::int64_t count = i % 10 == 9 ? 400'000 : 20'000;
        std::vector<std::int32_t> x(static_cast<std::size_t>(count), i + all.rank());
        all.all_reduce({x.data(), Dtype::i32, {count}});
        const int sum = all.size() * i + all.size() * (all.size() - 1) / 2;
        ASSERT_EQ(x[0], sum) << i;
        ASSERT_EQ(x.back(), sum) << i;
      }
      std::int32_t one = 1;
      all.all_reduce({&one, Dtype::i32, {1}});  // brings the reports of the last call
      for (const std::size_t bytes : {100, 80'000, 2'000'000, 8'000'000}) {
        const Choice mine = all.choice(bytes, true);
        std::vector<double> told{static_cast<double>(mine.algorithm), mine.predicted_seconds,
                                 mine.observed_seconds, mine.past_caches ? 1.0 : 0.0};
        told.insert(told.end(), mine.shares.begin(), mine.shares.end());
        told.insert(told.end(), mine.bytes_per_second.begin(), mine.bytes_per_second.end());
        const auto count = static_cast<std::int64_t>(told.size() * sizeof(double));
        std::vector<double> every(told.size() * static_cast<std::size_t>(all.size()));
        all.barrier();
        all.all_gather({told.data(), Dtype::u8, {count}},
                       {every.data(), Dtype::u8, {count * all.size()}});
        for (std::size_t at = 0; at < every.size(); ++at) {
          ASSERT_EQ(every[at], told[at % told.size()]) << "rank " << at / told.size();
        }
        if (bytes == 100) {
          EXPECT_EQ(mine.algorithm, Algorithm::one_shot);
          EXPECT_FALSE(mine.past_caches);
        } else if (all.domains() == 1) {
          EXPECT_TRUE(mine.past_caches || bytes < 8'000'000);  // of those nothing is known yet
        } else {
          EXPECT_FALSE(mine.past_caches);
          EXPECT_GT(mine.predicted_seconds, 0);
          EXPECT_GT(mine.bytes_per_second[0], 0);
        }
      }
    });
  }
}

TEST(Algorithms, OthersAreRefusedAndNamed) {
  with_collectives({.ranks = 3}, [](Collectives& all) {
    std::vector<float> x(60'000, 1.0f), out(20'000);
    const TensorView view(x.data(), Dtype::f32, {60'000});
    expect_error(ErrorKind::invalid_argument,
                 {"all_reduce: algorithm: got one_shot for 240000 bytes"},
                 [&] { all.all_reduce(view, {.algorithm = Algorithm::one_shot}); });
    expect_error(ErrorKind::invalid_argument, {"all_reduce: algorithm: got 9"},
                 [&] { all.all_reduce(view, {.algorithm = static_cast<Algorithm>(9)}); });
    expect_error(ErrorKind::invalid_argument, {"reduce_scatter: algorithm: got ring"}, [&] {
      all.reduce_scatter(view, {out.data(), Dtype::f32, {20'000}}, {.algorithm = Algorithm::ring});
    });
    expect_error(ErrorKind::invalid_argument, {"all_reduce: shares: got 2 numbers"},
                 [&] { all.all_reduce(view, {.shares = {1, 1}}); });
    expect_error(ErrorKind::invalid_argument, {"all_reduce: shares: got one that cannot be"},
                 [&] { all.all_reduce(view, {.shares = {0}}); });
    for (const Algorithm algorithm : {Algorithm::one_shot, Algorithm::ring, Algorithm::tree}) {
      expect_error(ErrorKind::invalid_argument,
                   {"shares: got some with algorithm " + std::string(name_of(algorithm)),
                    "direct, hierarchical or automatic"},
                   [&] { all.all_reduce(view, {.algorithm = algorithm, .shares = {1}}); });
    }
    expect_error(ErrorKind::invalid_argument, {"reduce_scatter: shares: got some"}, [&] {
      all.reduce_scatter(view, {out.data(), Dtype::f32, {20'000}}, {.shares = {1}});
    });
    const bool other = all.rank() == 1;
    const Algorithm mine = other ? Algorithm::ring : Algorithm::tree;
    expect_error(ErrorKind::mismatch, {"algorithm is", "rank 1"},
                 [&] { all.all_reduce(view, {.algorithm = mine}); });
    const std::vector<int> shares{other ? 2 : 1};
    expect_error(ErrorKind::mismatch, {"shares (as a hash) is", "rank 1"},
                 [&] { all.all_reduce(view, {.shares = shares}); });
    const Algorithm automatic = other ? Algorithm::automatic : Algorithm::direct;
    expect_error(ErrorKind::mismatch, {"algorithm is", "rank 1"},
                 [&] { all.all_reduce(view, {.algorithm = automatic}); });
    all.all_reduce(view);
    EXPECT_EQ(x[59'999], 3.0f);
  });
}

}  // namespace
}  // namespace ferry::host::test

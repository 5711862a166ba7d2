// Collectives of GPUs in several domains, with the host in the place of the GPUs: what crosses, and
// where it lies, by the definition; ranks that disagree, leave or fail.
#include <gtest/gtest.h>

#include <functional>
#include <numeric>

#include "api/test_domain_ranks.hpp"

namespace ferry {
namespace {

using namespace test;

using Body = std::function<void(cuda::DomainCollectives&)>;

class DomainCollectivesTest : public ::testing::TestWithParam<Shape> {
 protected:
  int ranks() const { return static_cast<int>(GetParam().labels.size()); }
  Domains domains() const { return Domains(GetParam().labels); }
  void each(const Body& body) const {
    const auto bootstraps = thread_bootstrap(ranks());
    on_ranks(ranks(), [&](int r) {
      const auto all = make(*bootstraps[index(r)], GetParam());
      body(*all);
      all->barrier();
    });
  }
};
std::vector<Shape> shapes() {
  const Shape uneven{"Uneven", {0, 0, 0, 1, 1}};
  if (kSanitizer) return {uneven};
  return {
      uneven,
      {"Mixed", {0, 1, 1, 0, 2, 2, 0}},
      {"OfOne", {0, 1, 2}},
      {"Shm", {0, 0, 1, 1}, FabricKind::shm},
      {"Network", {0, 0, 1}, FabricKind::local, has_network() ? FabricKind::ofi : FabricKind::sim}};
}
INSTANTIATE_TEST_SUITE_P(Domains, DomainCollectivesTest, ::testing::ValuesIn(shapes()),
                         [](const auto& one) { return one.param.name; });

TensorView view(Bytes& bytes, Dtype dtype) {
  return {bytes.data(), dtype, {static_cast<std::int64_t>(bytes.size() / size_of(dtype))}};
}

constexpr Dtype kDtypes[] = {Dtype::f32, Dtype::bf16, Dtype::f16,
                             Dtype::i32, Dtype::i64,  Dtype::u8};
constexpr std::int64_t kCounts[] = {0, 1, 129, 5001, 100'000};

/// The order of integers needs their sign, which `reduced` adds up without.
Bytes by_definition(Dtype dtype, ReduceOp op, const std::vector<Bytes>& inputs,
                    const Domains& domains) {
  const bool ordered = op == ReduceOp::min || op == ReduceOp::max;
  if (ordered && dtype == Dtype::i32) {
    return reduced_as<std::int32_t, std::int64_t>(op, inputs, domains);
  }
  if (ordered && dtype == Dtype::i64) {
    return reduced_as<std::int64_t, std::int64_t>(op, inputs, domains);
  }
  return reduced(dtype, op, inputs, domains);
}

// Of many sizes, some of which take many steps; all operations on the shortest.
TEST_P(DomainCollectivesTest, ReduceByTheDefinition) {
  each([&](cuda::DomainCollectives& all) {
    for (const Dtype dtype : kDtypes) {
      for (const std::int64_t count : kCounts) {
        if (count > kBriefCount && dtype != Dtype::f32 && dtype != Dtype::bf16) continue;
        for (const ReduceOp op :
             {ReduceOp::sum, ReduceOp::mean, ReduceOp::product, ReduceOp::min, ReduceOp::max}) {
          const bool integer = dtype == Dtype::i32 || dtype == Dtype::i64 || dtype == Dtype::u8;
          if (op == ReduceOp::mean && integer) continue;
          if (op != ReduceOp::mean && op != ReduceOp::sum && count > 1000) continue;
          const std::int64_t whole = count / all.size() * all.size();
          const auto inputs = inputs_of(dtype, whole, all.size(), static_cast<unsigned>(count));
          const Bytes expected = by_definition(dtype, op, inputs, domains());
          Bytes x = inputs[index(all.rank())];
          all.all_reduce(view(x, dtype), {.op = op});
          EXPECT_TRUE(same(dtype, x, expected))
              << name_of(dtype) << " " << name_of(op) << " " << whole << " on " << all.rank();

          x = inputs[index(all.rank())];
          Bytes out(x.size() / index(all.size()));
          all.reduce_scatter(view(x, dtype), view(out, dtype), {.op = op});
          EXPECT_TRUE(same(dtype, out, part(expected, index(all.rank()) * out.size(), out.size())))
              << name_of(dtype) << " " << name_of(op) << " block " << whole / all.size();
        }
      }
    }
  });
}

TEST_P(DomainCollectivesTest, MoveByTheDefinition) {
  each([&](cuda::DomainCollectives& all) {
    const std::size_t self = index(all.rank());
    for (const std::int64_t count : kCounts) {
      const auto inputs = inputs_of(Dtype::u8, count, all.size(), 7);
      Bytes x = inputs[self], every(index(count * all.size())), expected;
      for (const Bytes& one : inputs) expected.insert(expected.end(), one.begin(), one.end());
      all.all_gather(view(x, Dtype::u8), view(every, Dtype::u8), {});
      EXPECT_EQ(every, expected) << count;
      for (int root = 0; root < all.size(); ++root) {
        Bytes sent = inputs[self];
        all.broadcast(view(sent, Dtype::u8), root, {});
        EXPECT_EQ(sent, inputs[index(root)]) << count << " from " << root;
      }
    }
  });
}

TEST_P(DomainCollectivesTest, BlocksOfAnySizeGoToAll) {
  each([&](cuda::DomainCollectives& all) {
    for (const std::int64_t scale : {0, 1, 700, 9000}) {
      const auto count = [&](int from, int to) { return (from * 7 + to * 3) % 5 * scale; };
      const auto element = [](int from, int to, std::int64_t i) {
        return static_cast<std::int32_t>(from * 1'000'000 + to * 100'000 + i % 99'991);
      };
      BlockCounts counts;
      std::vector<std::int32_t> x, expected;
      for (int r = 0; r < all.size(); ++r) {
        counts.to.push_back(count(all.rank(), r));
        counts.from.push_back(count(r, all.rank()));
        for (std::int64_t i = 0; i < counts.to.back(); ++i) x.push_back(element(all.rank(), r, i));
        for (std::int64_t i = 0; i < counts.from.back(); ++i) {
          expected.push_back(element(r, all.rank(), i));
        }
      }
      std::vector<std::int32_t> out(expected.size());
      all.all_to_all({x.data(), Dtype::i32, {std::ssize(x)}},
                     {out.data(), Dtype::i32, {std::ssize(out)}}, counts, {});
      EXPECT_EQ(out, expected) << scale;
    }
  });
}

TEST_P(DomainCollectivesTest, BlocksInPlace) {
  each([&](cuda::DomainCollectives& all) {
    const std::size_t bytes = 30'001, own = index(all.rank()) * bytes;
    const auto whole = static_cast<std::int64_t>(bytes) * all.size();
    const auto inputs = inputs_of(Dtype::u8, whole, all.size(), 3);
    Bytes x = inputs[index(all.rank())];
    const Bytes expected = reduced(Dtype::u8, ReduceOp::sum, inputs, domains());
    const TensorView block{x.data() + own, Dtype::u8, {std::ssize(x) / all.size()}};
    all.reduce_scatter(view(x, Dtype::u8), block, {});
    EXPECT_EQ(part(x, own, bytes), part(expected, own, bytes));
    all.all_gather(block, view(x, Dtype::u8), {});
    EXPECT_EQ(x, expected);
  });
}

TEST_P(DomainCollectivesTest, CallsOnStreamsKeepTheirOrder) {
  each([&](cuda::DomainCollectives& all) {
    Stream made;
    std::vector<float> x(5000, 1.0f);
    Event last;
    for (int i = 0; i < 4; ++i) {
      last = all.all_reduce({x.data(), Dtype::f32, {5000}}, {.stream = &made});
    }
    last.wait();
    float expected = 1;
    for (int i = 0; i < 4; ++i) expected *= static_cast<float>(all.size());
    for (const float value : x) ASSERT_EQ(value, expected);
  });
}

TEST_P(DomainCollectivesTest, SumsCrossInCodes) {
  each([&](cuda::DomainCollectives& all) {
    constexpr std::int64_t kCount = 200'000;
    for (const ReduceFormat format : {ReduceFormat::bf16, ReduceFormat::f16, ReduceFormat::e4m3}) {
      std::mt19937 random(kSeed + static_cast<unsigned>(all.rank()));
      std::normal_distribution<float> normal;
      std::vector<float> x(kCount);
      for (float& value : x) value = normal(random);
      std::vector<float> exact = x;
      const auto sum = [&](std::vector<float>& data, ReduceFormat as) {
        all.all_reduce({data.data(), Dtype::f32, {kCount}}, {.op = ReduceOp::mean, .format = as});
      };
      sum(exact, ReduceFormat::exact);
      sum(x, format);
      double error = 0, signal = 0;
      for (std::size_t i = 0; i < x.size(); ++i) {
        error += (double(x[i]) - exact[i]) * (double(x[i]) - exact[i]);
        signal += double(exact[i]) * exact[i];
      }
      EXPECT_GT(error, 0) << name_of(format);
      EXPECT_LT(error, signal * (format == ReduceFormat::e4m3 ? 0.0025 : 1e-5)) << name_of(format);
      std::vector<float> every(x.size() * index(all.size()));
      all.all_gather({x.data(), Dtype::f32, {kCount}},
                     {every.data(), Dtype::f32, {std::ssize(every)}}, {});
      for (std::size_t i = 0; i < every.size(); ++i) ASSERT_EQ(every[i], x[i % x.size()]);
    }
    const bool rides = all.compression().calls > 0;
    EXPECT_EQ(rides, domains().index(all.rank()) < domains().full_rails());
  });
}

TEST_P(DomainCollectivesTest, RanksThatDisagreeLearnItAndGoOn) {
  each([&](cuda::DomainCollectives& all) {
    std::vector<float> x(2001, 1.0f);
    const std::int64_t count = all.rank() == 0 ? 2001 : 2000;
    const auto sizes = error_of([&] { all.all_reduce({x.data(), Dtype::f32, {count}}, {}); });
    ASSERT_TRUE(sizes.has_value());
    EXPECT_EQ(sizes->kind(), ErrorKind::mismatch);
    EXPECT_NE(std::string(sizes->what()).find("number of elements"), std::string::npos);
    EXPECT_EQ(x[0], 1.0f);

    const auto differ_in_sms = error_of([&] {
      all.all_reduce({x.data(), Dtype::f32, {2000}}, {.num_sms = all.rank() == 0 ? 4 : 2});
    });
    ASSERT_TRUE(differ_in_sms.has_value());
    EXPECT_EQ(differ_in_sms->kind(), ErrorKind::mismatch);
    EXPECT_NE(std::string(differ_in_sms->what()).find("number of SMs"), std::string::npos)
        << differ_in_sms->what();
    EXPECT_EQ(x[0], 1.0f);

    std::vector<std::int64_t> counts(index(all.size()), 10);
    BlockCounts blocks{counts, counts};
    if (all.rank() == 0) blocks.to[1] = 11;
    const std::int64_t sent = std::accumulate(blocks.to.begin(), blocks.to.end(), std::int64_t{0});
    std::vector<float> out(index(10 * all.size()));
    const auto differ = error_of([&] {
      all.all_to_all({x.data(), Dtype::f32, {sent}}, {out.data(), Dtype::f32, {std::ssize(out)}},
                     blocks, {});
    });
    ASSERT_TRUE(differ.has_value());
    EXPECT_EQ(differ->kind(), ErrorKind::mismatch);
    EXPECT_NE(
        std::string(differ->what()).find("rank 0 sends 11 elements to rank 1, which expects 10"),
        std::string::npos)
        << differ->what();
    all.all_reduce({x.data(), Dtype::f32, {2000}}, {});
    EXPECT_EQ(x[0], static_cast<float>(all.size()));
  });
}

// Whoever waits for it, inside its domain or on its rail or for another of its domain, names it.
TEST_P(DomainCollectivesTest, ARankThatLeavesIsNamed) {
  const auto bootstraps = thread_bootstrap(ranks());
  const int left = ranks() - 1;
  on_ranks(ranks(), [&](int r) {
    const auto all = make(*bootstraps[index(r)], GetParam());
    std::vector<float> x(3000, 1.0f);
    all->all_reduce({x.data(), Dtype::f32, {3000}}, {});
    if (r == left) return all->destroy();
    for (const auto* again : {"first", "second"}) {
      const auto error = error_of([&] { all->all_reduce({x.data(), Dtype::f32, {3000}}, {}); });
      ASSERT_TRUE(error.has_value()) << again;
      EXPECT_EQ(error->kind(), ErrorKind::peer_left) << error->what();
      EXPECT_EQ(error->peer(), left) << error->what();
    }
  });
}

TEST_P(DomainCollectivesTest, ARankThatStaysAwayIsNamed) {
  const auto bootstraps = thread_bootstrap(ranks());
  on_ranks(ranks(), [&](int r) {
    const auto all = make(*bootstraps[index(r)], GetParam(), 300ms);
    std::vector<float> x(3000, 1.0f);
    bootstraps[index(r)]->all_gather({}, 20s);
    if (r != 1) {
      const auto error = error_of([&] { all->all_reduce({x.data(), Dtype::f32, {3000}}, {}); });
      ASSERT_TRUE(error.has_value());
      EXPECT_EQ(error->kind(), ErrorKind::deadline) << error->what();
      EXPECT_EQ(error->peer(), 1) << error->what();
    }
    bootstraps[index(r)]->all_gather({}, 20s);
  });
}

// In the midst of a call, while others wait for it in kernels, on its rail, and for those.
TEST_P(DomainCollectivesTest, ARankWhoseGpuBreaksIsNamed) {
  const auto bootstraps = thread_bootstrap(ranks());
  on_ranks(ranks(), [&](int r) {
    const auto all = make(*bootstraps[index(r)], GetParam(), 20s, {.sums = r == 1 ? 3 : -1});
    std::vector<float> x(500'000, 1.0f);
    for (const auto* again : {"first", "second"}) {
      const auto error = error_of([&] { all->all_reduce({x.data(), Dtype::f32, {500'000}}, {}); });
      ASSERT_TRUE(error.has_value()) << again;
      EXPECT_EQ(error->kind(), r == 1 ? ErrorKind::system : ErrorKind::peer_failed)
          << error->what();
      EXPECT_EQ(error->peer(), 1) << error->what();
    }
  });
}

// Nothing crosses then, and no kernel that could tell comes after that.
TEST_P(DomainCollectivesTest, ACallThatDoesNotCrossFails) {
  const auto bootstraps = thread_bootstrap(ranks());
  on_ranks(ranks(), [&](int r) {
    const auto all = make(*bootstraps[index(r)], GetParam(), 20s, {.steps = r == 1 ? 1 : -1});
    const std::vector<std::int64_t> each(index(ranks()), 1);
    std::vector<std::int32_t> x(index(ranks()), r), out(x.size());
    const auto error = error_of([&] {
      all->all_to_all({x.data(), Dtype::i32, {ranks()}}, {out.data(), Dtype::i32, {ranks()}},
                      {each, each}, {});
    });
    ASSERT_TRUE(error.has_value()) << r;
    EXPECT_EQ(error->kind(), ErrorKind::peer_failed) << error->what();
  });
}

TEST(DomainCollectives, WhatGpusHaveNotIsRefused) {
  const auto bootstraps = thread_bootstrap(2);
  on_ranks(2, [&](int r) {
    const auto all = make(*bootstraps[index(r)], {"", {0, 1}});
    std::vector<float> x(8, 1.0f);
    const TensorView view{x.data(), Dtype::f32, {8}};
    const auto refused = [&](ErrorKind kind, const std::function<void()>& call) {
      const auto error = error_of(call);
      ASSERT_TRUE(error.has_value());
      EXPECT_EQ(error->kind(), kind) << error->what();
    };
    refused(ErrorKind::invalid_argument,
            [&] { all->all_reduce(view, {.algorithm = Algorithm::one_shot}); });
    refused(ErrorKind::invalid_argument, [&] { all->all_reduce(view, {.shares = {1, 1, 1}}); });
    refused(ErrorKind::unsupported, [&] { all->window(1, 1, Dtype::f32); });
    for (const Algorithm algorithm : {Algorithm::direct, Algorithm::ring, Algorithm::tree}) {
      all->all_reduce(view, {.algorithm = algorithm});
    }
    EXPECT_EQ(x[7], 8.0f);
    all->barrier();
    all->destroy();
    refused(ErrorKind::destroyed, [&] { all->all_reduce(view, {}); });
  });
}

}  // namespace
}  // namespace ferry

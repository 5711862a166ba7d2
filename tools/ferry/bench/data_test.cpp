#include "bench/data.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <stdexcept>
#include <vector>

namespace ferry::cli {
namespace {

// Codes from the definitions of the formats.
TEST(EncodeInteger, IsExact) {
  EXPECT_EQ(encode_integer(Dtype::f32, -3), 0xc0400000u);
  EXPECT_EQ(encode_integer(Dtype::bf16, 1), 0x3f80u);
  EXPECT_EQ(encode_integer(Dtype::bf16, -192), 0xc340u);
  EXPECT_EQ(encode_integer(Dtype::f16, 1), 0x3c00u);
  EXPECT_EQ(encode_integer(Dtype::f16, -2), 0xc000u);
  EXPECT_EQ(encode_integer(Dtype::f16, 3), 0x4200u);
  EXPECT_EQ(encode_integer(Dtype::e4m3, 1), 0x38u);
  EXPECT_EQ(encode_integer(Dtype::e4m3, -3), 0xc4u);
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::e4m3}) {
    EXPECT_EQ(encode_integer(dtype, 0), 0u);
  }
  EXPECT_THROW(encode_integer(Dtype::i32, 1), std::invalid_argument);
}

TEST(DecodeE4m3, FollowsTheDefinition) {
  for (int value = -16; value <= 16; ++value) {
    EXPECT_EQ(decode_e4m3(static_cast<std::uint8_t>(encode_integer(Dtype::e4m3, value))), value);
  }
  EXPECT_EQ(decode_e4m3(0x7e), 448.0f);
  EXPECT_EQ(decode_e4m3(0x01), 0x1p-9f);
  EXPECT_EQ(decode_e4m3(0x88), -0x1p-6f);
  EXPECT_NE(decode_e4m3(0x7f), decode_e4m3(0x7f));
}

TEST(MakeRoutes, AreDistinctInsideARouteAndTheSameEveryTime) {
  BenchSettings settings;
  settings.experts = 10;
  for (const RouteShape shape : {RouteShape::uniform, RouteShape::zipf}) {
    settings.routes = shape;
    const std::vector<std::int64_t> routes = make_routes(settings, 200, 1);
    ASSERT_EQ(routes.size(), 200u * 8);
    for (std::size_t t = 0; t < 200; ++t) {
      const std::set<std::int64_t> route(&routes[t * 8], &routes[t * 8] + 8);
      EXPECT_EQ(route.size(), 8u);
      EXPECT_GE(*route.begin(), 0);
      EXPECT_LT(*route.rbegin(), 10);
    }
    EXPECT_EQ(routes, make_routes(settings, 200, 1));
    EXPECT_NE(routes, make_routes(settings, 200, 2));
  }
}

TEST(MakeRoutes, ZipfPrefersTheFirstExperts) {
  BenchSettings settings;
  settings.topk = 1;
  const auto first = [&] {
    const auto routes = make_routes(settings, 6400, 0);
    return std::count(routes.begin(), routes.end(), 0);
  };
  EXPECT_NEAR(static_cast<double>(first()), 100, 40);  // 6400 / 64
  settings.routes = RouteShape::zipf;
  EXPECT_NEAR(static_cast<double>(first()), 1349, 150);  // 6400 / (1 + 1/2 + ... + 1/64)
}

TEST(RankOfExpert, FirstRanksHoldOneMore) {
  std::vector<int> ranks;
  for (std::int64_t e = 0; e < 7; ++e) ranks.push_back(rank_of_expert(e, 7, 3));
  EXPECT_EQ(ranks, (std::vector<int>{0, 0, 0, 1, 1, 2, 2}));
  EXPECT_EQ(rank_of_expert(1, 2, 5), 1);  // fewer experts than ranks
}

TEST(CountRows, CountsDestinationsOnce) {
  BenchSettings settings;
  settings.ranks = 2;
  settings.experts = 4;
  settings.topk = 2;
  const BenchRows rows = count_rows(settings, {0, 1, 1, 2, 3, 2}, 3, 0);
  EXPECT_EQ(rows.rows, 4);  // {0}, {0, 1}, {1}
  EXPECT_EQ(rows.rows_to_self, 2);
  EXPECT_EQ(rows.slots, 6);
  EXPECT_EQ(rows.slots_to_self, 3);
}

TEST(RowPattern, TellsRowsApart) {
  const RowPattern pattern(7, 64, Dtype::bf16);
  std::vector<std::byte> rows(10 * pattern.row_bytes());
  pattern.fill(rows.data(), 3, 10);
  for (std::int64_t t = 0; t < 10; ++t) {
    const std::byte* row = rows.data() + static_cast<std::size_t>(t) * pattern.row_bytes();
    EXPECT_TRUE(pattern.matches(row, 3, t));
    EXPECT_FALSE(pattern.matches(row, 2, t));
    EXPECT_FALSE(pattern.matches(row, 3, t + 1));
  }
  rows[5] ^= std::byte{1};
  EXPECT_FALSE(pattern.matches(rows.data(), 3, 0));
}

TEST(RowPattern, MultipliesByTheFactor) {
  const RowPattern once(7, 32, Dtype::f32);
  const RowPattern thrice(7, 32, Dtype::f32, 3);
  std::vector<float> a(32);
  std::vector<float> b(32);
  std::memcpy(a.data(), once.row(1, 2), once.row_bytes());
  std::memcpy(b.data(), thrice.row(1, 2), thrice.row_bytes());
  for (std::size_t c = 0; c < 32; ++c) {
    EXPECT_EQ(a[c], static_cast<float>(once.value(1, 2, static_cast<std::int64_t>(c))));
    EXPECT_EQ(3 * a[c], b[c]);
  }
}

}  // namespace
}  // namespace ferry::cli

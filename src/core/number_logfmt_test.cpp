#include "core/number/logfmt.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace ferry {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kMax = std::numeric_limits<float>::max();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Coded {
  std::array<std::uint8_t, kScaleBlock> low{};
  std::array<std::uint8_t, kScaleBlock / 4> high{};
  LogfmtRange range{};
  std::vector<float> values{};
};

Coded there_and_back(const std::vector<float>& block) {
  Coded coded;
  coded.range =
      logfmt_encode_block(block.data(), block.size(), coded.low.data(), coded.high.data());
  coded.values.resize(block.size());
  logfmt_decode_block(coded.low.data(), coded.high.data(), block.size(), coded.range,
                      coded.values.data());
  return coded;
}

std::vector<double> levels_of(const LogfmtRange& range) {
  std::vector<double> levels;
  const LogfmtDecoder decoder(range);
  for (std::int32_t l = 1; l <= kLogfmtLevels; ++l) levels.push_back(decoder.value(l));
  return levels;
}

/// The block's range as the definition says, without the encoder's way of finding it.
struct Extremes {
  double high = 0, low = 0;
  explicit Extremes(const std::vector<float>& block) {
    for (const float x : block) {
      const double a = std::fabs(static_cast<double>(x));
      if (!std::isfinite(a) || a < 0x1p-126) continue;
      high = std::max(high, a);
      low = low == 0 ? a : std::min(low, a);
    }
    low = std::max({low, high * 0x1p-32, high > 0 ? 0x1p-126 : 0});
  }
};

void expect_value(float x, float got, const std::vector<double>& levels, const Extremes& extremes) {
  if (std::isnan(x)) {
    EXPECT_TRUE(std::isnan(got));
    return;
  }
  const double a = std::fabs(static_cast<double>(x)),
               error = std::fabs(static_cast<double>(got) - x);
  if (std::isinf(x) || a < 0x1p-126) {
    EXPECT_EQ(got, std::isinf(x) ? x : 0.0f);
    return;
  }
  double best = a;  // to zero
  for (const double level : levels) best = std::min(best, std::fabs(level - a));
  EXPECT_EQ(error, best) << "not the nearest level of " << x;
  if (a < extremes.low) {
    EXPECT_LE(error, extremes.low / 2);
    return;
  }
  const double octaves = std::log2(extremes.high / extremes.low);
  EXPECT_LE(error, a * ((std::exp2(octaves / 505) - 1) / 2 + 5e-6)) << x << ", octaves " << octaves;
}

float value_of_kind(int kind, float unit, std::mt19937& random) {
  std::normal_distribution<float> normal;
  switch (kind) {
    case 0: return normal(random) * unit;
    case 1: return std::exp(normal(random) * 6) * unit * (random() % 2 == 0 ? 1.0f : -1.0f);
    case 2: return unit * (1 + std::ldexp(static_cast<float>(random() % 256), -8));
    case 3: return unit * (1 + std::ldexp(static_cast<float>(random() % 4), -23));
    case 4: return number_detail::float_of(static_cast<std::uint32_t>(random()));
    default: return random() % 3 == 0 ? 0.0f : unit * 3;
  }
}

TEST(Logfmt, EveryValueGetsTheNearestLevelWithinTheBound) {
  std::mt19937 random(20261121);
  for (int trial = 0; trial < 3000 && !HasFailure(); ++trial) {
    SCOPED_TRACE("trial " + std::to_string(trial));
    const float unit = std::ldexp(1.0f, static_cast<int>(random() % 200) - 100);
    std::vector<float> block(4 * (1 + random() % 32));
    for (float& x : block) {
      x = value_of_kind(trial % 6, unit, random);
      if (trial % 7 < 3) x = to_float(from_float<Bf16>(x));
    }
    const Coded coded = there_and_back(block);
    const std::vector<double> levels = levels_of(coded.range);
    ASSERT_TRUE(std::is_sorted(levels.begin(), levels.end()));
    const Extremes extremes(block);
    ASSERT_EQ(coded.range.lowest, static_cast<float>(extremes.low));
    for (std::size_t i = 0; i < block.size(); ++i) {
      expect_value(block[i], coded.values[i], levels, extremes);
    }
  }
}

TEST(Logfmt, OneMagnitudeIsExact) {
  for (const float x : {1.0f, 3.0f, 0x1p-126f, kMax, 0.1f}) {
    const Coded coded = there_and_back({x, -x, 0.0f, x});
    EXPECT_EQ(coded.values, (std::vector<float>{x, -x, 0.0f, x}));
    EXPECT_EQ(coded.range.step, 0.0f);
  }
}

TEST(Logfmt, NothingButZerosAndWhatIsNotFinite) {
  EXPECT_EQ(there_and_back({0.0f, -0.0f, 0x1p-130f, -0x1p-149f}).values, std::vector<float>(4));
  const Coded coded = there_and_back({kInfinity, -kInfinity, kNan, 0.0f});
  EXPECT_EQ(coded.values[0], kInfinity);
  EXPECT_EQ(coded.values[1], -kInfinity);
  EXPECT_TRUE(std::isnan(coded.values[2]));
  EXPECT_EQ(coded.values[3], 0.0f);
  EXPECT_EQ(coded.range.lowest, 0.0f);
}

TEST(Logfmt, WhatIsNotFiniteLeavesItsNeighboursAlone) {
  const Coded alone = there_and_back({1.0f, -2.0f, 5.0f, 0.0f});
  const Coded beside =
      there_and_back({1.0f, -2.0f, 5.0f, 0.0f, kNan, kInfinity, -kNan, -kInfinity});
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(alone.values[i], beside.values[i]);
}

TEST(Logfmt, SmallOnesRoundToZeroOrTheLowest) {
  // 2^32 below the largest, and less.
  const Coded coded = there_and_back({0x1p40f, 0x1p8f, 0x1p7f, 0x1.fffffep6f});
  EXPECT_EQ(coded.range.lowest, 0x1p8f);
  EXPECT_NEAR(coded.values[0], 0x1p40f, 0x1p40f * 5e-6f);
  EXPECT_EQ(coded.values[1], 0x1p8f);
  EXPECT_EQ(coded.values[2], 0x1p8f);
  EXPECT_EQ(coded.values[3], 0.0f);
}

/// Bits that the other side of a network computes, too: they must not change.
TEST(Logfmt, CodesOfABlock) {
  const std::vector<float> block{1.0f, -1024.0f, 3.0f, 0.0f, -7.7f, 100.0f, kNan, -kInfinity};
  const Coded coded = there_and_back(block);
  std::vector<int> codes;
  for (std::size_t i = 0; i < block.size(); ++i) {
    codes.push_back(coded.low[i] | ((coded.high[i / 4] >> (2 * (i % 4))) & 3) << 8);
  }
  EXPECT_EQ(coded.range.lowest, 1.0f);
  EXPECT_EQ(coded.range.step, 10.0f / 509.0f);
  EXPECT_EQ(codes, (std::vector<int>{1, 512 + 510, 82, 0, 512 + 151, 339, 512, 512 + 511}));
}

TEST(Logfmt, RangesThatNoEncoderMakesHaveValues) {
  for (const float lowest : {0.0f, -1.0f, kNan, kInfinity, 0x1p-140f, kMax, 1.0f}) {
    for (const float step : {0.0f, -1.0f, kNan, kInfinity, 1e30f, 32.0f / 509.0f}) {
      const LogfmtDecoder decoder({lowest, step});
      for (std::int32_t code = 1; code <= kLogfmtLevels; ++code) {
        ASSERT_TRUE(std::isfinite(decoder.value(code))) << lowest << " " << step << " " << code;
      }
    }
  }
}

}  // namespace
}  // namespace ferry

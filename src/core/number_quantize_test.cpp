#include "core/number/quantize.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/number/nvfp4.hpp"
#include "core/number/ue8m0.hpp"
#include "core/number_test_oracle.hpp"

namespace ferry {
namespace {

using oracle::bits_from_float;
using oracle::Model;

constexpr float kF32Infinity = std::numeric_limits<float>::infinity();
constexpr float kF32Max = std::numeric_limits<float>::max();
constexpr float kF32Nan = std::numeric_limits<float>::quiet_NaN();

template <class Q>
struct Target;
template <>
struct Target<E4m3> {
  static constexpr float kLargestValue = 448.0f;
  static Model model() { return oracle::e4m3(); }
};
template <>
struct Target<E5m2> {
  static constexpr float kLargestValue = 57344.0f;
  static Model model() { return oracle::e5m2(); }
};

float oracle_amax(const std::vector<float>& block) {
  float amax = 1e-4f;
  for (float x : block) {
    if (std::isnan(x)) continue;
    amax = std::max(amax, std::isinf(x) ? kF32Max : std::fabs(x));
  }
  return amax;
}

/// The smallest power of two s with largest * s >= amax, by trying: exact in double.
double oracle_power(float amax, float largest) {
  int power = -200;
  while (std::ldexp(static_cast<double>(largest), power) < static_cast<double>(amax)) ++power;
  return std::ldexp(1.0, power);
}

template <class Q>
void expect_block_like_oracle(const Model& model, const std::vector<float>& block,
                              bool round_scale) {
  std::vector<Q> codes(block.size() + 1, Q{0xa5});
  const float scale = quantize_block(block.data(), block.size(), codes.data(), round_scale);
  ASSERT_EQ(codes.back().bits, 0xa5) << "wrote past the block";

  const float amax = oracle_amax(block);
  const float largest = Target<Q>::kLargestValue;
  float expected_scale = amax / largest;
  float inv = largest / amax;
  if (round_scale) {
    const double power = oracle_power(amax, largest);
    expected_scale = static_cast<float>(power);
    inv = static_cast<float>(1.0 / power);
    ASSERT_EQ(static_cast<double>(inv) * power, 1.0);
  }
  ASSERT_EQ(scale, expected_scale) << "amax " << amax;
  for (std::size_t i = 0; i < block.size(); ++i) {
    ASSERT_EQ(codes[i].bits, model.encode(block[i] * inv))
        << "value " << block[i] << ", amax " << amax << ", round_scale " << round_scale;
  }
}

/// Blocks of all sizes: values around a random power, some with NaN, infinity, zero, subnormals.
std::vector<std::vector<float>> random_blocks(std::size_t count, std::uint32_t seed) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<float> power(-40.0f, 39.0f), unit(-1.0f, 1.0f);
  const std::vector<float> specials = oracle::special_floats();
  std::vector<std::vector<float>> blocks(count);
  for (std::size_t b = 0; b < count; ++b) {
    blocks[b].resize(b % 3 == 0 ? kScaleBlock : 1 + generator() % kScaleBlock);
    const double size = std::pow(10.0, b % 2 == 0 ? power(generator) / 10 : power(generator));
    for (float& x : blocks[b]) {
      x = static_cast<float>(size * unit(generator));
      if (b % 7 == 0 && generator() % 16 == 0) x = specials[generator() % specials.size()];
    }
  }
  return blocks;
}

template <class Q>
class NumberQuantize : public testing::Test {};
using Formats = testing::Types<E4m3, E5m2>;
TYPED_TEST_SUITE(NumberQuantize, Formats);

TYPED_TEST(NumberQuantize, RandomBlocksFollowTheDefinition) {
  const Model model = Target<TypeParam>::model();
  for (const auto& block : random_blocks(3000, oracle::seed())) {
    expect_block_like_oracle<TypeParam>(model, block, false);
    expect_block_like_oracle<TypeParam>(model, block, true);
    if (this->HasFatalFailure()) return;
  }
}

TYPED_TEST(NumberQuantize, RoundedScaleIsExactAroundEveryPower) {
  for (int power = -20; power < 128; ++power) {
    const float centre = std::ldexp(1.75f, power);
    for (float amax : {std::nextafter(centre, 0.0f), centre, std::nextafter(centre, kF32Infinity),
                       std::ldexp(1.0f, power)}) {
      if (!(amax >= kMinAmax) || std::isinf(amax)) continue;
      const BlockScale block = block_scale<TypeParam>(amax, true);
      const double expected = oracle_power(amax, Target<TypeParam>::kLargestValue);
      ASSERT_EQ(static_cast<double>(block.scale), expected) << amax;
      ASSERT_EQ(static_cast<double>(block.inv), 1.0 / expected) << amax;
      ASSERT_TRUE(std::isnormal(block.scale) && std::isnormal(block.inv)) << amax;
    }
  }
}

TYPED_TEST(NumberQuantize, SpecialValues) {
  const Model model = Target<TypeParam>::model();
  const auto largest = static_cast<std::uint8_t>(model.largest_code());
  const float values[] = {kF32Nan, 1.0f, -kF32Infinity, kF32Infinity, kF32Max, -0.0f, -kF32Nan};
  TypeParam codes[7];
  float back[7];
  const float scale = quantize_block(values, 7, codes);
  EXPECT_EQ(scale, kF32Max / Target<TypeParam>::kLargestValue);
  EXPECT_EQ(codes[0].bits, 0x7f);
  EXPECT_EQ(codes[1].bits, 0);
  EXPECT_EQ(codes[2].bits, 0x80 | largest);
  EXPECT_EQ(codes[3].bits, largest);
  EXPECT_EQ(codes[4].bits, largest);
  EXPECT_EQ(codes[5].bits, 0x80);
  EXPECT_EQ(codes[6].bits, 0x7f);
  dequantize_block(codes, 7, scale, back);
  EXPECT_TRUE(std::isnan(back[0]));
  EXPECT_EQ(back[2], -kF32Max);
  EXPECT_EQ(back[3], kF32Max);

  const float beside_nan[] = {kF32Nan, 2.0f, -1.0f};
  EXPECT_EQ(quantize_block(beside_nan, 3, codes), 2.0f / Target<TypeParam>::kLargestValue);
  EXPECT_EQ(codes[1].bits, largest);
  const float only_nan[] = {kF32Nan, -kF32Nan};
  EXPECT_EQ(quantize_block(only_nan, 2, codes), 1e-4f / Target<TypeParam>::kLargestValue);
  const float zeros[] = {0.0f, -0.0f, 1e-42f};
  EXPECT_EQ(quantize_block(zeros, 3, codes), 1e-4f / Target<TypeParam>::kLargestValue);
  EXPECT_EQ(codes[1].bits, 0x80);
  EXPECT_EQ(codes[2].bits, 0);
  EXPECT_EQ(block_amax(values, 0), 1e-4f);
}

TYPED_TEST(NumberQuantize, NarrowInputsGoThroughFloat) {
  std::mt19937 generator(oracle::seed());
  for (int round = 0; round < 200; ++round) {
    std::vector<Bf16> bf16(kScaleBlock);
    std::vector<Fp16> fp16(kScaleBlock);
    for (auto& x : bf16) x.bits = static_cast<std::uint16_t>(generator());
    for (auto& x : fp16) x.bits = static_cast<std::uint16_t>(generator());
    const auto check = [&](const auto& narrow) {
      std::vector<float> wide;
      for (auto x : narrow) wide.push_back(to_float(x));
      std::vector<TypeParam> expected(wide.size()), codes(wide.size());
      const float expected_scale =
          quantize_block(wide.data(), wide.size(), expected.data(), round % 2 == 1);
      ASSERT_EQ(quantize_block(narrow.data(), narrow.size(), codes.data(), round % 2 == 1),
                expected_scale);
      ASSERT_EQ(codes, expected);
    };
    check(bf16);
    check(fp16);
  }
}

TYPED_TEST(NumberQuantize, RowsHaveAShortLastBlockAndComeBack) {
  std::mt19937 generator(oracle::seed());
  std::normal_distribution<float> normal(0.0f, 3.0f);
  for (std::size_t hidden : {0, 1, 16, 127, 128, 129, 256, 2880, 7168}) {
    for (bool round_scale : {false, true}) {
      std::vector<float> values(hidden), back(hidden);
      for (float& x : values) x = normal(generator);
      std::vector<TypeParam> codes(hidden);
      std::vector<float> scales((hidden + 127) / 128 + 1, -1.0f);
      ASSERT_EQ(scale_count(hidden) + 1, scales.size());
      quantize_row(values.data(), hidden, codes.data(), scales.data(), round_scale);
      dequantize_row(codes.data(), scales.data(), hidden, back.data());
      EXPECT_EQ(scales.back(), -1.0f) << "wrote past the scales";
      // Half a step of the mantissa, or half a subnormal step of the block's scale.
      const float relative = std::is_same_v<TypeParam, E4m3> ? 1.0f / 16 : 1.0f / 8;
      for (std::size_t i = 0; i < hidden; ++i) {
        const float step = to_float(TypeParam{1}) * scales[i / kScaleBlock];
        const float bound = std::max(relative * std::fabs(values[i]), step / 2) * 1.0001f;
        ASSERT_LE(std::fabs(back[i] - values[i]), bound) << hidden << " channel " << i;
      }
      std::vector<Bf16> narrow(hidden);
      dequantize_row(codes.data(), scales.data(), hidden, narrow.data());
      for (std::size_t i = 0; i < hidden; ++i) {
        ASSERT_EQ(narrow[i], from_float<Bf16>(to_float(codes[i]) * scales[i / kScaleBlock]));
      }
    }
  }
}

#if defined(__SSE2__)
TYPED_TEST(NumberQuantize, DoesNotDependOnFlushingSubnormals) {
  for (const auto& block : random_blocks(1000, oracle::seed())) {
    for (bool round_scale : {false, true}) {
      std::vector<TypeParam> codes(block.size()), flushed(block.size());
      std::vector<float> back(block.size()), back_flushed(block.size());
      const float scale = quantize_block(block.data(), block.size(), codes.data(), round_scale);
      dequantize_block(codes.data(), block.size(), scale, back.data());
      float other = 0;
      {
        const oracle::FlushSubnormals flush;
        other = quantize_block(block.data(), block.size(), flushed.data(), round_scale);
        dequantize_block(flushed.data(), block.size(), other, back_flushed.data());
      }
      ASSERT_EQ(bits_from_float(scale), bits_from_float(other));
      ASSERT_EQ(codes, flushed);
      for (std::size_t i = 0; i < block.size(); ++i) {
        ASSERT_EQ(bits_from_float(back[i]), bits_from_float(back_flushed[i]));
      }
    }
  }
}
#endif

struct Nvfp4Row {
  std::vector<std::uint8_t> codes;
  std::vector<E4m3> scales;
  bool operator==(const Nvfp4Row&) const = default;
};

Nvfp4Row nvfp4_of(const std::vector<float>& row, float g) {
  Nvfp4Row made{std::vector<std::uint8_t>(row.size() / 2 + 1, 0xa5),
                std::vector<E4m3>(row.size() / 16 + 1, E4m3{0xa5})};
  quantize_nvfp4(row.data(), row.size(), g, made.codes.data(), made.scales.data());
  EXPECT_EQ(made.codes.back(), 0xa5) << "wrote past the row";
  EXPECT_EQ(made.scales.back().bits, 0xa5) << "wrote past the scales";
  return made;
}

/// By the tables of both formats, with the products rounded to float as the header says.
void expect_nvfp4_like_oracle(const std::vector<float>& row, float g) {
  const Nvfp4Row made = nvfp4_of(row, g);
  for (std::size_t at = 0; at < row.size(); at += 16) {
    float amax = 0;
    for (std::size_t i = at; i < at + 16; ++i) {
      if (!std::isnan(amax)) amax = std::isnan(row[i]) ? row[i] : std::max(amax, std::fabs(row[i]));
    }
    if (std::isinf(amax)) amax = kF32Max;
    const std::uint32_t scale = oracle::e4m3().encode(g * (amax / 6.0f));
    ASSERT_EQ(made.scales[at / 16].bits, scale) << amax << " times " << g;
    if (std::isnan(amax)) continue;
    const auto inv = scale == 0 ? 0.0f : g / static_cast<float>(oracle::e4m3().value(scale));
    for (std::size_t i = at; i < at + 16; ++i) {
      const std::uint32_t code = made.codes[i / 2] >> (i % 2 * 4) & 0xfu;
      ASSERT_EQ(code, oracle::e2m1().encode(row[i] * inv)) << row[i] << " of " << amax;
    }
  }
}

TEST(NumberNvfp4, IsWhatItsDefinitionSays) {
  std::mt19937 generator(oracle::seed());
  std::normal_distribution<float> normal;
  for (const float g : {1.0f, 448.0f, 1234.5f, 0x1p-100f, 0x1p100f}) {
    std::vector<float> row(16 * 400);
    for (float& x : row) x = normal(generator) * 448 * 6 / 5 / g;
    row[0] = kF32Nan;
    row[16] = kF32Infinity;
    row[33] = -kF32Infinity;
    std::fill_n(row.begin() + 48, 16, 0.0f);
    std::fill_n(row.begin() + 64, 16, -1e-30f / g);
    expect_nvfp4_like_oracle(row, g);
    expect_nvfp4_like_oracle(oracle::random_floats(16 * 200, generator()), g);
  }
}

#if defined(__SSE2__)
TEST(NumberNvfp4, DoesNotDependOnFlushingSubnormals) {
  for (const float g : {1.0f, 0x1p-100f, 0x1p100f}) {
    const std::vector<float> row = oracle::random_floats(16 * 2000, oracle::seed());
    const Nvfp4Row made = nvfp4_of(row, g);
    const oracle::FlushSubnormals flush;
    ASSERT_EQ(made, nvfp4_of(row, g));
  }
}
#endif

TEST(NumberUe8m0, EveryCodeIsItsPower) {
  for (int code = 0; code < 255; ++code) {
    const float scale = scale_from_ue8m0(static_cast<std::uint8_t>(code));
    ASSERT_EQ(static_cast<double>(scale), std::ldexp(1.0, code - 127));
    ASSERT_EQ(ue8m0_from_scale(scale), code);
  }
  EXPECT_TRUE(std::isnan(scale_from_ue8m0(255)));
  EXPECT_EQ(ue8m0_from_scale(kF32Nan), 255);
  EXPECT_EQ(ue8m0_from_scale(kF32Infinity), 255);
}

TEST(NumberUe8m0, PacksFourAWordLowestByteFirst) {
  const float scales[] = {1.0f, 2.0f, 4.0f, 0.5f, 0.25f};
  std::uint32_t words[3] = {1, 1, 0xdeadbeef};
  ASSERT_EQ(ue8m0_word_count(5), 2u);
  EXPECT_EQ(ue8m0_word_count(0), 0u);
  EXPECT_EQ(ue8m0_word_count(4), 1u);
  pack_ue8m0(scales, 5, words);
  EXPECT_EQ(words[0], 0x7e81807fu);
  EXPECT_EQ(words[1], 0x0000007du);
  EXPECT_EQ(words[2], 0xdeadbeefu);
}

TEST(NumberUe8m0, CarriesEveryRoundedScale) {
  std::mt19937 generator(oracle::seed());
  for (int i = 0; i < 10'000; ++i) {
    const float x = oracle::float_from_bits(static_cast<std::uint32_t>(generator()));
    const float amax = block_amax(&x, 1);
    for (float scale : {block_scale<E4m3>(amax, true).scale, block_scale<E5m2>(amax, true).scale}) {
      ASSERT_EQ(scale_from_ue8m0(ue8m0_from_scale(scale)), scale) << x;
    }
  }
}

}  // namespace
}  // namespace ferry

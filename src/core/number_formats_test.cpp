#include "core/number/formats.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/number/nvfp4.hpp"
#include "core/number_test_oracle.hpp"

namespace ferry {
namespace {

using oracle::bits_from_float;
using oracle::float_from_bits;
using oracle::Model;

static_assert(sizeof(Bf16) == 2 && sizeof(Fp16) == 2 && sizeof(E4m3) == 1 && sizeof(E5m2) == 1);
static_assert(from_float<Bf16>(1.0f) == Bf16{0x3f80} && from_float<Fp16>(1.0f) == Fp16{0x3c00});
static_assert(from_float<E4m3>(-448.0f) == E4m3{0xfe} && to_float(E5m2{0x7b}) == 57344.0f);
static_assert(kDtypeOf<float> == Dtype::f32 && kDtypeOf<E4m3> == Dtype::e4m3);
static_assert(size_of(kDtypeOf<Bf16>) == sizeof(Bf16) && size_of(kDtypeOf<Fp16>) == sizeof(Fp16));

template <class T>
Model model_of();
template <>
Model model_of<Bf16>() {
  return oracle::bf16();
}
template <>
Model model_of<Fp16>() {
  return oracle::fp16();
}
template <>
Model model_of<E4m3>() {
  return oracle::e4m3();
}
template <>
Model model_of<E5m2>() {
  return oracle::e5m2();
}

/// Narrows all of `inputs` in one loop (which the compiler may vectorise) and compares with the
/// model; reports the first few differences.
template <class T>
void expect_like_model(const Model& model, const std::vector<float>& inputs) {
  std::vector<T> codes(inputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) codes[i] = from_float<T>(inputs[i]);
  int shown = 0;
  for (std::size_t i = 0; i < inputs.size() && shown < 5; ++i) {
    const std::uint32_t expected = model.encode(inputs[i]);
    if (codes[i].bits == expected) continue;
    ++shown;
    ADD_FAILURE() << std::hex << "float 0x" << bits_from_float(inputs[i]) << " (" << inputs[i]
                  << "): got 0x" << +codes[i].bits << ", expected 0x" << expected;
  }
}

template <>
Model model_of<E2m1>() {
  return oracle::e2m1();
}

template <class T>
class NumberFormats : public testing::Test {};
using Types = testing::Types<Bf16, Fp16, E4m3, E5m2, E2m1>;
TYPED_TEST_SUITE(NumberFormats, Types);

TYPED_TEST(NumberFormats, WidensEveryCodeExactly) {
  const Model model = model_of<TypeParam>();
  const bool has_infinity = !std::is_same_v<TypeParam, E4m3>;  // E2m1 has finite codes alone
  for (std::uint32_t code = 0; code < 2 * model.sign_bit(); ++code) {
    const float x = to_float(TypeParam{static_cast<decltype(TypeParam::bits)>(code)});
    const std::uint32_t magnitude = code & (model.sign_bit() - 1);
    ASSERT_EQ(std::signbit(x), code != magnitude) << code;
    if (magnitude <= model.largest_code()) {
      ASSERT_EQ(std::fabs(x), model.value(magnitude)) << code;
    } else if (has_infinity && magnitude == model.largest_code() + 1) {
      ASSERT_TRUE(std::isinf(x)) << code;
    } else {
      ASSERT_TRUE(std::isnan(x)) << code;
    }
  }
}

TYPED_TEST(NumberFormats, RoundTripsEveryFiniteCode) {
  const Model model = model_of<TypeParam>();
  for (std::uint32_t code = 0; code <= model.largest_code(); ++code) {
    for (std::uint32_t sign : {0u, model.sign_bit()}) {
      const TypeParam value{static_cast<decltype(TypeParam::bits)>(code | sign)};
      ASSERT_EQ(from_float<TypeParam>(to_float(value)), value) << code;
    }
  }
}

TYPED_TEST(NumberFormats, NarrowsBoundariesAndTheirNeighbours) {
  const Model model = model_of<TypeParam>();
  expect_like_model<TypeParam>(model, model.boundaries());
}

TYPED_TEST(NumberFormats, NarrowsSpecialsAndRandomBits) {
  const Model model = model_of<TypeParam>();
  expect_like_model<TypeParam>(model, oracle::special_floats());
  expect_like_model<TypeParam>(model, oracle::random_floats(1'000'000, oracle::seed()));
}

TYPED_TEST(NumberFormats, NarrowsInsideItsRange) {
  const Model model = model_of<TypeParam>();
  std::mt19937 generator(oracle::seed());
  std::uniform_real_distribution<double> power(std::log2(model.value(1)) - 3,
                                               std::log2(model.value(model.largest_code())) + 0.1);
  std::vector<float> inputs(300'000);
  for (float& x : inputs) {
    const double magnitude = std::exp2(power(generator));
    x = static_cast<float>(generator() & 1u ? magnitude : -magnitude);
  }
  expect_like_model<TypeParam>(model, inputs);
}

TEST(NumberFormatsExamples, SaysWhatTheTableSays) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(from_float<E4m3>(infinity).bits, 0x7e);
  EXPECT_EQ(from_float<E4m3>(-infinity).bits, 0xfe);
  EXPECT_EQ(from_float<E4m3>(-nan).bits, 0x7f);
  EXPECT_EQ(from_float<E4m3>(std::ldexp(1.0f, -9)).bits, 0x01);
  EXPECT_EQ(from_float<E4m3>(std::ldexp(1.0f, -10)).bits, 0x00);  // a tie, to even
  EXPECT_EQ(from_float<E4m3>(std::ldexp(3.0f, -10)).bits, 0x02);  // a tie, to even
  EXPECT_EQ(from_float<E5m2>(1e9f).bits, 0x7b);
  EXPECT_EQ(from_float<E5m2>(-infinity).bits, 0xfb);
  EXPECT_TRUE(std::isinf(to_float(E5m2{0xfc})));
  EXPECT_TRUE(std::isnan(to_float(E4m3{0xff})));
  EXPECT_EQ(from_float<Fp16>(65519.0f).bits, 0x7bff);
  EXPECT_EQ(from_float<Fp16>(65520.0f).bits, 0x7c00);
  EXPECT_EQ(from_float<Bf16>(std::numeric_limits<float>::max()).bits, 0x7f80);
  EXPECT_EQ(from_float<Bf16>(float_from_bits(0x7f800001)).bits, 0x7fff);  // signalling NaN
  EXPECT_EQ(from_float<Bf16>(-0.0f).bits, 0x8000);
}

#if defined(__SSE2__)
TEST(NumberFormatsExamples, DoNotDependOnFlushingSubnormals) {
  const std::vector<float> inputs = oracle::random_floats(200'000, oracle::seed());
  std::vector<Bf16> bf16(inputs.size());
  std::vector<Fp16> fp16(inputs.size());
  std::vector<E4m3> e4m3(inputs.size());
  std::vector<E5m2> e5m2(inputs.size());
  std::vector<float> widened(65536);
  {
    const oracle::FlushSubnormals flush;
    ASSERT_TRUE(flush.works());
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      bf16[i] = from_float<Bf16>(inputs[i]);
      fp16[i] = from_float<Fp16>(inputs[i]);
      e4m3[i] = from_float<E4m3>(inputs[i]);
      e5m2[i] = from_float<E5m2>(inputs[i]);
    }
    for (std::uint32_t code = 0; code < 65536; ++code) {
      widened[code] = to_float(Fp16{static_cast<std::uint16_t>(code)});
    }
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    ASSERT_EQ(bf16[i], from_float<Bf16>(inputs[i])) << inputs[i];
    ASSERT_EQ(fp16[i], from_float<Fp16>(inputs[i])) << inputs[i];
    ASSERT_EQ(e4m3[i], from_float<E4m3>(inputs[i])) << inputs[i];
    ASSERT_EQ(e5m2[i], from_float<E5m2>(inputs[i])) << inputs[i];
  }
  for (std::uint32_t code = 0; code < 65536; ++code) {
    ASSERT_EQ(bits_from_float(widened[code]),
              bits_from_float(to_float(Fp16{static_cast<std::uint16_t>(code)})));
  }
}
#endif

/// All 2^32 floats, walking the model's table beside them. A minute; run by hand:
/// number_formats_test --gtest_also_run_disabled_tests --gtest_filter='*AllFloats*'
TYPED_TEST(NumberFormats, DISABLED_NarrowsAllFloats) {
  const Model model = model_of<TypeParam>();
  const std::uint32_t last =
      model.encode(std::numeric_limits<float>::infinity());  // infinity, or the largest
  std::uint32_t code = 0;
  for (std::uint32_t bits = 0; bits <= 0x7f800000u; ++bits) {
    const double x = static_cast<double>(float_from_bits(bits));
    while (code < last) {
      const double middle = (model.value(code) + model.value(code + 1)) / 2;
      if (x < middle || (x == middle && code % 2 == 0)) break;
      ++code;
    }
    ASSERT_EQ(from_float<TypeParam>(float_from_bits(bits)).bits, code) << bits;
    ASSERT_EQ(from_float<TypeParam>(float_from_bits(bits | 0x80000000u)).bits,
              code | model.sign_bit())
        << bits;
  }
  for (std::uint32_t bits = 0x7f800001u; bits <= 0x7fffffffu; ++bits) {
    ASSERT_EQ(from_float<TypeParam>(float_from_bits(bits)).bits, model.nan()) << bits;
    ASSERT_EQ(from_float<TypeParam>(float_from_bits(bits | 0x80000000u)).bits, model.nan()) << bits;
  }
}

}  // namespace
}  // namespace ferry

// The codes of collectives: bit for bit by their definition, on every variant of the kernels.
#include "host/kernels/codec.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/number.hpp"
#include "host/kernels/kernels.hpp"
#include "host/kernels/test_codec.hpp"

namespace ferry::host::test {
namespace {

constexpr unsigned kSeed = 20261124;
constexpr ReduceFormat kCoded[] = {ReduceFormat::bf16, ReduceFormat::f16, ReduceFormat::e4m3,
                                   ReduceFormat::e5m2};

std::vector<const Kernels*> variants() {
  std::vector<const Kernels*> all{&kernels(), &kBaselineKernels};
#if defined(__x86_64__)
  if (std::string(kernels().name) == "avx512") all.push_back(&kAvx2Kernels);
#endif
  return all;
}

std::vector<float> back_and_forth(const Kernels& kernels, ReduceFormat format,
                                  const std::vector<float>& values, CodeError& told) {
  std::vector<std::uint32_t> codes(code_bytes(format, values.size()) / 4 + 2, 0x5a5a5a5a);
  std::vector<float> back(values.size() + 1, -7.0f);
  told = kernels.encode_codes({values.data(), values.size(), format, codes.data()});
  const auto* bytes = reinterpret_cast<const unsigned char*>(codes.data());
  EXPECT_EQ(bytes[code_bytes(format, values.size())], 0x5a) << "wrote too much";
  kernels.decode_codes({codes.data(), values.size(), format, back.data()});
  EXPECT_EQ(back.back(), -7.0f) << "wrote too much";
  back.pop_back();
  return back;
}

TEST(Codec, GivesWhatItsDefinitionSays) {
  std::mt19937 random(kSeed);
  std::normal_distribution<float> normal;
  for (const std::size_t count : {0, 1, 3, 127, 128, 129, 1000, 4096, 5001}) {
    for (const float unit : {1.0f, 1e-3f, 1e-7f, 1e-12f, 1e4f}) {
      std::vector<float> values(count);
      for (float& value : values) value = random() % 7 == 0 ? 0.0f : normal(random) * unit;
      for (const ReduceFormat format : kCoded) {
        if (format == ReduceFormat::f16 && unit > 1e3f) continue;
        const Known known = known_of(format, values);
        CodeError first;
        for (const Kernels* variant : variants()) {
          CodeError told;
          const std::vector<float> back = back_and_forth(*variant, format, values, told);
          ASSERT_EQ(back, known.values)
              << variant->name << ", " << name_of(format) << ", " << count << " of " << unit;
          EXPECT_FALSE(told.nonfinite || told.overflow);
          EXPECT_NEAR(told.error, known.told.error, 1e-3 * known.told.error);
          EXPECT_NEAR(told.signal, known.told.signal, 1e-3 * known.told.signal);
          if (variant == variants()[0]) first = told;
          EXPECT_EQ(told.error, first.error) << variant->name;
          EXPECT_EQ(told.signal, first.signal) << variant->name;
        }
      }
    }
  }
}

// Gradients may be far below the 1e-4 at which blocks of tokens stop being scaled.
TEST(Codec, SmallValuesKeepTheirPrecision) {
  std::mt19937 random(kSeed);
  std::normal_distribution<float> normal(0.0f, 1e-20f);
  std::vector<float> values(1024);
  for (float& value : values) value = normal(random);
  const CodeError told = kernels().encode_codes(
      {values.data(), values.size(), ReduceFormat::e4m3, std::vector<std::uint32_t>(512).data()});
  EXPECT_GT(told.signal, 0.0);
  EXPECT_LT(std::sqrt(told.error / told.signal), 0.04);
}

// Of values that are spread over many binades e4m3 loses the small ones, e5m2 only their digits.
TEST(Codec, E5m2KeepsARangeThatE4m3DoesNot) {
  std::vector<float> values(128);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = i == 0 ? 1.0f : 0x1.3p-20f;
  CodeError told;
  EXPECT_EQ(back_and_forth(kernels(), ReduceFormat::e4m3, values, told)[1], 0.0f);
  const float back = back_and_forth(kernels(), ReduceFormat::e5m2, values, told)[1];
  EXPECT_NEAR(back, values[1], 0.125f * values[1]);
}

TEST(Codec, SeesWhatAFormatCannotHold) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Kernels* variant : variants()) {
    for (const std::size_t at : {0, 127, 128, 299}) {
      const auto told = [&](float odd, ReduceFormat format) {
        std::vector<float> values(300, 0.5f);
        values[at] = odd;
        std::vector<std::uint32_t> codes(300);
        return variant->encode_codes({values.data(), values.size(), format, codes.data()});
      };
      for (const ReduceFormat format : kCoded) {
        for (const float odd : {nan, -nan, infinity, -infinity}) {
          EXPECT_TRUE(told(odd, format).nonfinite);
        }
        EXPECT_FALSE(told(1.0f, format).nonfinite || told(1.0f, format).overflow);
      }
      EXPECT_TRUE(told(-65520.0f, ReduceFormat::f16).overflow);
      EXPECT_FALSE(told(65519.0f, ReduceFormat::f16).overflow);
      EXPECT_TRUE(told(std::numeric_limits<float>::max(), ReduceFormat::bf16).overflow);
      EXPECT_FALSE(told(std::numeric_limits<float>::max(), ReduceFormat::e4m3).overflow);
    }
  }
}

// What shares a block with one that is far larger is lost, and the error says so.
TEST(Codec, ALargestElementDoesNotHideWhatItClears) {
  std::mt19937 random(kSeed);
  std::normal_distribution<float> normal;
  std::vector<float> values(32768);
  for (float& value : values) value = normal(random);
  std::vector<std::uint32_t> codes(values.size());
  const auto error = [&] {
    const CodeError told =
        kernels().encode_codes({values.data(), values.size(), ReduceFormat::e4m3, codes.data()});
    return told.error / told.signal;
  };
  const double usual = error();
  for (const float large : {1e7f, 1e20f, 3e38f}) {
    values[777] = large;
    EXPECT_GT(error(), 4 * usual) << large;
  }
  std::fill(values.begin(), values.end(), 3.3f);  // all are the largest
  EXPECT_EQ(kernels().encode_codes({values.data(), 128, ReduceFormat::e4m3, codes.data()}).error,
            0);
}

}  // namespace
}  // namespace ferry::host::test

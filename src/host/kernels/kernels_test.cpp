// Every variant of the kernels that this machine can run gives the bits of the baseline.
#include "host/kernels/kernels.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/number.hpp"
#include "engine/test_groups.hpp"

namespace ferry::host::test {

using namespace engine::test;
namespace {

std::vector<const Kernels*> all_kernels() {
  std::vector<const Kernels*> all{&kernels()};
#if defined(__x86_64__)
  if (std::string(kernels().name) == "avx512") all.push_back(&kAvx2Kernels);
#endif
  return all;
}

template <class T>
T from_bits(std::uint32_t bits) {
  if constexpr (sizeof(T) == 4) {
    return std::bit_cast<T>(bits);
  } else {
    return std::bit_cast<T>(static_cast<std::uint16_t>(bits));
  }
}

/// Random bits: NaN, infinities, subnormals and both zeros among them; half of them small numbers,
/// so that sums are not all NaN.
template <class T>
std::vector<T> values(std::mt19937& random, std::size_t count) {
  std::vector<T> all(count);
  for (T& value : all) {
    value = random() % 2 == 0
                ? from_bits<T>(static_cast<std::uint32_t>(random()))
                : from_float<T>(static_cast<float>(static_cast<int>(random() % 4001) - 2000) / 128);
  }
  return all;
}

/// The same bits; of two NaNs that meet in a sum, either payload may remain.
template <class T>
bool same_values(const std::vector<T>& a, const std::vector<T>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(to_float(a[i])) && std::isnan(to_float(b[i]))) continue;
    if (std::memcmp(&a[i], &b[i], sizeof(T)) != 0) return false;
  }
  return a.size() == b.size();
}

template <class T>
void same_sums(Dtype dtype) {
  std::mt19937 random(kSeed);
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  for (const std::int64_t columns : {1, 3, 8, 15, 16, 31, 33, 127, 500, 512, 513, 1031}) {
    for (const std::int64_t count : {0, 1, 2, 5, 8}) {
      const auto n = static_cast<std::size_t>(columns);
      std::vector<std::vector<T>> rows;
      std::vector<const void*> pointers;
      std::vector<float> weights;
      for (std::int64_t r = 0; r < count; ++r) {
        rows.push_back(values<T>(random, n));
        weights.push_back(static_cast<float>(random() % 1000) / 256 - 1);
      }
      for (const auto& row : rows) pointers.push_back(row.data());
      const auto bias0 = values<T>(random, n), bias1 = values<T>(random, n);
      for (const bool weighted : {false, true}) {
        for (int biases = 0; biases < 3; ++biases) {
          std::vector<T> expected(n + 1, from_bits<T>(0x5a5a5a5a)), got = expected;
          SumRows sum{.rows = pointers.data(),
                      .weights = weighted ? weights.data() : nullptr,
                      .count = count,
                      .bias0 = biases > 0 ? bias0.data() : nullptr,
                      .bias1 = biases > 1 ? bias1.data() : nullptr,
                      .out = expected.data(),
                      .columns = columns,
                      .dtype = dtype};
          kBaselineKernels.sum_rows(sum);
          for (const Kernels* variant : all_kernels()) {
            got.assign(n + 1, from_bits<T>(0x5a5a5a5a));
            sum.out = got.data();
            variant->sum_rows(sum);
            ASSERT_TRUE(same_values(got, expected))
                << variant->name << ", " << name_of(dtype) << ", columns " << columns << ", rows "
                << count << (weighted ? ", weighted" : "") << ", biases " << biases;
          }
          if (weighted || biases > 0) continue;
          // The baseline itself, against the definition.
          for (std::size_t i = 0; i < n; ++i) {
            float acc = 0;
            for (const auto& row : rows) acc += to_float(row[i]);
            const T want = from_float<T>(acc);
            const bool nan = std::isnan(acc);
            ASSERT_TRUE(nan ? std::isnan(to_float(expected[i]))
                            : std::memcmp(&want, &expected[i], sizeof(T)) == 0)
                << name_of(dtype) << ", column " << i;
          }
        }
      }
    }
  }
}

TEST(Kernels, SumsF32) {
  same_sums<float>(Dtype::f32);
}
TEST(Kernels, SumsBf16) {
  same_sums<Bf16>(Dtype::bf16);
}
TEST(Kernels, SumsFp16) {
  same_sums<Fp16>(Dtype::f16);
}

// The sum takes the place of every row, as in an all_reduce in registered memory.
template <class T>
void sums_in_place(Dtype dtype) {
  std::mt19937 random(kSeed + 4);
  SCOPED_TRACE("seed " + std::to_string(kSeed + 4));
  for (const std::int64_t columns : {1, 15, 64, 65, 127, 512, 1031}) {
    const auto n = static_cast<std::size_t>(columns);
    std::vector<std::vector<T>> rows;
    for (int r = 0; r < 4; ++r) rows.push_back(values<T>(random, n));
    const auto summed = [&](const Kernels& kernels, std::vector<std::vector<T>>& all,
                            std::int64_t copies) {
      std::vector<void*> places;
      for (auto& row : all) places.push_back(row.data());
      const std::vector<const void*> from(places.begin(), places.end());
      std::vector<T> out(n);
      kernels.sum_rows({.rows = from.data(),
                        .count = 4,
                        .out = copies == 0 ? out.data() : places[0],
                        .copy_to = places.data() + 1,
                        .copies = copies,
                        .columns = columns,
                        .dtype = dtype});
      return out;
    };
    const std::vector<T> expected = summed(kBaselineKernels, rows, 0);
    std::vector<const Kernels*> all = all_kernels();
    all.push_back(&kBaselineKernels);
    for (const Kernels* variant : all) {
      auto places = rows;
      summed(*variant, places, 3);
      for (const auto& place : places) {
        ASSERT_TRUE(same_values(place, expected))
            << variant->name << ", " << name_of(dtype) << ", columns " << columns;
      }
    }
  }
}

TEST(Kernels, SumsTakeThePlaceOfTheirRows) {
  sums_in_place<float>(Dtype::f32);
  sums_in_place<Bf16>(Dtype::bf16);
  sums_in_place<Fp16>(Dtype::f16);
}

template <class T>
void same_codes(Dtype dtype) {
  std::mt19937 random(kSeed + 1);
  SCOPED_TRACE("seed " + std::to_string(kSeed + 1));
  for (const std::size_t columns : {1u, 8u, 16u, 127u, 128u, 129u, 257u, 1024u, 2880u}) {
    for (const int kind : {0, 1, 2, 3}) {
      auto row = values<T>(random, columns);
      if (kind == 1) row.assign(columns, from_float<T>(0.0f));
      if (kind == 2) row.assign(columns, from_float<T>(INFINITY));
      if (kind == 3) {
        for (auto& value : row) value = from_float<T>(static_cast<float>(random() % 977) / 64);
      }
      for (const bool round_scale : {false, true}) {
        const std::size_t scales = (columns + 127) / 128;
        std::vector<std::uint8_t> expected(columns + 1, 0x5a), got;
        std::vector<float> expected_scales(scales + 1, -7), got_scales;
        kBaselineKernels.quantize_row({row.data(), dtype, static_cast<std::int64_t>(columns),
                                       round_scale, expected.data(), expected_scales.data()});
        for (const Kernels* variant : all_kernels()) {
          got.assign(columns + 1, 0x5a);
          got_scales.assign(scales + 1, -7);
          variant->quantize_row({row.data(), dtype, static_cast<std::int64_t>(columns), round_scale,
                                 got.data(), got_scales.data()});
          ASSERT_EQ(got, expected) << variant->name << ", columns " << columns << ", kind " << kind;
          ASSERT_EQ(
              std::memcmp(got_scales.data(), expected_scales.data(), (scales + 1) * sizeof(float)),
              0)
              << variant->name << ", columns " << columns << ", kind " << kind;
        }
      }
    }
  }
}

template <class T>
void same_nvfp4(Dtype dtype) {
  std::mt19937 random(kSeed + 4);
  SCOPED_TRACE("seed " + std::to_string(kSeed + 4));
  for (const std::size_t columns : {16u, 48u, 512u, 1424u}) {
    const std::vector<T> row = values<T>(random, columns);
    for (const float global_scale : {1.0f, 37.5f, 0x1p-100f, 0x1p100f}) {
      std::vector<std::uint8_t> expected(columns / 2 + 1, 0x5a);
      std::vector<E4m3> scales(columns / 16 + 1, E4m3{0x5a});
      quantize_nvfp4(row.data(), columns, global_scale, expected.data(), scales.data());
      for (const Kernels* variant : all_kernels()) {
        std::vector<std::uint8_t> got(expected.size(), 0x5a);
        std::vector<E4m3> got_scales(scales.size(), E4m3{0x5a});
        variant->quantize_row({row.data(), dtype, static_cast<std::int64_t>(columns), false,
                               got.data(), got_scales.data(), global_scale});
        ASSERT_EQ(got, expected) << variant->name << ", columns " << columns;
        ASSERT_EQ(got_scales, scales) << variant->name << ", columns " << columns;
      }
    }
  }
}

TEST(Kernels, QuantizesNvfp4) {
  same_nvfp4<float>(Dtype::f32);
  same_nvfp4<Bf16>(Dtype::bf16);
  same_nvfp4<Fp16>(Dtype::f16);
}

TEST(Kernels, QuantizesF32) {
  same_codes<float>(Dtype::f32);
}
TEST(Kernels, QuantizesBf16) {
  same_codes<Bf16>(Dtype::bf16);
}
TEST(Kernels, QuantizesFp16) {
  same_codes<Fp16>(Dtype::f16);
}

/// Rows of a latency combine as they cross, and their sums: every variant gives what the number
/// formats say.
template <class T>
void same_in_flight(Dtype dtype) {
  std::mt19937 random(kSeed + 3);
  SCOPED_TRACE("seed " + std::to_string(kSeed + 3));
  for (const std::size_t columns : {4u, 16u, 128u, 132u, 500u, 512u, 516u, 1416u}) {
    const CombineRowLayout layout = make_combine_row_layout(columns);
    std::vector<std::vector<std::uint8_t>> rows;
    std::vector<std::vector<float>> decoded;
    std::vector<const void*> pointers;
    for (int r = 0; r < 3; ++r) {
      const auto row = values<T>(random, columns);
      std::vector<std::uint8_t> expected(layout.logfmt_bytes + 1, 0x5a), got = expected;
      std::vector<float> back(columns);
      for (std::size_t i = 0; i < columns; i += 128) {
        const std::size_t count = std::min<std::size_t>(128, columns - i);
        std::uint8_t* high = expected.data() + layout.logfmt_high + i / 4;
        const LogfmtRange range =
            logfmt_encode_block(row.data() + i, count, expected.data() + i, high);
        std::memcpy(expected.data() + layout.logfmt_ranges + i / 128 * sizeof(range), &range,
                    sizeof(range));
        logfmt_decode_block(expected.data() + i, high, count, range, back.data() + i);
      }
      for (const Kernels* variant : all_kernels()) {
        got.assign(got.size(), 0x5a);
        variant->encode_logfmt(
            {row.data(), dtype, static_cast<std::int64_t>(columns), got.data(), layout});
        ASSERT_EQ(got, expected) << variant->name << ", columns " << columns;
      }
      rows.push_back(expected);
      decoded.push_back(back);
    }
    for (const auto& row : rows) pointers.push_back(row.data());
    const std::vector<float> weights{0.5f, -1.25f, 3.0f};
    std::vector<T> expected(columns), got(columns);
    for (std::size_t i = 0; i < columns; ++i) {
      float acc = 0;
      for (std::size_t r = 0; r < 3; ++r) acc = std::fma(weights[r], decoded[r][i], acc);
      expected[i] = from_float<T>(acc);
    }
    for (const Kernels* variant : all_kernels()) {
      variant->sum_rows({.rows = pointers.data(),
                         .weights = weights.data(),
                         .count = 3,
                         .out = got.data(),
                         .columns = static_cast<std::int64_t>(columns),
                         .dtype = dtype,
                         .format = CombineFormat::logfmt10,
                         .in_flight = layout});
      for (std::size_t i = 0; i < columns; ++i) {
        ASSERT_TRUE(std::memcmp(&got[i], &expected[i], sizeof(T)) == 0 ||
                    (std::isnan(to_float(got[i])) && std::isnan(to_float(expected[i]))))
            << variant->name << ", columns " << columns << ", column " << i;
      }
    }
  }
}

TEST(Kernels, LogfmtF32) {
  same_in_flight<float>(Dtype::f32);
}
TEST(Kernels, LogfmtBf16) {
  same_in_flight<Bf16>(Dtype::bf16);
}
TEST(Kernels, LogfmtFp16) {
  same_in_flight<Fp16>(Dtype::f16);
}

TEST(Kernels, CopiesAnySizeToAnyPlace) {
  std::mt19937 random(kSeed + 2);
  std::vector<std::uint8_t> from(1000), to(1200);
  for (auto& byte : from) byte = static_cast<std::uint8_t>(random());
  for (const Kernels* variant : all_kernels()) {
    for (std::size_t bytes : {0u, 1u, 15u, 16u, 31u, 32u, 63u, 64u, 65u, 127u, 128u, 200u, 777u}) {
      for (std::size_t at = 1; at < 130; at += 7) {
        std::fill(to.begin(), to.end(), 0xee);
        const std::uint8_t* source = from.data() + at % 13;
        variant->copy_stream(to.data() + at, source, bytes);
        variant->stream_fence();
        ASSERT_EQ(std::memcmp(to.data() + at, source, bytes), 0) << variant->name << " " << bytes;
        ASSERT_EQ(to[at - 1], 0xee) << variant->name << " " << bytes;
        ASSERT_EQ(to[at + bytes], 0xee) << variant->name << " " << bytes;
      }
    }
  }
}

}  // namespace
}  // namespace ferry::host::test

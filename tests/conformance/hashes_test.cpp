// Every variant of the kernels that this machine can run gives the bits that Linux on x86-64 gave.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "core/number.hpp"
#include "golden/hashes.hpp"
#include "host/kernels/kernels.hpp"
#include "random.hpp"

namespace ferry::conformance {
namespace {

using golden::Hash;
using host::Kernels;

constexpr std::uint64_t kHashSeed = 20261127;
constexpr std::size_t kColumns = 1416;  // of each set's vectors a whole number and a rest
constexpr std::size_t kSummed = 8;

std::vector<const Kernels*> variants() {
  std::vector<const Kernels*> all{&host::kBaselineKernels};
#if defined(__x86_64__)
  const std::string best = host::kernels().name;
  if (best != "baseline") all.push_back(&host::kAvx2Kernels);
  if (best == "avx512") all.push_back(&host::kAvx512Kernels);
#endif
  return all;
}

/// Numbers of every size that the type has, subnormals, zeros and infinities among them, no NaN.
template <class T>
std::vector<T> numbers(std::uint64_t seed, std::size_t count) {
  Random random(seed);
  std::vector<T> all(count);
  for (T& value : all) {
    const auto word = static_cast<std::uint32_t>(random.next());
    const int exponent = static_cast<int>(random.below(random.one_in(4) ? 250 : 20));
    const float mantissa = static_cast<float>(word >> 9) * 0x1p-23f + 1.0f;
    const float size = std::ldexp(mantissa, random.one_in(2) ? -exponent / 2 : exponent / 2);
    value = from_float<T>((word & 1) != 0 ? -size : size);
    if (random.one_in(50)) value = from_float<T>(0.0f);
  }
  return all;
}

/// All NaNs are one.
template <class T>
void add_values(Hash& hash, std::vector<T> values) {
  for (T& value : values) {
    if (std::isnan(to_float(value))) value = from_float<T>(NAN);
  }
  hash.add(values.data(), values.size() * sizeof(T));
}

void expect_golden(const std::string& name, const Kernels& kernels, const Hash& hash) {
  EXPECT_EQ(hash.value(), golden::hash_of(name))
      << kernels.name << ": {\"" << name << "\", 0x" << std::hex << hash.value() << "},";
}

template <class T>
void hash_sums(Dtype dtype, const std::string& name) {
  std::vector<std::vector<T>> rows;
  std::vector<const void*> pointers;
  std::vector<float> weights;
  for (std::size_t r = 0; r < kSummed; ++r) {
    rows.push_back(numbers<T>(mix(kHashSeed, 1, r), kColumns));
    weights.push_back(numbers<float>(mix(kHashSeed, 2), kSummed)[r]);
  }
  for (const auto& row : rows) pointers.push_back(row.data());
  const auto bias = numbers<T>(mix(kHashSeed, 3), kColumns);
  for (const Kernels* each : variants()) {
    Hash hash;
    for (const bool weighted : {false, true}) {
      std::vector<T> out(kColumns);
      each->sum_rows({.rows = pointers.data(),
                      .weights = weighted ? weights.data() : nullptr,
                      .count = kSummed,
                      .bias0 = bias.data(),
                      .out = out.data(),
                      .columns = kColumns,
                      .dtype = dtype});
      add_values(hash, out);
    }
    expect_golden("sums " + name, *each, hash);
  }
}

TEST(GoldenHashes, Sums) {
  hash_sums<float>(Dtype::f32, "f32");
  hash_sums<Bf16>(Dtype::bf16, "bf16");
  hash_sums<Fp16>(Dtype::f16, "f16");
}

template <class T>
void hash_e4m3(Dtype dtype, const std::string& name) {
  const auto row = numbers<T>(mix(kHashSeed, 4), kColumns);
  for (const Kernels* each : variants()) {
    Hash hash;
    for (const bool round_scale : {false, true}) {
      std::vector<std::uint8_t> codes(kColumns);
      std::vector<float> scales(scale_count(kColumns));
      each->quantize_row(
          {row.data(), dtype, std::int64_t{kColumns}, round_scale, codes.data(), scales.data()});
      hash.add(codes.data(), codes.size());
      hash.add(scales.data(), scales.size() * sizeof(float));
    }
    expect_golden("e4m3 " + name, *each, hash);
  }
}

TEST(GoldenHashes, E4m3) {
  hash_e4m3<float>(Dtype::f32, "f32");
  hash_e4m3<Bf16>(Dtype::bf16, "bf16");
  hash_e4m3<Fp16>(Dtype::f16, "f16");
}

/// Codes and ranges, and the sum of one row that crossed so.
template <class T>
void hash_logfmt(Dtype dtype, const std::string& name) {
  const auto row = numbers<T>(mix(kHashSeed, 5), kColumns);
  const CombineRowLayout layout = make_combine_row_layout(kColumns);
  for (const Kernels* each : variants()) {
    Hash hash;
    std::vector<std::uint8_t> coded(layout.logfmt_bytes);
    each->encode_logfmt({row.data(), dtype, std::int64_t{kColumns}, coded.data(), layout});
    hash.add(coded.data(), coded.size());
    const void* const rows[] = {coded.data(), coded.data()};
    const float weights[] = {0.3f, -1.7f};
    std::vector<T> out(kColumns);
    each->sum_rows({.rows = rows,
                    .weights = weights,
                    .count = 2,
                    .out = out.data(),
                    .columns = kColumns,
                    .dtype = dtype,
                    .format = CombineFormat::logfmt10,
                    .in_flight = layout});
    add_values(hash, out);
    expect_golden("logfmt " + name, *each, hash);
  }
}

TEST(GoldenHashes, Logfmt) {
  hash_logfmt<float>(Dtype::f32, "f32");
  hash_logfmt<Bf16>(Dtype::bf16, "bf16");
  hash_logfmt<Fp16>(Dtype::f16, "f16");
}

TEST(GoldenHashes, CodesOfCollectives) {
  const auto values = numbers<float>(mix(kHashSeed, 6), kColumns);
  for (const ReduceFormat format :
       {ReduceFormat::bf16, ReduceFormat::f16, ReduceFormat::e4m3, ReduceFormat::e5m2}) {
    for (const Kernels* each : variants()) {
      std::vector<std::uint32_t> codes(host::code_bytes(format, kColumns) / 4 + 1);
      std::vector<float> back(kColumns);
      each->encode_codes({values.data(), kColumns, format, codes.data()});
      each->decode_codes({codes.data(), kColumns, format, back.data()});
      Hash hash;
      hash.add(codes.data(), codes.size() * 4);
      add_values(hash, back);
      expect_golden("codes " + std::string(name_of(format)), *each, hash);
    }
  }
}

}  // namespace
}  // namespace ferry::conformance

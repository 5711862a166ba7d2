// Compares the number formats with numpy and ml_dtypes, through the file that
// tests/golden/make_number_golden.py writes. FERRY_NUMBER_GOLDEN names it; CTest makes it and sets
// that where Python has ml_dtypes.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "core/number.hpp"
#include "core/number_test_oracle.hpp"

namespace ferry {
namespace {

using oracle::bits_from_float;

constexpr std::uint32_t kVersion = 1;

template <class T>
struct Narrowed {
  std::vector<T> codes;
  std::vector<float> widened;
};

struct Quantized {
  std::vector<float> scales;
  std::vector<std::uint8_t> codes;
};

struct Golden {
  std::vector<float> inputs, rows;
  Narrowed<Bf16> bf16;
  Narrowed<Fp16> fp16;
  Narrowed<E4m3> e4m3;
  Narrowed<E5m2> e5m2;
  Quantized quantized[2][2];  // [e4m3, e5m2][round_scale]
};

template <class T>
void read(std::istream& file, std::vector<T>& array) {
  std::uint64_t count = 0;
  file.read(reinterpret_cast<char*>(&count), sizeof count);
  if (!file || count > (1u << 26)) return file.setstate(std::ios::failbit);
  array.resize(count);
  file.read(reinterpret_cast<char*>(array.data()), static_cast<std::streamsize>(count * sizeof(T)));
}

template <class T>
void read(std::istream& file, Narrowed<T>& narrowed) {
  read(file, narrowed.codes);
  read(file, narrowed.widened);
}

bool read_golden(const std::string& path, Golden& golden) {
  std::ifstream file(path, std::ios::binary);
  std::string magic(8, '\0');
  std::uint32_t version = 0;
  file.read(magic.data(), 8);
  file.read(reinterpret_cast<char*>(&version), sizeof version);
  if (!file || magic != "FERRYNUM" || version != kVersion) return false;
  read(file, golden.inputs);
  read(file, golden.bf16);
  read(file, golden.fp16);
  read(file, golden.e4m3);
  read(file, golden.e5m2);
  read(file, golden.rows);
  for (auto& format : golden.quantized) {
    for (Quantized& quantized : format) {
      read(file, quantized.scales);
      read(file, quantized.codes);
    }
  }
  return static_cast<bool>(file) && file.peek() == std::ifstream::traits_type::eof();
}

/// Equal bits, or both NaN.
template <class T>
bool same(T a, T b) {
  return a == b || (std::isnan(to_float(a)) && std::isnan(to_float(b)));
}

class NumberGolden : public testing::Test {
 protected:
  void SetUp() override {
    const char* path = std::getenv("FERRY_NUMBER_GOLDEN");
    if (path == nullptr || *path == '\0') {
      GTEST_SKIP()
          << "NOT COMPARED WITH ml_dtypes: FERRY_NUMBER_GOLDEN names no file. Make one with "
             "`python tests/golden/make_number_golden.py FILE` (needs numpy and ml_dtypes), "
             "or configure with -DPython3_EXECUTABLE=<a Python that has them>.";
    }
    ASSERT_TRUE(read_golden(path, golden_))
        << path << " is not a golden file of version " << kVersion << "; make it again";
  }

  template <class T>
  void check(const Narrowed<T>& expected) {
    ASSERT_EQ(expected.codes.size(), golden_.inputs.size());
    ASSERT_EQ(expected.widened.size(), std::size_t{1} << (8 * sizeof(T)));
    for (std::size_t i = 0; i < golden_.inputs.size(); ++i) {
      const T code = from_float<T>(golden_.inputs[i]);
      ASSERT_TRUE(same(code, expected.codes[i]))
          << std::hex << "float 0x" << bits_from_float(golden_.inputs[i]) << ": got 0x"
          << +code.bits << ", ml_dtypes 0x" << +expected.codes[i].bits;
    }
    for (std::size_t code = 0; code < expected.widened.size(); ++code) {
      const float x = to_float(T{static_cast<decltype(T::bits)>(code)});
      const float y = expected.widened[code];
      ASSERT_TRUE(bits_from_float(x) == bits_from_float(y) || (std::isnan(x) && std::isnan(y)))
          << "code " << code << ": got " << x << ", ml_dtypes " << y;
    }
  }

  template <class Q>
  void check_blocks(const Quantized& expected, bool round_scale) {
    const std::size_t rows = golden_.rows.size() / kScaleBlock;
    ASSERT_GT(rows, 100u);
    ASSERT_EQ(expected.scales.size(), rows);
    ASSERT_EQ(expected.codes.size(), golden_.rows.size());
    std::vector<Q> codes(kScaleBlock);
    for (std::size_t row = 0; row < rows; ++row) {
      const float* values = golden_.rows.data() + row * kScaleBlock;
      const float scale = quantize_block(values, kScaleBlock, codes.data(), round_scale);
      ASSERT_EQ(scale, expected.scales[row]) << "row " << row;
      for (std::size_t i = 0; i < kScaleBlock; ++i) {
        ASSERT_TRUE(same(codes[i], Q{expected.codes[row * kScaleBlock + i]}))
            << "row " << row << " channel " << i << " value " << values[i];
      }
    }
  }

  Golden golden_;
};

TEST_F(NumberGolden, Bf16) {
  check(golden_.bf16);
}
TEST_F(NumberGolden, Fp16) {
  check(golden_.fp16);
}
TEST_F(NumberGolden, E4m3) {
  check(golden_.e4m3);
}
TEST_F(NumberGolden, E5m2) {
  check(golden_.e5m2);
}
TEST_F(NumberGolden, BlocksOfE4m3) {
  check_blocks<E4m3>(golden_.quantized[0][0], false);
  check_blocks<E4m3>(golden_.quantized[0][1], true);
}
TEST_F(NumberGolden, BlocksOfE5m2) {
  check_blocks<E5m2>(golden_.quantized[1][0], false);
  check_blocks<E5m2>(golden_.quantized[1][1], true);
}

}  // namespace
}  // namespace ferry

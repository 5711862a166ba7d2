// Texts for messages.
#include <gtest/gtest.h>

#include <bit>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <locale>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <utility>

#include "base/open_files.hpp"
#include "base/text.hpp"
#include "platform/fma.hpp"

namespace ferry {
namespace {

struct DecimalComma : std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
};

TEST(Text, OfAnotherRankIsOneLineOfBoundedLength) {
  EXPECT_EQ(printable("a\nb\tc\x7f", 100), "a b c ");
  EXPECT_EQ(printable("0 … 5", 4), "0 ");  // not in the middle of a character
  EXPECT_EQ(printable("0 … 5", 5), "0 …");
  EXPECT_EQ(printable(std::string(5000, 'x'), 300).size(), 300u);
  EXPECT_EQ(printable("a\xff\xe2\x80z\xc0\x80\xed\xa0\x80", 100), "a???z?????");  // not UTF-8
  EXPECT_EQ(printable("\xf0\x9f\x9a\xa2 …é", 100), "\xf0\x9f\x9a\xa2 …é");
}

TEST(Text, SecondsAreExact) {
  using namespace std::chrono_literals;
  EXPECT_EQ(exact_seconds(1500ms), "1.5 s");
  EXPECT_EQ(exact_seconds(60s), "60 s");
  EXPECT_NE(exact_seconds(24h), exact_seconds(24h - 1ns));
}

TEST(Text, NumbersAreTakenOffInAnyLocale) {
  const auto taken = [](std::string_view text) {
    const std::optional<double> number = take_number(text);
    return std::pair(number, std::string(text));
  };
  EXPECT_EQ(taken("-2.5e3, null"), std::pair(std::optional(-2500.0), std::string(", null")));
  EXPECT_EQ(taken("0.1"), std::pair(std::optional(0.1), std::string()));
  for (const char* text : {"", " 1", "x", "nan", "inf", "-", "1e400", "-1e400"}) {
    EXPECT_EQ(taken(text), std::pair(std::optional<double>(), std::string(text)));
  }
  const std::locale before = std::locale::global(std::locale(std::locale(), new DecimalComma));
  EXPECT_EQ(taken("1.5,2"), std::pair(std::optional(1.5), std::string(",2")));
  std::locale::global(before);
}

// The C library of Linux is exact; seed 26. Operands whose sum nearly cancels are among them.
TEST(Platform, AFusedMultiplyAddWithoutTheInstructionRoundsOnce) {
  std::mt19937 random(26);
  const auto value = [&] {
    const auto exponent = static_cast<int>(random() % 80) - 40;
    return std::ldexp(static_cast<float>(static_cast<std::int32_t>(random()) | 1), exponent);
  };
  int twice = 0;
  for (int i = 0; i < 200'000; ++i) {
    float w = value(), x = value(), sum = i % 3 == 0 ? -w * x : value();
    if (i % 3 == 2) {  // a product of 25 bits, and a sum far below
      w = static_cast<float>(4096 + random() % 4096) * 2 + 1;
      x = static_cast<float>(2048 + random() % 2048);
      sum = std::ldexp(i % 2 == 0 ? 1.0f : -1.0f, -50);
    }
    const float exact = std::fma(w, x, sum);
    ASSERT_EQ(std::bit_cast<std::uint32_t>(exact_fma(w, x, sum)),
              std::bit_cast<std::uint32_t>(exact))
        << w << " * " << x << " + " << sum;
    twice += static_cast<float>(static_cast<double>(w) * x + sum) != exact;
  }
  EXPECT_GT(twice, 1000);  // rounding twice would have been found
  EXPECT_TRUE(std::isnan(exact_fma(INFINITY, 0, 1)));
  EXPECT_EQ(exact_fma(INFINITY, 1, 1), INFINITY);
  EXPECT_EQ(exact_fma(3e38f, 3e38f, -1), INFINITY);
}

TEST(OpenFiles, TheTextSaysTheLimitAndWhatToDo) {
  EXPECT_TRUE(too_many_files(EMFILE));
  EXPECT_TRUE(too_many_files(ENFILE));
  EXPECT_FALSE(too_many_files(ENOENT));
  EXPECT_NE(error_text(EMFILE, 96).find("too many open files"), std::string::npos);
  EXPECT_NE(error_text(EMFILE, 96).find("may have 96;"), std::string::npos);
  EXPECT_NE(error_text(EMFILE, 96).find("ulimit -n"), std::string::npos);
  EXPECT_NE(error_text(ENFILE, 96).find("this machine"), std::string::npos);
  EXPECT_EQ(error_text(ENOENT, 96).find("limit"), std::string::npos);
}

}  // namespace
}  // namespace ferry

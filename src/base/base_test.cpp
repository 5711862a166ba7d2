// Texts for messages.
#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <string>

#include "base/open_files.hpp"
#include "base/text.hpp"

namespace ferry {
namespace {

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

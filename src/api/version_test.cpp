#include <gtest/gtest.h>

#include <ferry/ferry.hpp>
#include <string>

TEST(Version, TheLibrarySaysWhatTheHeadersSay) {
  const auto number = [](int part) { return std::to_string(part); };
  EXPECT_EQ(ferry::version(), number(FERRY_VERSION_MAJOR) + "." + number(FERRY_VERSION_MINOR) +
                                  "." + number(FERRY_VERSION_PATCH));
}

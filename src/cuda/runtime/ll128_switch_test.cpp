#include "cuda/runtime/ll128_switch.hpp"

#include <gtest/gtest.h>

#include <cstdlib>

namespace ferry::cuda {
namespace {

TEST(LL128Switch, TheOldNameCountsWithAWarningWhereTheNewOneIsNotSet) {
  const char *now = "FERRY_LATENCY_LL128", *old = "FERRY_LATENCY_LINES";
  ::unsetenv(now), ::unsetenv(old);
  testing::internal::CaptureStderr();
  EXPECT_FALSE(ll128_is_switched_off());
  ::setenv(old, "0", 1), ::setenv(now, "1", 1);
  EXPECT_FALSE(ll128_is_switched_off());
  ::setenv(old, "1", 1), ::setenv(now, "0", 1);
  EXPECT_TRUE(ll128_is_switched_off());
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");

  testing::internal::CaptureStderr();
  ::unsetenv(now);
  EXPECT_FALSE(ll128_is_switched_off());
  ::setenv(old, "0", 1);
  EXPECT_TRUE(ll128_is_switched_off());
  EXPECT_EQ(testing::internal::GetCapturedStderr(),  // once
            "ferry: FERRY_LATENCY_LINES is deprecated; set FERRY_LATENCY_LL128 instead\n");
  ::unsetenv(old);
}

}  // namespace
}  // namespace ferry::cuda

#include "progress.hpp"

#include <gtest/gtest.h>

#include <string>

#include "platform/posix/test_stderr.hpp"

namespace ferry::cli {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;

TEST(Progress, IsALineAtTimesInAPipe) {
  testing::internal::CaptureStderr();
  {
    Progress often("bench", 4, milliseconds(0)), seldom("doctor", 4, hours(1));
    for (const int done : {0, 1, 1, 4, 5}) {
      often.show(done, "dispatch");
      seldom.show(done, "pairs");
    }
  }
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "bench: 0 %, dispatch\nbench: 25 %, dispatch\nbench: 25 %, dispatch\n"
            "bench: 100 %, dispatch\nbench: 100 %, dispatch\n");
}

TEST(Progress, IsABarOnATerminalBeforeAnythingIsDone) {
  const std::string got = test::on_a_terminal([] { Progress("bench", 4).show(0, "preparing"); });
  if (got.empty()) GTEST_SKIP() << "no terminal can be made here";
  EXPECT_NE(got.find("   0 %  preparing"), std::string::npos) << got;
}

TEST(Progress, IsABarOnATerminalThatGoesAtTheEnd) {
  const std::string got = test::on_a_terminal([] {
    Progress progress("bench", 4);
    progress.show(1, "dispatch");
  });
  if (got.empty()) GTEST_SKIP() << "no terminal can be made here";
  EXPECT_NE(got.find("[##########......"), std::string::npos) << got;
  EXPECT_NE(got.find(" 25 %  dispatch"), std::string::npos) << got;
  EXPECT_TRUE(got.ends_with("\r\x1b[K")) << got;
}

}  // namespace
}  // namespace ferry::cli

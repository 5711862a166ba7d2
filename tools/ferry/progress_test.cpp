#include "progress.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <functional>
#include <string>

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
            "bench: 25 %, dispatch\nbench: 100 %, dispatch\nbench: 100 %, dispatch\n");
}

/// What a terminal in the place of stderr gets.
std::string on_a_terminal(const std::function<void()>& run) {
  const int terminal = posix_openpt(O_RDWR | O_NOCTTY);
  if (terminal < 0 || grantpt(terminal) != 0 || unlockpt(terminal) != 0) return "";
  const int end = open(ptsname(terminal), O_RDWR | O_NOCTTY);
  const int before = dup(STDERR_FILENO);
  dup2(end, STDERR_FILENO);
  run();
  dup2(before, STDERR_FILENO);
  for (const int each : {end, before}) close(each);
  std::string got;
  std::array<char, 4096> part{};
  // It comes in pieces, the last one before an error that says that nobody writes there any more.
  for (ssize_t size = 0; (size = read(terminal, part.data(), part.size())) > 0;) {
    got.append(part.data(), static_cast<std::size_t>(size));
  }
  close(terminal);
  return got;
}

TEST(Progress, IsABarOnATerminalThatGoesAtTheEnd) {
  const std::string got = on_a_terminal([] {
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

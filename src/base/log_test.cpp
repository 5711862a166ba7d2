// Events: how a line is spelt, where it goes, and what the environment may say.
#include "base/log.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <ferry/error.hpp>
#include <string>
#include <vector>

#include "base/wait_notice.hpp"

namespace ferry {
namespace {

class Log : public ::testing::Test {
 protected:
  void SetUp() override {
    set_log(LogLevel::debug, [this](const LogRecord& record) { records.push_back(record); });
  }
  void TearDown() override {
    ::unsetenv("FERRY_LOG");
    set_log(LogLevel::off);
  }
  std::vector<LogRecord> records{};
};

TEST_F(Log, IsOneLineOfKeysAndValues) {
  log(LogLevel::info, 3, "grow",
      {{"bytes", 4096}, {"stage", "dispatch: grants"}, {"said", "a \"b\"\nc=\\"}, {"none", ""}});
  ASSERT_EQ(records.size(), 1U);
  EXPECT_EQ(records[0].text(),
            "rank=3 event=grow bytes=4096 stage=\"dispatch: grants\" said=\"a \\\"b\\\" c=\\\\\" "
            "none=\"\"");
}

TEST_F(Log, GoesToStderrWithTimeAndLevel) {
  set_log(LogLevel::warn);
  testing::internal::CaptureStderr();
  log(LogLevel::warn, -1, "wait", {{"seconds", log_seconds(1'500'000'000)}});
  log(LogLevel::info, 0, "group", {});
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(said.starts_with("ferry ts=20")) << said;
  EXPECT_TRUE(said.ends_with("Z level=warn event=wait seconds=1.5\n")) << said;
}

TEST_F(Log, ALongWaitIsAnEventInPlaceOfTheSentence) {
  const auto start = WaitNotice::Clock::now() - std::chrono::seconds(10);
  WaitNotice notice(std::chrono::seconds(10), start, start + std::chrono::seconds(60));
  testing::internal::CaptureStderr();
  notice.say(2, "for rank 1");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  ASSERT_EQ(records.size(), 1U);
  EXPECT_EQ(records[0].event, "wait");
  EXPECT_EQ(records[0].level, LogLevel::warn);
  EXPECT_NE(records[0].text().find("what=\"for rank 1\""), std::string::npos);
}

TEST_F(Log, RefusesAWordThatIsNoLevel) {
  ::setenv("FERRY_LOG", "verbose", 1);
  try {
    read_log_level();
    ADD_FAILURE() << "taken";
  } catch (const Error& error) {
    EXPECT_STREQ(
        error.what(),
        "environment variable FERRY_LOG is \"verbose\", expected off, warn, info or debug");
  }
  ::setenv("FERRY_LOG", "warn", 1);
  read_log_level();
  EXPECT_TRUE(logs(LogLevel::debug)) << "what the program has set counts";
}

}  // namespace
}  // namespace ferry

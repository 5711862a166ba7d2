// How ranks and long waits are spelt.
#include "base/wait_notice.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <ferry/error.hpp>
#include <string>
#include <vector>

#include "base/text.hpp"

namespace ferry {
namespace {

using namespace std::chrono_literals;

std::string spelt(const std::vector<int>& ranks, std::size_t total = 0) {
  return spell_ranks(ranks, total);
}

TEST(SpellRanks, NamesRunsOfThree) {
  EXPECT_EQ(spelt({}), "no rank");
  EXPECT_EQ(spelt({3}), "rank 3");
  EXPECT_EQ(spelt({3, 4}), "ranks 3 and 4");
  EXPECT_EQ(spelt({1, 2, 5}), "ranks 1, 2 and 5");
  EXPECT_EQ(spelt({1, 2, 3}), "ranks 1-3");
  EXPECT_EQ(spelt({0, 2, 3, 4, 7, 8}), "ranks 0, 2-4, 7 and 8");
}

TEST(SpellRanks, NamesEightAndCountsTheRest) {
  EXPECT_EQ(spelt({0, 2, 4, 6, 8, 10, 12, 14}), "ranks 0, 2, 4, 6, 8, 10, 12 and 14");
  EXPECT_EQ(spelt({0, 2, 4, 6, 8, 10, 12, 14, 16, 17}),
            "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 2 more");
  EXPECT_EQ(spelt({1, 2, 3, 4}, 30), "ranks 1-4 and 26 more");
}

class WaitNoticeAfter : public ::testing::Test {
 protected:
  void TearDown() override { ::unsetenv("FERRY_WAIT_NOTICE"); }
  static void set(const char* value) { ::setenv("FERRY_WAIT_NOTICE", value, 1); }
};

TEST_F(WaitNoticeAfter, IsTenSecondsUnlessTold) {
  ::unsetenv("FERRY_WAIT_NOTICE");
  EXPECT_EQ(wait_notice_after(), 10s);
  set("");
  EXPECT_EQ(wait_notice_after(), 10s);
  set("0.25");
  EXPECT_EQ(wait_notice_after(), 250ms);
  set("0");
  EXPECT_EQ(wait_notice_after(), 0s);
}

TEST_F(WaitNoticeAfter, RefusesWhatIsNoTime) {
  for (const char* bad : {"soon", "-1", "10s", "nan", "inf", "86401", " 3"}) {
    set(bad);
    try {
      wait_notice_after();
      ADD_FAILURE() << bad;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::invalid_argument);
      EXPECT_NE(
          std::string(error.what())
              .find("FERRY_WAIT_NOTICE is \"" + std::string(bad) + "\", expected seconds from 0"),
          std::string::npos)
          << error.what();
    }
  }
}

TEST(WaitNotice, WaitsTwiceAsLongBeforeTheNextLine) {
  const auto start = WaitNotice::Clock::now() - 10s;
  WaitNotice notice(10s, start, start + 60s);
  EXPECT_EQ(notice.next(), start + 10s);
  testing::internal::CaptureStderr();
  notice.say(2, "for rank 1");
  const auto second = notice.next() - WaitNotice::Clock::now();
  notice.say(2, "for rank 1");
  const auto third = notice.next() - WaitNotice::Clock::now();
  const std::string said = testing::internal::GetCapturedStderr();
  const std::string first = said.substr(0, said.find('\n'));
  EXPECT_TRUE(first.starts_with("ferry: rank 2 has waited 1")) << said;
  EXPECT_NE(first.find(" s for rank 1; "), std::string::npos) << said;
  EXPECT_TRUE(first.ends_with(" s left (FERRY_WAIT_NOTICE=0: no such lines)")) << said;
  EXPECT_TRUE(said.ends_with(" s left\n")) << said;
  EXPECT_LE(second, 20s);
  EXPECT_GT(second, 15s);
  EXPECT_LE(third, 40s);
  EXPECT_GT(third, 35s);
}

TEST(WaitNotice, OfZeroIsNever) {
  EXPECT_EQ(WaitNotice(0s, {}, {}).next(), WaitNotice::Clock::time_point::max());
}

}  // namespace
}  // namespace ferry

#include "core/choice/store_choice.hpp"

#include <gtest/gtest.h>

namespace ferry {
namespace {

const auto kCalls = StoreChoice::calls_of(CallKind::all_to_all, 1 << 20);

/// Makes calls that take so long through the caches and past them; returns how many went past them.
int make(StoreChoice& choice, int calls, double cached_s, double past_s) {
  int past = 0;
  for (int i = 0; i < calls; ++i) {
    const bool way = choice.next(kCalls);
    past += way ? 1 : 0;
    choice.observe(kCalls, way, way ? past_s : cached_s);
  }
  return past;
}

TEST(StoreChoice, KeepsTheFasterWayAndTriesTheOther) {
  StoreChoice apart, together;
  EXPECT_TRUE(apart.best(kCalls));
  EXPECT_EQ(make(apart, 1000, 5, 1), 1000 - 3 - 3);  // after 4, 8, 12; 256, 512, 768
  EXPECT_TRUE(apart.best(kCalls));
  EXPECT_EQ(make(together, 1000, 1, 1.2), 3 + 15);  // until the first try; then each 64th
  EXPECT_FALSE(together.best(kCalls));
}

TEST(StoreChoice, ChangesWhenRanksMove) {
  StoreChoice choice;
  make(choice, 64, 1, 1.2);
  EXPECT_FALSE(choice.best(kCalls));
  make(choice, 3, 5, 1.2);  // three calls, so that one that was held up does not count
  EXPECT_TRUE(choice.best(kCalls));
  make(choice, 3 * 256, 1, 1.2);
  EXPECT_FALSE(choice.best(kCalls));
}

TEST(StoreChoice, OneSlowCallChangesNothing) {
  StoreChoice choice;
  make(choice, 64, 3, 1);
  make(choice, 1, 100, 100);
  EXPECT_TRUE(choice.best(kCalls));
}

TEST(StoreChoice, CallsOfOtherKindsAndSizesAreApart) {
  StoreChoice choice;
  make(choice, 16, 1, 2);
  EXPECT_FALSE(choice.best(kCalls));
  EXPECT_FALSE(choice.best(StoreChoice::calls_of(CallKind::all_to_all, (2 << 20) - 1)));
  EXPECT_TRUE(choice.best(StoreChoice::calls_of(CallKind::all_to_all, 1 << 21)));
  EXPECT_TRUE(choice.best(StoreChoice::calls_of(CallKind::all_reduce, 1 << 20)));
}

}  // namespace
}  // namespace ferry

#include "engine/row_guess.hpp"

#include <gtest/gtest.h>

namespace ferry::engine {
namespace {

TEST(RowGuessTest, WithoutHistoryAllTokensOfAllRanks) {
  EXPECT_EQ(RowGuess().rows(100, 4), 400);
  EXPECT_EQ(RowGuess().rows(0, 4), 0);
}

TEST(RowGuessTest, AQuarterMoreThanTheMostOfTheLastEight) {
  RowGuess guess;
  guess.learn(100, 400);
  guess.learn(100, 200);
  EXPECT_EQ(guess.rows(100, 64), 500 + 32);
  EXPECT_EQ(guess.rows(100, 4), 400);
  for (int i = 0; i < 7; ++i) guess.learn(100, 80);
  EXPECT_EQ(guess.rows(100, 4), 250 + 32);
  guess.learn(100, 80);
  EXPECT_EQ(guess.rows(100, 4), 100 + 32);
}

TEST(RowGuessTest, InProportionToTheTokens) {
  RowGuess guess;
  guess.learn(4096, 16384);
  EXPECT_EQ(guess.rows(128, 64), 512 + 128 + 32);
  EXPECT_EQ(guess.rows(0, 4), 16384 + 4096 + 32);  // a rank without tokens receives, too
  guess.learn(0, 100);
  EXPECT_EQ(guess.rows(128, 64), 512 + 128 + 32);
}

TEST(RowGuessTest, MemoryIsWorthWhileOnceItIsKnownThatItHelps) {
  RowGuess guess;
  EXPECT_FALSE(guess.worth_memory());
  guess.learn(100, 400);
  EXPECT_TRUE(guess.worth_memory());
  guess.found_no_memory();
  EXPECT_FALSE(guess.worth_memory());
}

TEST(RowGuessTest, ARankThatReceivedNothingGuessesAFew) {
  RowGuess guess;
  guess.learn(100, 0);
  EXPECT_EQ(guess.rows(100, 4), 32);
}

}  // namespace
}  // namespace ferry::engine

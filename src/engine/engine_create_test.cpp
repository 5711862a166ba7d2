// Steps that all ranks of a group take together when it is made.
#include "engine/create.hpp"

#include <gtest/gtest.h>

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace ferry::engine::test {
namespace {

TEST(Creation, WordsOfAnotherRankAreTextInAnError) {
  const std::string words = "\1no GPU\n\x1b[2J\xff\xf1m";
  const auto bootstrap = custom_bootstrap(0, 2, [&](std::span<const std::byte> mine) {
    const auto theirs = std::as_bytes(std::span(words));
    return std::vector{std::vector(mine.begin(), mine.end()),
                       std::vector(theirs.begin(), theirs.end())};
  });
  try {
    together(*bootstrap, GroupConfig{}, "Group: memory", [] { return std::vector<std::byte>{}; });
    FAIL();
  } catch (const Error& error) {
    const std::string what = error.what();
    EXPECT_NE(what.find("rank 1 could not go on: no GPU  [2J??m"), what.npos) << what;
  }
}

}  // namespace
}  // namespace ferry::engine::test

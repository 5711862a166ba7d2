// Steps that all ranks of a group take together when it is made.
#include "engine/create.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace ferry::engine::test {
namespace {

/// What each rank makes of the answers of all.
std::vector<std::string> answers(const std::vector<std::string>& can) {
  const auto bootstraps = thread_bootstrap(static_cast<int>(can.size()));
  std::vector<std::string> made(can.size());
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < can.size(); ++r) {
    threads.emplace_back([&, r] {
      try {
        const bool all = all_can(*bootstraps[r], GroupConfig{}, "Group: links", [&] {
          if (can[r] == "fails") throw Error(ErrorKind::system, "no such GPU", {});
          return can[r] == "can";
        });
        made[r] = all ? "all can" : "none does";
      } catch (const Error& error) {
        made[r] = error.peer() >= 0 ? "rank " + std::to_string(error.peer()) : "own";
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return made;
}

// As a group of unequal GPUs, one of which cannot write rows as LL128.
TEST(Creation, WhatOneRankCannotNoneDoes) {
  using Words = std::vector<std::string>;
  EXPECT_EQ(answers({"can", "can", "can"}), Words(3, "all can"));
  EXPECT_EQ(answers({"can", "can", "cannot"}), Words(3, "none does"));
  EXPECT_EQ(answers({"cannot", "can", "cannot", "can"}), Words(4, "none does"));
  EXPECT_EQ(answers({"cannot"}), Words(1, "none does"));
  EXPECT_EQ(answers({"can", "fails", "can"}), (Words{"rank 1", "own", "rank 1"}));
}

}  // namespace
}  // namespace ferry::engine::test

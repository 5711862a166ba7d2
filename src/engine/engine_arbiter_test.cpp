// The arbiter's file: which half of a split group it lets go on, and what it refuses.
#include "engine/arbiter.hpp"

#include <filesystem>
#include <fstream>

#include "engine/test_groups.hpp"
#include "platform/process.hpp"

namespace ferry::engine::test {
namespace {

constexpr fabric::JobKey kJob{0x1234, 0xabcd};

class ArbiterFile : public testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directory(directory_); }
  void TearDown() override { std::filesystem::remove_all(directory_); }
  Arbiter arbiter(int rank) const { return {directory_, kJob, rank, 4}; }
  std::filesystem::path file() const {
    return directory_ + "/ferry-arbiter-0000000000001234000000000000abcd";
  }

  const std::string directory_ =
      testing::TempDir() + "ferry_arbiter_" + std::to_string(process_id());
};

/// Two ranks of four that suspect the other two; the lower one leads.
struct Half {
  Member leader, other;
  explicit Half(int first)
      : leader(Member::founder(first, 4, true)), other(Member::founder(first + 1, 4, true)) {
    for (int seat = 0; seat < 4; ++seat) {
      if (seat / 2 == first / 2) continue;
      leader.suspect(seat);
      other.suspect(seat);
    }
    talk(first);
  }
  void talk(int first) {
    for (int i = 0; i < 4; ++i) {
      leader.hear(first + 1, other.statement());
      other.hear(first, leader.statement());
    }
  }
  /// As an engine does.
  void ask(const Arbiter& arbiter, int first, int times = 8) {
    for (int i = 0; i < times && leader.needs_arbiter(); ++i) {
      leader.hear_arbiter(arbiter.ask(leader.statement()));
      talk(first);
    }
    while (leader.settle()) {
    }
    talk(first);
  }
};

TEST_F(ArbiterFile, LetsOneHalfGoOnAndTellsTheOther) {
  arbiter(0).create();
  Half low(0), high(2);
  low.ask(arbiter(0), 0);
  EXPECT_EQ(low.leader.view().epoch, 2u);
  EXPECT_EQ(low.leader.view().live, Member::Seats::first(2));
  EXPECT_TRUE(low.leader.running());
  high.ask(arbiter(2), 2);
  EXPECT_EQ(high.leader.standing(), Member::Standing::kEvicted);
}

TEST_F(ArbiterFile, TheHalfThatComesBetweenDoesNotMakeTwo) {
  arbiter(0).create();
  Half low(0), high(2);
  low.ask(arbiter(0), 0, 1);  // has its promise, not its vote
  high.ask(arbiter(2), 2);
  low.ask(arbiter(0), 0);
  EXPECT_TRUE(high.leader.running());
  EXPECT_EQ(high.leader.view().live, Member::Seats::first(4) - Member::Seats::first(2));
  EXPECT_EQ(low.leader.standing(), Member::Standing::kEvicted);
}

TEST_F(ArbiterFile, WhatAFileCannotHoldIsRefused) {
  const auto refused = [&](const char* what) {
    expect_error(ErrorKind::system, {"rank 1", "arbiter", what},
                 [&] { arbiter(1).ask(Member::founder(1, 4, true).statement()); });
  };
  refused("could not be opened");  // no such file: another directory of that name
  arbiter(0).create();
  arbiter(1).await();
  arbiter(1).ask(Member::founder(1, 4, true).statement());
  const auto bytes = std::filesystem::file_size(file());
  for (const auto at : {std::uintmax_t{0}, std::uintmax_t{24}, bytes - 1}) {
    std::fstream stream(file(), std::ios::in | std::ios::out | std::ios::binary);
    stream.seekg(static_cast<std::streamoff>(at));
    const int was = stream.get();
    stream.seekp(static_cast<std::streamoff>(at));
    stream.put(static_cast<char>(was ^ 1));
    stream.close();
    refused("is damaged");
    stream.open(file(), std::ios::in | std::ios::out | std::ios::binary);
    stream.seekp(static_cast<std::streamoff>(at));
    stream.put(static_cast<char>(was));
  }
  for (const auto size : {bytes - 1, bytes + 1, std::uintmax_t{1}}) {
    std::filesystem::resize_file(file(), size);
    refused("is damaged");
  }
}

}  // namespace
}  // namespace ferry::engine::test

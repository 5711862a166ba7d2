// The arbiter's file: which half of a split group it lets go on, and what it refuses.
#include "engine/membership/arbiter.hpp"

#include <array>
#include <bit>
#include <filesystem>
#include <fstream>
#include <latch>
#include <memory>
#include <optional>

#include "engine/membership/aside.hpp"
#include "engine/test_groups.hpp"
#include "platform/process.hpp"

namespace ferry::engine::test {
namespace {

constexpr fabric::JobKey kJob{0x1234, 0xabcd};

class ArbiterDirectory : public testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directory(directory_); }
  void TearDown() override { std::filesystem::remove_all(directory_); }
  ArbiterFile arbiter(int rank) const { return {directory_, kJob, rank, 4}; }
  std::filesystem::path file() const {
    return directory_ + "/ferry-arbiter-0000000000001234000000000000abcd";
  }

  void change_byte(std::uintmax_t at) const {
    std::fstream stream(file(), std::ios::in | std::ios::out | std::ios::binary);
    stream.seekg(static_cast<std::streamoff>(at));
    const int was = stream.get();
    stream.seekp(static_cast<std::streamoff>(at));
    stream.put(static_cast<char>(was ^ 1));
  }
  static auto bytes_of(const Member::Said& said) {
    return std::bit_cast<std::array<std::uint64_t, kStatementWords>>(said);
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
  void ask(const ArbiterFile& arbiter, int first, int times = 8) {
    for (int i = 0; i < times && leader.needs_arbiter(); ++i) {
      leader.hear_arbiter(arbiter.decide(leader.statement()));
      talk(first);
    }
    while (leader.settle()) {
    }
    talk(first);
  }
};

TEST_F(ArbiterDirectory, LetsOneHalfGoOnAndTellsTheOther) {
  arbiter(0).create();
  Half low(0), high(2);
  low.ask(arbiter(0), 0);
  EXPECT_EQ(low.leader.view().epoch, 2u);
  EXPECT_EQ(low.leader.view().live, Member::Seats::first(2));
  EXPECT_TRUE(low.leader.running());
  high.ask(arbiter(2), 2);
  EXPECT_EQ(high.leader.standing(), Member::Standing::kEvicted);
}

TEST_F(ArbiterDirectory, TheHalfThatComesBetweenDoesNotMakeTwo) {
  arbiter(0).create();
  Half low(0), high(2);
  low.ask(arbiter(0), 0, 1);  // has its promise, not its vote
  high.ask(arbiter(2), 2);
  low.ask(arbiter(0), 0);
  EXPECT_TRUE(high.leader.running());
  EXPECT_EQ(high.leader.view().live, Member::Seats::first(4) - Member::Seats::first(2));
  EXPECT_EQ(low.leader.standing(), Member::Standing::kEvicted);
}

TEST_F(ArbiterDirectory, TheHalfThatWonAndDiedIsNotReplacedByTheOther) {
  arbiter(0).create();
  Half low(0), high(2);
  low.ask(arbiter(0), 0, 2);  // has its vote, and dies before anybody hears of it
  high.ask(arbiter(2), 2);
  EXPECT_EQ(high.leader.standing(), Member::Standing::kEvicted);
}

TEST_F(ArbiterDirectory, AskedTwiceItSaysTheSame) {
  arbiter(0).create();
  Half low(0);
  const auto once = arbiter(0).decide(low.leader.statement());
  EXPECT_EQ(bytes_of(once), bytes_of(arbiter(0).decide(low.leader.statement())));
  EXPECT_EQ(bytes_of(once), bytes_of(arbiter(2).decide({})));  // of no epoch: changes nothing
  EXPECT_GT(once.round, 0u);
}

TEST_F(ArbiterDirectory, WhatAFileCannotHoldIsRefused) {
  const Member::Said asked = Member::founder(1, 4, true).statement();
  const auto refused = [&](const char* what) {
    expect_error(ErrorKind::system, {"rank 1", "arbiter", what}, [&] { arbiter(1).decide(asked); });
  };
  refused("could not be opened");  // no such file: another directory of that name
  arbiter(0).create();
  arbiter(1).decide(asked);
  const auto bytes = std::filesystem::file_size(file());
  for (const auto at : {std::uintmax_t{0}, std::uintmax_t{24}, bytes - 1}) {
    change_byte(at);
    refused("is damaged");
    change_byte(at);
  }
  arbiter(1).decide(asked);
  for (const auto size : {bytes - 1, bytes + 1, std::uintmax_t{0}}) {
    std::filesystem::resize_file(file(), size);
    refused("is damaged");
  }
}

TEST_F(ArbiterDirectory, RanksThatDoNotFitAreRefused) {
  ArbiterFile(directory_, kJob, 0, 8).create();
  ArbiterFile(directory_, kJob, 0, 8).decide(Member::founder(0, 8, true).statement());
  expect_error(ErrorKind::system, {"is damaged"}, [&] { arbiter(1).decide({}); });
}

/// Two halves could both go on where hosts do not see each other's locks.
TEST_F(ArbiterDirectory, LocksThatAreNotSharedAreFound) {
  expect_error(ErrorKind::system, {"rank 1", "could not be opened", "all hosts share"},
               [&] { arbiter(1).check_locked(); });
  {
    const LockedFile held = arbiter(0).create();
    arbiter(1).check_locked();
    arbiter(1).check_there();
    expect_error(ErrorKind::system, {"could not be locked", "another rank"},
                 [&] { arbiter(1).decide({}); });
  }
  expect_error(ErrorKind::system, {"rank 1", "two halves could both go on", "nolock"},
               [&] { arbiter(1).check_locked(); });
  expect_error(ErrorKind::system, {"could not be opened", "give a directory"},
               [&] { arbiter(0).create(); });  // it is there already
}

TEST_F(ArbiterDirectory, TheLastRankThatLeavesRemovesTheFile) {
  arbiter(0).create();
  const Member::Seats all = Member::Seats::first(3);  // rank 3 was lost
  for (const int rank : {1, 0}) {
    arbiter(rank).leave(all);
    EXPECT_TRUE(std::filesystem::exists(file()));
  }
  arbiter(2).leave(all);
  EXPECT_FALSE(std::filesystem::exists(file()));
}

TEST(Asking, DoesNotWaitForAnArbiterThatHangs) {
  auto hung = std::make_shared<std::latch>(1);
  Arbiter arbiter([hung](const Member::Said& asked) {
    hung->wait();
    return asked;
  });
  EXPECT_FALSE(arbiter.ask(Member::founder(1, 4, true).statement()));
  EXPECT_FALSE(arbiter.ask({}));  // the question before is open
  hung->count_down();
  std::optional<Member::Said> answer;
  while (!answer) answer = arbiter.ask({});
  EXPECT_EQ(answer->epoch, 1u);
}

TEST(Asking, WorkThatHangsEndsInAnError) {
  auto hung = std::make_shared<std::latch>(1);
  expect_error(ErrorKind::system, {"it is late"},
               [&] { at_most_for<void>(1ms, "it is late", [hung] { hung->wait(); }); });
  hung->count_down();
  EXPECT_EQ(at_most_for<int>(20s, "it is late", [] { return 7; }), 7);
}

}  // namespace
}  // namespace ferry::engine::test

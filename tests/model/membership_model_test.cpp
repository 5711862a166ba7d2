// The membership of elastic groups: deaths, suspicions, one-way partitions and joins at any moment.
#include <gtest/gtest.h>

#include <cstdio>
#include <memory>
#include <string>

#include "membership_search.hpp"

namespace ferry::model::membership_model {
namespace {

using protocol::Generation;

std::string text_of(const MembershipReport& report) {
  std::string text = report.failure + "\n";
  for (const std::string& event : report.events) text += "  " + event + "\n";
  return text;
}
template <class Traits = SmallTraits>
MembershipReport membership(const MembershipCase& what) {
  return MembershipSearch<Traits>(what).run();
}
void expect_sound(const char* what, const MembershipCase& bounds) {
  const MembershipReport report = membership(bounds);
  std::printf("%s: %llu states\n", what, static_cast<unsigned long long>(report.states));
  EXPECT_TRUE(report.failure.empty()) << what << ": " << text_of(report);
  EXPECT_TRUE(report.complete) << what << ": too many states";
}
template <class Traits>
void expect_caught(const char* what, const char* why, const MembershipCase& bounds) {
  const MembershipReport report = membership<Traits>(bounds);
  std::printf("mutant, %s: caught after %llu states\n", what,
              static_cast<unsigned long long>(report.states));
  EXPECT_EQ(report.failure, why) << what;
}

TEST(MembershipModel, IsSound) {
  expect_sound("2 ranks, 1 death, 1 late", {.ranks = 2, .deaths = 1, .late = 1, .generations = 1});
  expect_sound("2 ranks, 1 late while they agree, arbiter",
               {.ranks = 2, .late = 1, .delays = 2, .agreeing = true, .arbiter = true});
  expect_sound("3 ranks, 1 late, 2 delays", {.late = 1, .delays = 2});
  expect_sound("3 ranks, 2 deaths", {.deaths = 2});
  expect_sound("3 ranks, 1 death, generations", {.deaths = 1, .delays = 0, .generations = 1});
  expect_sound("3 ranks, 1 late while they agree", {.late = 1, .agreeing = true});
  expect_sound("3 ranks, 1 death while they agree", {.deaths = 1, .delays = 0, .agreeing = true});
  expect_sound("3 ranks, 1 cut", {.cuts = 1, .gives_up = true});
  expect_sound("3 ranks, 1 death, 1 joins", {.deaths = 1, .joins = 1, .closes = true});
  expect_sound("3 ranks, 1 late, 1 joins", {.late = 1, .delays = 0, .joins = 2, .closes = true});
  expect_sound("3 ranks, 1 death, 1 knocks",
               {.deaths = 1, .delays = 0, .joins = 2, .knocks = true});
  expect_sound("1 begins alone, 1 joins, 1 death", {.ranks = 1, .deaths = 1, .joins = 1});
  expect_sound("1 begins alone, 1 joins, 1 late", {.ranks = 1, .late = 1, .joins = 1});
  expect_sound("4 ranks, 1 late, arbiter", {.ranks = 4, .late = 1, .delays = 0, .arbiter = true});
  expect_sound("2 ranks, 3 regroups", {.ranks = 2, .regroups = 3, .goes_on = true});
  expect_sound("3 ranks, 2 regroups", {.regroups = 2, .goes_on = true});
  expect_sound("2 ranks, 1 regroup, 1 death",
               {.ranks = 2, .deaths = 1, .generations = 1, .regroups = 1, .goes_on = true});
  expect_sound("3 ranks, 1 regroup, 1 late",
               {.late = 1, .delays = 0, .regroups = 1, .goes_on = true});
  expect_sound("1 begins alone, 1 joins, 2 regroups",
               {.ranks = 1, .regroups = 2, .goes_on = true, .joins = 1});
}

TEST(MembershipModel, IsSoundOnRandomWalks) {
  MembershipCase all{.ranks = 3,
                     .deaths = 2,
                     .late = 2,
                     .cuts = 1,
                     .retries = 2,
                     .generations = 2,
                     .regroups = 2,
                     .goes_on = true,
                     .joins = 0,
                     .gives_up = true,
                     .closes = true,
                     .walks = 200};
  for (const int joins : {-1, 0, 2}) {
    all.joins = joins;
    expect_sound("3 ranks, everything", all);
  }
  all.closes = false;
  all.knocks = true;
  expect_sound("3 ranks, everything, knocks", all);
  all.closes = true;
  all.knocks = false;
  all.joins = -1;
  all.ranks = 4;
  for (const bool arbiter : {false, true}) {
    all.arbiter = arbiter;
    expect_sound("4 ranks, everything", all);
  }
}

struct AnyQuorum : SmallTraits {
  static constexpr bool majority(int votes, int) { return votes > 0; }
};
struct HalfQuorum : SmallTraits {
  static constexpr bool majority(int votes, int seats) { return votes >= seats; }
};
struct NoPromises : SmallTraits {
  static constexpr bool kPromises = false;
};
struct NothingAdopted : SmallTraits {
  static constexpr bool kAdopts = false;
};
struct DeadAlwaysDiscounted : SmallTraits {
  static constexpr bool kLastPromise = false;
};
struct RunsOn : SmallTraits {
  static constexpr bool kStops = false;
};
struct NextGeneration : SmallTraits {
  static constexpr Generation after(Generation newest) { return newest + 1; }
};
struct OwnStep : SmallTraits {
  static constexpr std::uint64_t newer(std::uint64_t mine, std::uint64_t) { return mine; }
};
struct NoQuarantine : SmallTraits {
  static constexpr bool kQuarantine = false;
};
struct SeatsInQuarantine : SmallTraits {
  static constexpr bool kHoles = false;
};
struct AnyKnock : SmallTraits {
  static constexpr bool kKnocksProve = false;
};
struct NoTickets : SmallTraits {
  static constexpr bool kTickets = false;
};
struct WithoutOffers : SmallTraits {
  static constexpr bool kOffered = false;
};
struct NoEpochs : SmallTraits {
  static constexpr bool kEpochs = false;
};
struct OneLeader : SmallTraits {
  static constexpr bool kNextLeader = false;
};
struct StopsAtOnce : SmallTraits {
  static constexpr bool kGoesOn = false;
};
struct ForgetfulArbiter : SmallTraits {
  static constexpr bool kArbiterPromises = false;
};
constexpr const char* kTwoViews = "two views of one epoch";
constexpr const char* kMinority = "a minority committed";
constexpr const char* kTwoEpochs = "a generation belongs to two epochs";
constexpr const char* kStuck = "stuck, though a quorum is alive and hears everything";

TEST(MembershipModel, MutantsAreCaught) {
  expect_caught<AnyQuorum>("any quorum", kTwoViews, {.late = 2});
  expect_caught<HalfQuorum>("half is a quorum", kMinority, {.ranks = 2, .late = 2});
  expect_caught<RunsOn>("does not stop", kTwoEpochs, {.ranks = 2, .late = 1, .generations = 4});
  expect_caught<NextGeneration>("the next generation", kTwoEpochs,
                                {.ranks = 2, .deaths = 1, .late = 1, .generations = 2});
  expect_caught<OwnStep>("the leader's step", "a survivor is ahead of the agreed step",
                         {.ranks = 2, .late = 1, .generations = 1});
  expect_caught<NoQuarantine>("no quarantine", "a quarantined region is granted", {.late = 1});
  expect_caught<AnyKnock>("who joins does not look for the former one",
                          "a quarantined region is granted",
                          {.late = 1, .delays = 0, .joins = 2, .knocks = true});
  expect_caught<SeatsInQuarantine>("joiners take any seat", kStuck, {.joins = 1});
  expect_caught<NoTickets>("no tickets", "two processes in one seat",
                           {.late = 1, .joins = 2, .closes = true});
  expect_caught<WithoutOffers>("members that did not offer",
                               "a survivor is ahead of the agreed step",
                               {.late = 1, .delays = 0, .generations = 1});
  expect_caught<NoEpochs>("statements of any epoch", kStuck, {.late = 1, .agreeing = true});
  expect_caught<OneLeader>("one leader for ever", kStuck,
                           {.deaths = 1, .delays = 0, .agreeing = true});
  expect_caught<StopsAtOnce>("stops before it has gone on",
                             "a rank was passed over, though nobody was lost",
                             {.ranks = 2, .regroups = 2, .goes_on = true});
  expect_caught<ForgetfulArbiter>(
      "the arbiter promises nothing", kTwoViews,
      {.ranks = 2, .late = 2, .delays = 2, .agreeing = true, .arbiter = true});
}

/// Ranks that hear each other when a test says so.
template <class Traits>
struct Script {
  using Rank = protocol::Membership<Traits>;
  Rank ranks[4];
  typename Rank::Said arbiter;

  Script(int seats, bool has_arbiter)
      : ranks{Rank::founder(0, seats, has_arbiter), Rank::founder(1, seats, has_arbiter),
              Rank::founder(2, seats, has_arbiter), Rank::founder(3, seats, has_arbiter)} {
    for (int a = 0; a < seats; ++a) {
      for (int b = 0; b < seats; ++b) hears(a, b);
    }
  }
  void hears(int who, int whom) { ranks[who].hear(whom, ranks[whom].statement()); }
  void asks(int who) {
    arbiter = Rank::arbitrate(arbiter, ranks[who].statement());
    ranks[who].hear_arbiter(arbiter);
  }
  void proves(int who, int whom, bool last_statement = true) {
    if (last_statement) hears(who, whom);
    ranks[who].died(whom);
  }
  void settles(int who) {
    while (ranks[who].view().epoch < 2 && ranks[who].settle()) continue;
  }
  /// 1: both have committed the same view of epoch 2; 2: different ones; 0: not both.
  int views(int a, int b) {
    settles(a);
    settles(b);
    const auto &one = ranks[a].view(), &two = ranks[b].view();
    if (one.epoch != 2 || two.epoch != 2) return 0;
    return one == two ? 1 : 2;
  }
};

/// Rank 0's view was committed by 0 and 2, unheard by 1, which leads the next round.
template <class Traits>
int committed_before_next_round() {
  Script<Traits> s(3, false);
  s.ranks[0].stop();
  for (const int other : {1, 2}) s.hears(other, 0);
  for (const int other : {1, 2}) s.hears(0, other);
  s.hears(2, 0);
  s.hears(0, 2);
  s.ranks[1].suspect(0);
  s.hears(2, 1);
  s.hears(1, 2);
  s.hears(2, 1);
  s.hears(1, 2);
  return s.views(0, 1);
}
/// Rank 0's proposal comes to 2 when 2 has promised 1 a newer round.
template <class Traits>
int late_proposal() {
  Script<Traits> s(3, false);
  s.ranks[0].stop();
  for (const int other : {1, 2}) s.hears(other, 0);
  for (const int other : {1, 2}) s.hears(0, other);
  s.ranks[1].suspect(0);
  s.hears(2, 1);
  s.hears(1, 2);
  s.hears(2, 0);
  s.hears(0, 2);
  s.settles(0);
  s.hears(2, 1);
  s.hears(1, 2);
  return s.views(0, 1);
}
/// Ranks 2 and 3 promise 1 a newer round than that of 0, and die.
template <class Traits>
int promised_and_died() {
  Script<Traits> s(4, true);
  s.ranks[0].stop();
  for (const int other : {1, 2, 3}) s.hears(other, 0);
  for (const int other : {1, 2, 3}) s.hears(0, other);
  s.asks(0);
  s.ranks[1].suspect(0);
  for (const int other : {2, 3}) s.hears(other, 1);
  for (const int other : {2, 3}) s.hears(1, other);
  for (const int other : {2, 3}) s.proves(0, other);
  s.settles(0);
  for (const int other : {2, 3}) s.proves(1, other);
  s.asks(1);
  return s.views(0, 1);
}
/// Ranks 0 and 1 commit and die; 2 proves it, with or without their last statements.
int committed_and_died(bool last_statement) {
  Script<SmallTraits> s(3, false);
  s.ranks[0].stop();
  for (const int other : {1, 2}) s.hears(other, 0);
  for (const int other : {1, 2}) s.hears(0, other);
  s.hears(1, 0);
  s.hears(0, 1);
  s.settles(0);
  for (const int other : {0, 1}) s.proves(2, other, last_statement);
  return s.views(0, 2);
}

// Rules whose mutants need more events than a search can take in any order.
TEST(MembershipModel, RoundsBuildOnEachOther) {
  EXPECT_EQ(committed_before_next_round<SmallTraits>(), 1);
  EXPECT_EQ(committed_before_next_round<NothingAdopted>(), 2);
  EXPECT_EQ(late_proposal<SmallTraits>(), 0);
  EXPECT_EQ(late_proposal<NoPromises>(), 2);
}
TEST(MembershipModel, TheDeadHaveTheirSay) {
  EXPECT_NE(promised_and_died<SmallTraits>(), 2);
  EXPECT_EQ(promised_and_died<DeadAlwaysDiscounted>(), 2);
  EXPECT_NE(committed_and_died(true), 2);
  EXPECT_EQ(committed_and_died(false), 2);
}

TEST(Membership, TwoThousandSeats) {
  using Rank = protocol::Membership<>;
  const auto rank = std::make_unique<Rank>(Rank::founder(0, 2048));
  EXPECT_EQ(rank->view().live.count(), 2048);
  EXPECT_TRUE(rank->accepts(1, 1));
  EXPECT_FALSE(rank->accepts(2, 1));
  EXPECT_FALSE(rank->accepts(1, 0));
  rank->suspect(2047);
  EXPECT_FALSE(rank->running());
  EXPECT_FALSE(rank->accepts(1, 1));
  for (int seat = 1; seat <= 1024; ++seat) rank->suspect(seat);
  EXPECT_TRUE(rank->minority());
  rank->trust(1);
  rank->trust(2);
  EXPECT_FALSE(rank->minority());
}

}  // namespace
}  // namespace ferry::model::membership_model

// A group of several domains, joined by libfabric, goes on without ranks that left or are late.
// Ranks are threads; deaths of processes are in tests/reliability.
#include <algorithm>
#include <filesystem>
#include <latch>
#include <random>
#include <string>

#include "engine/test_network.hpp"
#include "host/throughput/test_joins.hpp"
#include "platform/process.hpp"

namespace ferry::host::test {

namespace {

Error first_error(Group& group) {
  try {
    for (;;) group.barrier();
  } catch (const Error& error) {
    return error;
  }
}

class RegroupDomains : public testing::TestWithParam<Crossing> {};

/// Rails have holes, rails meet in a smaller domain, a domain is empty, one domain is left.
TEST_P(RegroupDomains, GoesOnWithoutRanksThatLeft) {
  if (!has_network()) GTEST_SKIP() << "no libfabric on this machine";
  GroupConfig config = domains_of(3);
  config.crossing = GetParam();
  with_groups(8, config, [&](Group& group) {  // 0 1 2, 3 4 5, 6 7
    const auto lose = [&](const std::vector<int>& leave, const std::vector<int>& left) {
      exchange_among(group, group.view().ranks, 2);
      barrier_before_some_leave(group);
      if (std::find(leave.begin(), leave.end(), group.rank()) != leave.end()) return false;
      EXPECT_EQ(regroup_to(group, left).ranks, left);
      exchange_among(group, left, 3);
      return true;
    };
    const MemoryStats before = group.memory();
    if (group.rank() == 0 || group.rank() == 7) {
      lose({0, 7}, {});
      return group.destroy();
    }
    lose({0, 7}, {1, 2, 3, 4, 5, 6});
    if (group.rank() == 6) {
      lose({6}, {});
      return group.destroy();
    }
    lose({6}, {1, 2, 3, 4, 5});  // nobody of its domain is left to tell
    EXPECT_EQ(group.memory().control_bytes, before.control_bytes);
    EXPECT_EQ(group.domains(), 3);
    if (group.rank() < 3) {
      lose({1, 2}, {});
      return group.destroy();
    }
    lose({1, 2}, {3, 4, 5});
    group.barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(All, RegroupDomains,
                         testing::Values(Crossing::direct, Crossing::hierarchical));

TEST(RegroupDomainsErrors, ARankThatIsLateIsEvicted) {
  if (!has_network()) GTEST_SKIP() << "no libfabric on this machine";
  std::latch gone_on(3), done(4);
  with_groups(4, domains_of(2, 1s), [&](Group& group) {
    exchange_among(group, {0, 1, 2, 3}, 1);
    group.barrier();
    if (group.rank() == 3) {
      gone_on.wait();
      expect_error(ErrorKind::evicted, {"rank 3", "went on without"}, [&] {
        for (;;) group.barrier();
      });
      expect_error(ErrorKind::evicted, {"rank 3", "went on without"}, [&] { group.regroup(); });
      return done.arrive_and_wait();
    }
    EXPECT_EQ(first_error(group).peer(), 3);
    EXPECT_EQ(group.regroup(), (GroupView{2, {0, 1, 2}, {3}, 0}));
    gone_on.count_down();
    exchange_among(group, {0, 1, 2}, 10);
    group.barrier();
    done.arrive_and_wait();
  });
}

/// A rank that is back calls again while others agree, or hear that nothing is under way to them.
TEST(RegroupDomainsErrors, ManyInARowHaveOneEpochEach) {
  if (!has_network()) GTEST_SKIP() << "no libfabric on this machine";
  constexpr std::uint64_t kCalls = 25;
  const auto bootstraps = thread_bootstrap(4);
  on_ranks(4, [&](int rank) {
    std::mt19937 random(kSeed + static_cast<unsigned>(rank));
    const auto doze = [&] { std::this_thread::sleep_for(random() % 8 * 500us); };
    GroupConfig config = domains_of(2);
    config.on_wait = [&] {
      if (random() % 2 == 0) doze();
    };
    Group group(bootstraps[static_cast<std::size_t>(rank)], config);
    for (std::uint64_t call = 1; call <= kCalls; ++call) {
      if (random() % 2 == 0) doze();
      ASSERT_EQ(group.regroup(), (GroupView{call + 1, {0, 1, 2, 3}, {}, 0})) << "seed " << kSeed;
    }
    exchange_among(group, {0, 1, 2, 3}, 1);
    group.barrier();
  });
}

/// The news that a rank calls regroup overtakes what that rank has sent before.
TEST(RegroupDomainsErrors, CallsThatAllRanksMadeBeforeItEndWell) {
  if (!has_network()) GTEST_SKIP() << "no libfabric on this machine";
  with_groups(4, domains_of(1), [&](Group& group) {
    for (std::uint64_t round = 1; round <= 100; ++round) {
      if (round % 2 == 0) exchange_among(group, {0, 3}, 1);
      group.commit(round);
      ASSERT_EQ(group.regroup(), (GroupView{round + 1, {0, 1, 2, 3}, {}, round}));
    }
    group.barrier();
  });
}

/// Rank 0 leads and waits for rank 1, which never comes, until its deadline; that of the others is
/// over a moment later, before rank 3 has said that nothing is under way to it.
TEST(RegroupDomainsErrors, ARankThatAnswersLateStaysWhenTheAgreementTookTheDeadline) {
  if (!has_network()) GTEST_SKIP() << "no libfabric on this machine";
  static thread_local bool slow = false;
  GroupConfig config = domains_of(2, 2s);
  config.on_wait = [] {
    if (slow) std::this_thread::sleep_for(300ms);
  };
  const std::vector<int> left{0, 2, 3, 4, 5};
  std::latch met(6), gone_on(6);
  with_groups(6, config, [&](Group& group) {
    group.barrier();
    met.arrive_and_wait();
    if (group.rank() == 1) {
      gone_on.arrive_and_wait();
      return expect_error(ErrorKind::evicted, {"rank 1", "went on without"},
                          [&] { group.barrier(); });
    }
    if (group.rank() != 0) std::this_thread::sleep_for(20ms);
    slow = group.rank() == 3;
    GroupView view;
    EXPECT_NO_THROW(view = group.regroup());
    slow = false;
    EXPECT_EQ(view.ranks, left);
    EXPECT_EQ(view.epoch, 2u);
    gone_on.arrive_and_wait();
    if (view.ranks != left) return;
    exchange_among(group, left);
    barrier_before_some_leave(group);
  });
}

TEST(RegroupDomainsErrors, HalfOfTheRanksGiveUp) {
  if (!has_network()) GTEST_SKIP() << "no libfabric on this machine";
  std::latch given_up(4);
  with_groups(4, domains_of(2, 1500ms), [&](Group& group) {
    group.barrier();
    if (group.rank() < 2) {
      EXPECT_GE(first_error(group).peer(), 2);
      expect_error(ErrorKind::deadline,
                   {"ranks 2 and 3", "no majority", "epoch 1", "half of it", "no arbiter"},
                   [&] { group.regroup(); });
    }
    given_up.arrive_and_wait();
  });
}

/// A directory that "all hosts" share.
class RegroupByArbiter : public testing::Test {
 protected:
  void SetUp() override {
    if (!has_network()) GTEST_SKIP() << "no libfabric on this machine";
    std::filesystem::create_directory(shared_);
    config_.arbiter = shared_;
  }
  void TearDown() override { std::filesystem::remove_all(shared_); }

  const std::filesystem::path shared_ =
      testing::TempDir() + "ferry_shared_" + std::to_string(process_id());
  GroupConfig config_ = domains_of(2, 600ms);
};

TEST_F(RegroupByArbiter, OneHalfGoesOn) {
  std::latch gone_on(2), done(4);
  with_groups(4, config_, [&](Group& group) {
    group.barrier();
    if (group.rank() < 2) {
      EXPECT_GE(first_error(group).peer(), 2);
      EXPECT_EQ(group.regroup(), (GroupView{2, {0, 1}, {2, 3}, 0}));
      exchange_among(group, {0, 1});
      gone_on.count_down();
    } else {
      gone_on.wait();
      expect_error(ErrorKind::evicted, {"went on without"}, [&] {
        for (;;) group.barrier();
      });
    }
    done.arrive_and_wait();
  });
  EXPECT_TRUE(std::filesystem::is_empty(shared_)) << "the last rank that leaves removes the file";
}

TEST_F(RegroupByArbiter, HalfOfTheRanksGiveUpWhenItIsGone) {
  std::latch removed(2), given_up(4);
  with_groups(4, config_, [&](Group& group) {
    group.barrier();
    if (group.rank() < 2) {
      EXPECT_GE(first_error(group).peer(), 2);
      if (group.rank() == 0) std::filesystem::remove_all(shared_);
      removed.arrive_and_wait();
      expect_error(ErrorKind::deadline, {"no majority", "epoch 1"}, [&] {
        try {
          group.regroup();
        } catch (const Error& error) {
          const bool asked =
              std::string(error.what()).find("could not be opened") != std::string::npos;
          EXPECT_TRUE(asked || group.rank() != 0) << error.what();
          throw;
        }
      });
    }
    given_up.arrive_and_wait();
  });
}

/// Its directory is not there, or there are not several domains.
TEST(RegroupDomainsErrors, AnArbiterThatCannotBeIsRefused) {
  GroupConfig config = domains_of(1);
  config.experts = 2;
  config.arbiter = "/nonexistent/shared";
  const auto refused = [&](ErrorKind kind, const char* what) {
    const auto bootstraps = thread_bootstrap(2);
    on_ranks(2, [&](int rank) {
      try {
        const Group group(bootstraps[index(rank)], config);
        ADD_FAILURE() << "no error";
      } catch (const Error& error) {
        EXPECT_TRUE(error.kind() == kind || error.kind() == ErrorKind::peer_failed) << error.what();
        EXPECT_NE(std::string(error.what()).find(what), std::string::npos) << error.what();
      }
    });
  };
  if (has_network()) refused(ErrorKind::system, "arbiter's file /nonexistent/shared/");
  config.domain_size = 0;
  config.network = FabricKind::automatic;
  refused(ErrorKind::unsupported, "Group: arbiter: got 2 ranks in 1 domains");
}

}  // namespace
}  // namespace ferry::host::test

// Processes join domains of which nobody is left. Ranks are threads; deaths of processes are in
// tests/reliability.
#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <latch>
#include <optional>
#include <string>

#include "engine/test_network.hpp"
#include "fabric/domains/shared_doors.hpp"
#include "host/throughput/test_joins.hpp"
#include "platform/process.hpp"

namespace ferry::host::test {
namespace {

GroupConfig elastic_domains(int size, const std::string& name,
                            std::chrono::nanoseconds deadline = 20s) {
  GroupConfig config = domains_of(size, deadline);
  config.experts = 60;
  config.fabric = FabricKind::shm;
  config.elastic = name + std::to_string(process_id());
  return config;
}

void throw_unless_lost(const Error& error) {
  if (error.kind() != ErrorKind::peer_failed && error.kind() != ErrorKind::peer_left) throw error;
}

/// Regroups whenever that is asked for, until the view has `ranks`; then exchanges among them.
void go_on_until(Group& group, const std::vector<int>& ranks) {
  std::uint64_t step = group.view().step + 1;
  while (group.view().ranks != ranks) {
    try {
      if (!group.commit(step++)) {
        std::this_thread::sleep_for(1ms);
        continue;
      }
    } catch (const Error& error) {  // another rank is lost, or has called regroup
      throw_unless_lost(error);
    }
    step = group.regroup().step + 1;
  }
  for (int round = 0; round < 3;) {  // a last regroup may be under way
    try {
      exchange_among(group, ranks, 1);
      ++round;
      if (round == 3) group.barrier();
    } catch (const Error& error) {
      throw_unless_lost(error);
      round = 0;
      group.regroup();
    }
  }
}

struct Domains {
  const char* name;
  int ranks;
  int size;                ///< of a domain
  std::vector<int> leave;  ///< in this order
  std::vector<int> join;   ///< at once
};

class JoinDomains : public testing::TestWithParam<Domains> {};

TEST_P(JoinDomains, ProcessesComeBackWhereNobodyIsLeft) {
  if (!has_network()) GTEST_SKIP() << "no libfabric on this machine";
  const Domains& what = GetParam();
  const GroupConfig config = elastic_domains(what.size, what.name);
  const auto leaves = [&](int rank) {
    return std::find(what.leave.begin(), what.leave.end(), rank) != what.leave.end();
  };
  std::vector<int> left, all;
  for (int rank = 0; rank < what.ranks; ++rank) {
    if (!leaves(rank)) left.push_back(rank);
    const bool back = std::find(what.join.begin(), what.join.end(), rank) != what.join.end();
    if (!leaves(rank) || back) all.push_back(rank);
  }
  const auto bootstraps = thread_bootstrap(what.ranks);
  const int threads = what.ranks + static_cast<int>(what.join.size());
  std::latch gone(what.ranks), done(static_cast<std::ptrdiff_t>(all.size()));
  on_ranks(threads, [&](int thread) {
    std::optional<Group> group;
    if (thread < what.ranks) {
      group.emplace(bootstraps[static_cast<std::size_t>(thread)], config);
      exchange_among(*group, group->view().ranks, 1);
      barrier_before_some_leave(*group);
      if (leaves(thread)) {
        group->destroy();
        return gone.count_down();
      }
      go_on_until(*group, left);
      gone.arrive_and_wait();
    } else {
      gone.wait();
      const int rank = what.join[static_cast<std::size_t>(thread - what.ranks)];
      group.emplace(join(rank, what.ranks, config));
      const auto& joined = group->view().joined;
      EXPECT_NE(std::find(joined.begin(), joined.end(), rank), joined.end());
    }
    go_on_until(*group, all);
    EXPECT_EQ(group->view().lost.size(), static_cast<std::size_t>(what.ranks) - all.size());
    done.arrive_and_wait();
  });
}

INSTANTIATE_TEST_SUITE_P(All, JoinDomains,
                         testing::Values(Domains{"alone", 3, 1, {2}, {2}},
                                         Domains{"host", 4, 2, {2, 3}, {2, 3}},
                                         Domains{"first", 5, 2, {0, 1}, {1, 0}},
                                         Domains{"two", 4, 1, {1, 3}, {3, 1}},
                                         Domains{"part", 6, 2, {2, 3, 5}, {3, 5}}),
                         [](const auto& test) { return std::string(test.param.name); });

struct Beginning {
  const char* name;
  int ranks;
  int size;                ///< of a domain
  std::vector<int> first;  ///< the one that begins, then at once
  std::vector<int> later;  ///< at once, when those are there
};

class BeginDomains : public testing::TestWithParam<Beginning> {};

TEST_P(BeginDomains, OneBeginsAndTheOthersComeInAnyOrder) {
  if (!has_network()) GTEST_SKIP() << "no libfabric on this machine";
  const Beginning& what = GetParam();
  const GroupConfig config = elastic_domains(what.size, std::string("begin_") + what.name);
  std::vector<int> first = what.first, all = what.first;
  all.insert(all.end(), what.later.begin(), what.later.end());
  const std::vector<int> come = all;
  std::sort(first.begin(), first.end());
  std::sort(all.begin(), all.end());
  std::latch begun(1), there(static_cast<std::ptrdiff_t>(first.size()));
  std::latch done(static_cast<std::ptrdiff_t>(all.size()));
  on_ranks(static_cast<int>(come.size()), [&](int thread) {
    const int rank = come[static_cast<std::size_t>(thread)];
    std::optional<Group> group;
    if (thread == 0) {
      group.emplace(begin(rank, what.ranks, config));
      EXPECT_EQ(group->view().ranks, std::vector<int>{rank});
      exchange_among(*group, {rank}, 1);
      begun.count_down();
    } else {
      begun.wait();
      if (thread >= static_cast<int>(first.size())) there.wait();
      group.emplace(join(rank, what.ranks, config));
    }
    if (thread < static_cast<int>(first.size())) {
      go_on_until(*group, first);
      there.arrive_and_wait();
    }
    go_on_until(*group, all);
    EXPECT_EQ(group->view().lost.size(), static_cast<std::size_t>(what.ranks) - all.size());
    done.arrive_and_wait();
  });
}

INSTANTIATE_TEST_SUITE_P(All, BeginDomains,
                         testing::Values(Beginning{"alone", 3, 1, {1}, {2, 0}},
                                         Beginning{"own", 4, 2, {3, 2}, {0, 1}},
                                         Beginning{"others", 6, 2, {4, 1}, {5, 0, 3}},
                                         Beginning{"last", 6, 3, {5}, {2, 1, 0, 3}}),
                         [](const auto& test) { return std::string(test.param.name); });

/// Of whom only the directory tells.
TEST(BeginDomainsOfHosts, NobodyBeginsBesideAnother) {
  if (!has_network()) GTEST_SKIP() << "no libfabric on this machine";
  const std::filesystem::path shared =
      testing::TempDir() + "ferry_begin_" + std::to_string(process_id());
  std::filesystem::create_directory(shared);
  GroupConfig config = elastic_domains(1, "beside");
  config.arbiter = shared;
  {
    const Group begun = begin(1, 2, config);
    const auto files = std::distance(std::filesystem::directory_iterator(shared), {});
    EXPECT_EQ(files, 2) << "the arbiter's file and a door";
  }
  EXPECT_TRUE(std::filesystem::is_empty(shared));
  // The file of a process that was killed here is taken over; elsewhere it may run.
  const std::string name = "\"" + config.elastic + "\"";
  const ferry::fabric::SharedDoors doors(shared, name, 0, 2);
  doors.show({.group = {1, 2}, .there = {.rank = 0, .text = "as it was", .card = {}}});
  for (const int rank : {0, 1}) {
    expect_error(ErrorKind::refused, {"rank " + std::to_string(rank), "file of rank 0", "remove"},
                 [&] { begin(rank, 2, config); });
  }
  std::filesystem::remove_all(shared);
}

/// The file of a turn, as another host holds it. One of a process that was killed is not locked.
TEST(BeginDomainsOfHosts, OfThoseThatBeginAtOnceOneDoes) {
  if (!has_network()) GTEST_SKIP() << "no libfabric on this machine";
  const std::filesystem::path shared =
      testing::TempDir() + "ferry_turn_" + std::to_string(process_id());
  std::filesystem::create_directory(shared);
  GroupConfig config = elastic_domains(1, "at_once");
  config.arbiter = shared;
  const ferry::fabric::SharedDoors doors(shared, "\"" + config.elastic + "\"", 0, 4);
  for (int round = 0; round < 20; ++round) {
    std::latch ready(4), tried(4);
    std::atomic<int> turns = 0;
    on_ranks(4, [&](int) {
      ready.arrive_and_wait();
      std::optional<ferry::fabric::TurnToBegin> turn;
      try {
        turn.emplace(doors.turn_to_begin());
        ++turns;
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::refused) << error.what();
      }
      tried.arrive_and_wait();
    });
    EXPECT_EQ(turns, 1);
  }
  std::filesystem::path left;
  {
    const auto turn = doors.turn_to_begin();
    expect_error(ErrorKind::refused, {"rank 1", "another process begins", "join it"},
                 [&] { begin(1, 4, config); });
    left = std::filesystem::directory_iterator(shared)->path();
  }
  EXPECT_TRUE(std::filesystem::is_empty(shared));
  std::ofstream{left};
  EXPECT_EQ(begin(1, 4, config).view().ranks, std::vector<int>{1});
  EXPECT_TRUE(std::filesystem::is_empty(shared));
  std::filesystem::remove_all(shared);
}

/// At most one has the turn, whenever others end theirs.
TEST(BeginDomainsOfHosts, NoTwoHaveTheTurnWhileOthersEndTheirs) {
  const std::filesystem::path shared =
      testing::TempDir() + "ferry_turns_" + std::to_string(process_id());
  std::filesystem::create_directory(shared);
  const ferry::fabric::SharedDoors doors(shared, std::string("turns"), 0, 4);
  std::atomic<int> here = 0, most = 0;
  on_ranks(4, [&](int) {
    for (int tries = 0; tries < 1000; ++tries) {
      try {
        const auto turn = doors.turn_to_begin();
        most = std::max(most.load(), ++here);
        --here;
      } catch (const Error& error) {
        ASSERT_EQ(error.kind(), ErrorKind::refused) << error.what();
      }
    }
  });
  EXPECT_EQ(most, 1);
  std::filesystem::remove_all(shared);
}

/// The former holders were not known to be dead: the processes that come prove it.
TEST(JoinDomainsOfASplit, TheHalfThatLostComesBack) {
  if (!has_network()) GTEST_SKIP() << "no libfabric on this machine";
  const std::filesystem::path shared =
      testing::TempDir() + "ferry_doors_" + std::to_string(process_id());
  std::filesystem::create_directory(shared);
  GroupConfig config = elastic_domains(2, "split", 2s);
  config.arbiter = shared;
  const auto bootstraps = thread_bootstrap(4);
  std::latch gone_on(2), ended(2), done(4);
  on_ranks(6, [&](int thread) {
    std::optional<Group> group;
    if (thread < 4) {
      group.emplace(bootstraps[static_cast<std::size_t>(thread)], config);
      group->barrier();
      if (thread >= 2) {
        gone_on.wait();
        expect_error(ErrorKind::evicted, {"went on without"}, [&] {
          for (;;) group->barrier();
        });
        group->destroy();
        return ended.count_down();
      }
      EXPECT_ANY_THROW(for (;;) group->barrier());
      EXPECT_EQ(group->regroup(), (GroupView{2, {0, 1}, {2, 3}, 0}));
      gone_on.count_down();
    } else {
      ended.wait();
      group.emplace(join(thread - 2, 4, config));
    }
    go_on_until(*group, {0, 1, 2, 3});
    done.arrive_and_wait();
  });
  EXPECT_TRUE(std::filesystem::is_empty(shared)) << "the last rank that leaves removes the files";
  std::filesystem::remove_all(shared);
}

TEST(JoinDomainsErrors, WhoeverIsNotTakenInIsToldWhy) {
  if (!has_network()) GTEST_SKIP() << "no libfabric on this machine";
  const GroupConfig config = elastic_domains(1, "late", 1s);
  const auto bootstraps = thread_bootstrap(3);
  std::latch left(3), refused(1), answered(1), refused_again(1);
  on_ranks(4, [&](int thread) {
    if (thread == 3) {
      left.wait();
      expect_error(ErrorKind::deadline, {"rank 2", "none of another domain has answered"},
                   [&] { join(2, 3, config); });
      refused.count_down();
      return;
    }
    Group group(bootstraps[static_cast<std::size_t>(thread)], config);
    group.barrier();
    if (thread == 2) group.destroy();
    left.count_down();
    refused.wait();
  });
}

}  // namespace
}  // namespace ferry::host::test

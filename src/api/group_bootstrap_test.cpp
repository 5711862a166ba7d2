// Ranks of a group that meet by the group itself. Ranks are threads; deaths of processes are in
// python/tests/test_from_group.py.
#include <algorithm>
#include <numeric>

#include "engine/test_network.hpp"
#include "host/throughput/test_joins.hpp"

namespace ferry::host::test {
namespace {

using Bytes = std::vector<std::byte>;

/// Of a rank in a round: some are empty, some are longer than a message of the group.
Bytes told_by(int rank, int round) {
  const auto size = static_cast<std::size_t>((rank + round) % 3 * 3001);
  return Bytes(size, std::byte(16 * rank + round));
}

void gather_among(Bootstrap& bootstrap, const std::vector<int>& ranks, int here) {
  ASSERT_EQ(bootstrap.size(), int(ranks.size()));
  ASSERT_EQ(ranks[std::size_t(bootstrap.rank())], here);
  for (int round = 0; round < 4; ++round) {
    const auto all = bootstrap.all_gather(told_by(here, round), 20s);
    ASSERT_EQ(all.size(), ranks.size());
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      EXPECT_EQ(all[i], told_by(ranks[i], round)) << "rank " << ranks[i] << ", round " << round;
    }
  }
}

void sum_among(Group& group, const GroupConfig& config, const std::vector<int>& ranks) {
  GroupConfig theirs;
  theirs.deadline = config.deadline;
  theirs.domain_size = config.domain_size;
  theirs.network = config.network;
  theirs.memory_bytes = config.memory_bytes;
  Collectives collectives(group_bootstrap(group), theirs);
  std::vector<float> x(100, static_cast<float>(group.rank()));
  collectives.all_reduce({x.data(), Dtype::f32, {100}}, {});
  const int sum = std::accumulate(ranks.begin(), ranks.end(), 0);
  EXPECT_EQ(x, std::vector<float>(100, static_cast<float>(sum)));
  collectives.barrier();
}

GroupConfig one_domain() {
  GroupConfig config = domains_of(0);
  config.network = FabricKind::automatic;
  return config;
}

struct Case {
  const char* name;
  int domain_size;
};

class GroupBootstrap : public testing::TestWithParam<Case> {
 protected:
  GroupConfig config() const {
    return GetParam().domain_size == 0 ? one_domain() : domains_of(GetParam().domain_size);
  }
};

TEST_P(GroupBootstrap, ServesTheRanksOfEachEpoch) {
  if (GetParam().domain_size > 0 && !has_network()) GTEST_SKIP() << "no libfabric on this machine";
  with_groups(6, config(), [&](Group& group) {
    const auto first = group_bootstrap(group);
    gather_among(*first, {0, 1, 2, 3, 4, 5}, group.rank());
    EXPECT_EQ(first->own_address(), GetParam().domain_size > 0 ? "127.0.0.1" : "");
    sum_among(group, config(), {0, 1, 2, 3, 4, 5});
    barrier_before_some_leave(group);
    if (group.rank() == 0 || group.rank() == 3) return group.destroy();
    regroup_to(group, {1, 2, 4, 5});
    expect_error(ErrorKind::invalid_argument, {"in epoch", "of epoch 1", "after regroup"},
                 [&] { first->all_gather({}, 20s); });
    gather_among(*group_bootstrap(group), {1, 2, 4, 5}, group.rank());
    sum_among(group, config(), {1, 2, 4, 5});
    exchange_among(group, {1, 2, 4, 5}, 1);
    group.barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(All, GroupBootstrap,
                         testing::Values(Case{"one_domain", 0}, Case{"three", 2}),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(GroupBootstrapErrors, ARankThatLeavesIsNamedAndTheOthersGoOn) {
  with_groups(3, one_domain(), [&](Group& group) {
    barrier_before_some_leave(group);
    if (group.rank() == 0) return group.destroy();
    expect_error(ErrorKind::peer_left, {"bootstrap", "rank 0"}, [&] {
      for (;;) Collectives(group_bootstrap(group), {.deadline = 20s});
    });
    group.regroup();
    gather_among(*group_bootstrap(group), {1, 2}, group.rank());
    group.barrier();
  });
}

TEST(GroupBootstrapErrors, CallsThatDifferAreNamed) {
  with_groups(2, one_domain(), [&](Group& group) {
    expect_error(ErrorKind::mismatch, {"bootstrap", "barrier"}, [&] {
      if (group.rank() == 0) return group.barrier();
      group_bootstrap(group)->all_gather(Bytes(5000), 20s);
    });
    const auto bootstrap = group_bootstrap(group);
    barrier_before_some_leave(group);
    group.destroy();
    expect_error(ErrorKind::destroyed, {"bootstrap"}, [&] { bootstrap->all_gather({}, 20s); });
    expect_error(ErrorKind::destroyed, {"group_bootstrap"}, [&] { group_bootstrap(group); });
  });
}

}  // namespace
}  // namespace ferry::host::test

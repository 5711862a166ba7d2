// Vaults across domains, joined by libfabric: state of hosts that are gone is there for the others.
// Ranks are threads; deaths of processes are in tests/reliability.
#include <algorithm>
#include <latch>
#include <optional>

#include "engine/test_network.hpp"
#include "ferry/vault.hpp"
#include "host/throughput/test_joins.hpp"
#include "host/throughput/test_vault.hpp"
#include "platform/process.hpp"

namespace ferry::host::test {
namespace {

std::vector<std::int64_t> keys_below(int end) {
  std::vector<std::int64_t> keys(static_cast<std::size_t>(end));
  std::iota(keys.begin(), keys.end(), 0);
  return keys;
}

bool among(int rank, const std::vector<int>& ranks) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

void commit_and_put(Group& group, Vault& vault, std::uint64_t step) {
  group.commit(step);
  put_own(vault, group, step);
}

struct Loss {
  const char* name;
  int ranks;
  int size;                ///< of a domain
  std::vector<int> leave;  ///< at once
};

class VaultAcrossDomains : public testing::TestWithParam<Loss> {};

TEST_P(VaultAcrossDomains, HasTheStateOfADomainThatIsGone) {
  if (!has_network()) GTEST_SKIP() << "no libfabric on this machine";
  const Loss& loss = GetParam();
  std::vector<int> left;
  for (int rank = 0; rank < loss.ranks; ++rank) {
    if (!among(rank, loss.leave)) left.push_back(rank);
  }
  with_groups(loss.ranks, test::domains_of(loss.size), [&](Group& group) {
    Vault vault(group, bytes_of_one());
    EXPECT_EQ(vault.recover(keys_below(loss.ranks)), std::nullopt);
    put_own(vault, group, 0);
    for (std::uint64_t step = 1; step <= 3; ++step) commit_and_put(group, vault, step);
    barrier_before_some_leave(group);
    if (among(group.rank(), loss.leave)) return group.destroy();
    regroup_to(group, left);
    EXPECT_EQ(vault.recover(keys_below(loss.ranks)), 3u);
    EXPECT_EQ(vault.keys(), keys_below(loss.ranks));
    for (int key = 0; key < loss.ranks; ++key) EXPECT_EQ(got(vault, key), Expert(key, 3)) << key;
    EXPECT_EQ(vault.recover(), 3u) << "again, without a loss";
    EXPECT_EQ(got(vault, group.rank()), Expert(group.rank(), 3));
    for (std::uint64_t step = 4; step <= 6; ++step) commit_and_put(group, vault, step);
    const std::vector<std::int64_t> wanted{left.front(), left.back()};
    EXPECT_EQ(vault.recover(wanted), 6u);
    EXPECT_EQ(vault.keys(), std::vector<std::int64_t>(left.begin(), left.end()));
    for (const std::int64_t key : wanted) EXPECT_EQ(got(vault, key), Expert(int(key), 6)) << key;
    group.barrier();
  });
}

// A whole domain; ranks of several; a smaller domain that keeps for a larger one; one is left.
INSTANTIATE_TEST_SUITE_P(All, VaultAcrossDomains,
                         testing::Values(Loss{"host", 6, 2, {2, 3}}, Loss{"several", 6, 2, {1, 4}},
                                         Loss{"uneven", 5, 3, {0, 1}}, Loss{"alone", 3, 1, {1}},
                                         Loss{"first", 6, 2, {0, 1}}),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(VaultAcrossDomainsCalls, AreCounted) {
  if (!has_network()) GTEST_SKIP() << "no libfabric on this machine";
  with_groups(2, test::domains_of(1), [&](Group& group) {
    Vault vault(group, bytes_of_one());
    vault.recover();
    put_own(vault, group, 0);
    const std::vector<CallStats> calls = group.metrics().calls;
    const auto put = std::find_if(calls.begin(), calls.end(),
                                  [](const CallStats& one) { return one.call == "put"; });
    ASSERT_NE(put, calls.end());
    EXPECT_EQ(put->calls, 1u);
    group.barrier();
  });
}

TEST(VaultAcrossDomainsCalls, RefuseWhatCannotBe) {
  if (!has_network()) GTEST_SKIP() << "no libfabric on this machine";
  with_groups(4, test::domains_of(2), [&](Group& group) {
    Vault vault(group, bytes_of_one());
    vault.recover();
    put_own(vault, group, 0);
    group.commit(1);
    if (group.rank() == 3) {
      expect_error(ErrorKind::invalid_argument, {"put: step", "got 7", "expected 1"},
                   [&] { put_own(vault, group, 7); });
    } else {
      expect_error(ErrorKind::mismatch, {"put", "rank 3 was given an invalid one", "got 7"},
                   [&] { put_own(vault, group, 1); });
    }
    put_own(vault, group, 1);  // they go on
    vault.recover();
    const int far = group.rank() < 2 ? 3 : 0;
    expect_error(ErrorKind::invalid_argument, {"get: key", "another domain", "given to recover"},
                 [&] { got(vault, far); });
    EXPECT_EQ(got(vault, group.rank() ^ 1), Expert(group.rank() ^ 1, 1)) << "of this domain";
    vault.recover(keys_below(9));
    EXPECT_EQ(got(vault, far), Expert(far, 1));
    expect_error(ErrorKind::invalid_argument, {"get: key", "8", "no rank has put"},
                 [&] { got(vault, 8); });
    group.commit(2);
    expect_error(ErrorKind::mismatch, {"the call", "put", "barrier"}, [&] {
      if (group.rank() == 3) return group.barrier();
      put_own(vault, group, 2);
    });
  });
}

}  // namespace
}  // namespace ferry::host::test

// State of ranks that left is there for the others. Ranks are threads; deaths of processes, in the
// middle of a put and of a get too, are in tests/reliability.
#include "ferry/vault.hpp"

#include <latch>
#include <optional>

#include "host/throughput/test_vault.hpp"

namespace ferry::host::test {

using namespace engine::test;
namespace {

GroupConfig config_of_vaults() {
  GroupConfig config;
  config.experts = 8;
  config.memory_bytes = 1 << 16;
  config.deadline = 20s;
  return config;
}

Error fails(Group& group) {
  try {
    for (;;) group.barrier();
  } catch (const Error& error) {
    return error;
  }
}

TEST(Vault, HasTheStateOfARankThatLeft) {
  with_groups(4, config_of_vaults(), [&](Group& group) {
    Vault vault(group, bytes_of_one());
    EXPECT_EQ(vault.recover(), std::nullopt);
    const std::size_t used = group.memory().arena_used_bytes;
    EXPECT_EQ(used, (2 * bytes_of_one() + 64 + 255) / 256 * 256);
    put_own(vault, group, 0);
    for (std::uint64_t step = 1; step <= 3; ++step) {
      group.commit(step);
      put_own(vault, group, step);
    }
    group.barrier();
    if (group.rank() == 2) return group.destroy();
    EXPECT_EQ(fails(group).peer(), 2);
    expect_error(ErrorKind::peer_left, {"put", "rank 2"}, [&] { put_own(vault, group, 3); });
    group.regroup();
    expect_error(ErrorKind::invalid_argument, {"put", "epoch 1", "epoch 2", "recover"},
                 [&] { put_own(vault, group, 3); });
    EXPECT_EQ(vault.recover(), 3u);
    EXPECT_EQ(vault.keys(), (std::vector<std::int64_t>{0, 1, 2, 3}));
    for (int expert = 0; expert < 4; ++expert) EXPECT_EQ(got(vault, expert), Expert(expert, 3));
    // The shelf of rank 2 stays with rank 3 until all have put what they had from it.
    for (std::uint64_t step = 4; step <= 5; ++step) {
      EXPECT_EQ(group.memory().arena_used_bytes, group.rank() == 3 ? 2 * used : used) << step;
      group.commit(step);
      expect_error(ErrorKind::invalid_argument, {"get", "after commit of step"},
                   [&] { got(vault, 2); });
      put_own(vault, group, step);
    }
    group.barrier();
  });
}

TEST(Vault, GoesBackToWhatAllHavePut) {
  with_groups(3, config_of_vaults(), [&](Group& group) {
    Vault vault(group, bytes_of_one());
    vault.recover();
    put_own(vault, group, 0);
    group.commit(1);
    put_own(vault, group, 1);
    group.commit(2);
    if (group.rank() == 1) return group.destroy();
    put_own(vault, group, 2);
    fails(group);
    EXPECT_EQ(group.regroup().step, 2u);
    EXPECT_EQ(vault.recover(), 1u);
    EXPECT_EQ(group.view().step, 1u);
    for (int expert = 0; expert < 3; ++expert) EXPECT_EQ(got(vault, expert), Expert(expert, 1));
    // Again from there, and a second loss before anybody has put: the version is still that one.
    group.barrier();
    if (group.rank() == 0) return group.destroy();
    fails(group);
    group.regroup();
    EXPECT_EQ(vault.recover(), 1u);
    // Rank 2 had kept the state of rank 1; that of rank 0 was in rank 1's memory, then in its own.
    for (int expert = 0; expert < 3; ++expert) EXPECT_EQ(got(vault, expert), Expert(expert, 1));
    group.commit(2);
    put_own(vault, group, 2);
    EXPECT_EQ(vault.recover(), 2u) << "without a loss";
    EXPECT_EQ(vault.keys(), (std::vector<std::int64_t>{2}));
  });
}

TEST(Vault, RefusesWhatCannotBe) {
  with_groups(2, config_of_vaults(), [&](Group& group) {
    Vault vault(group, bytes_of_one());
    expect_error(ErrorKind::invalid_argument, {"Vault", "one vault a group"},
                 [&] { Vault(group, 1); });
    expect_error(ErrorKind::invalid_argument, {"put", "not recovered"},
                 [&] { put_own(vault, group, 0); });
    vault.recover();
    expect_error(ErrorKind::invalid_argument, {"get", "without a version"}, [&] { got(vault, 0); });
    expect_error(ErrorKind::invalid_argument, {"put: step", "got 1", "expected 0"},
                 [&] { put_own(vault, group, 1); });
    auto parts = Expert(0, 0).parts(0);
    parts.push_back(parts[0]);
    expect_error(ErrorKind::exhausted,
                 {"put", std::to_string(Vault::bytes_of(parts)), "version_bytes"},
                 [&] { vault.put(0, parts); });
    parts.pop_back();
    parts[1].type.assign(104, 'x');
    expect_error(ErrorKind::invalid_argument, {"put: key 0.type", "104 characters"},
                 [&] { vault.put(0, parts); });
    parts[0].tensor.strides = {1, 10};
    expect_error(ErrorKind::invalid_argument, {"put: key 0", "strides"},
                 [&] { vault.put(0, parts); });
    put_own(vault, group, 0);
    expect_error(ErrorKind::invalid_argument, {"put: step", "already"},
                 [&] { put_own(vault, group, 0); });
    EXPECT_EQ(vault.recover(), 0u);
    Expert expert;
    auto targets = expert.targets();
    expect_error(ErrorKind::invalid_argument, {"get: key", "7", "step 0"},
                 [&] { vault.get(7, targets); });
    targets[0].tensor.shape = {100};
    targets[0].tensor.strides = {1};
    expect_error(ErrorKind::invalid_argument,
                 {"key 1, tensor 0", "f32[100]", "f32[10, 10]", "rank 1"},
                 [&] { vault.get(1, targets); });
    targets.pop_back();
    expect_error(ErrorKind::invalid_argument, {"key 1", "1 tensors", "2"},
                 [&] { vault.get(1, targets); });
    group.barrier();
  });
}

TEST(Vault, IsTheSameOnAllRanks) {
  with_groups(2, config_of_vaults(), [&](Group& group) {
    Vault vault(group, group.rank() == 0 ? 1000 : 2000);
    expect_error(ErrorKind::mismatch, {"version_bytes", "1024", "2048"}, [&] { vault.recover(); });
    group.barrier();  // it goes on
  });
}

TEST(Vault, TheMemoryGrowsForIt) {
  with_groups(3, config_of_vaults(), [&](Group& group) {
    const std::size_t before = group.memory().arena_bytes;
    std::vector<std::uint64_t> state(1 << 16, 77u + static_cast<unsigned>(group.rank()));
    const VaultPart part{5, {state.data(), Dtype::i64, {1 << 16}}};
    Vault vault(group, Vault::bytes_of({&part, 1}));
    vault.recover();
    EXPECT_GT(group.memory().arena_bytes, before);
    vault.put(0, {&part, 1});
    EXPECT_EQ(vault.recover(), 0u);
    std::vector<std::uint64_t> back(state.size());
    const VaultTarget target{{back.data(), Dtype::i64, {1 << 16}}};
    vault.get(5, {&target, 1});
    EXPECT_EQ(back, state) << "of several ranks the own one's";
    group.barrier();
  });
}

// The other ranks know nothing of it, and go on to put there.
TEST(Vault, ShelvesStayWhenTheObjectIsDropped) {
  with_groups(3, config_of_vaults(), [&](Group& group) {
    std::optional<Vault> vault(std::in_place, group, bytes_of_one());
    vault->recover();
    put_own(*vault, group, 0);
    group.barrier();
    const std::size_t used = group.memory().arena_used_bytes;
    if (group.rank() == 0) vault.reset();
    EXPECT_EQ(group.memory().arena_used_bytes, used);
    group.commit(1);
    if (group.rank() != 0) put_own(*vault, group, 1);
    group.barrier();
    if (group.rank() == 0) {
      expect_error(ErrorKind::invalid_argument, {"Vault: version_bytes", "got 64", "new group"},
                   [&] { Vault(group, 1); });
      vault.emplace(group, bytes_of_one());
      expect_error(ErrorKind::invalid_argument, {"put", "not recovered"},
                   [&] { put_own(*vault, group, 1); });
    }
    EXPECT_EQ(vault->recover(), 0u) << "the newest that rank 0 has put";
    EXPECT_EQ(group.memory().arena_used_bytes, used);
    for (int expert = 0; expert < 3; ++expert) EXPECT_EQ(got(*vault, expert), Expert(expert, 0));
    group.barrier();
  });
}

TEST(Vault, GetOfARankThatWasEvictedFails) {
  GroupConfig config = config_of_vaults();
  config.deadline = 200ms;
  std::latch ready(3);
  std::latch done(3);
  with_groups(3, config, [&](Group& group) {
    Vault vault(group, bytes_of_one());
    vault.recover();
    put_own(vault, group, 0);
    EXPECT_EQ(vault.recover(), 0u);
    ready.arrive_and_wait();
    if (group.rank() != 2) {
      fails(group);
      group.regroup();
      EXPECT_EQ(vault.recover(), 0u);
      for (std::uint64_t step = 1; step <= 2; ++step) {
        group.commit(step);
        put_own(vault, group, step);
      }
    }
    done.arrive_and_wait();
    if (group.rank() == 2) {
      expect_error(ErrorKind::evicted, {"get", "went on without"}, [&] { got(vault, 0); });
    }
  });
}

TEST(Vault, SkippedPutsAreNamed) {
  with_groups(3, config_of_vaults(), [&](Group& group) {
    Vault vault(group, bytes_of_one());
    vault.recover();
    put_own(vault, group, 0);
    for (std::uint64_t step = 1; step <= 3; ++step) {
      group.commit(step);
      if (group.rank() != 1 || step < 2) put_own(vault, group, step);
    }
    for (int again = 0; again < 2; ++again) {
      expect_error(ErrorKind::mismatch,
                   {"recover", "rank 0", "steps 2 and 3", "rank 1", "step 1", "same steps"},
                   [&] { vault.recover(); });
    }
    if (group.rank() == 1) put_own(vault, group, 3);
    EXPECT_EQ(vault.recover(), 3u) << "nothing was dropped";
    for (int expert = 0; expert < 3; ++expert) EXPECT_EQ(got(vault, expert), Expert(expert, 3));
    // Not even once, where the others have put twice; that of a rank that was lost counts, too.
    for (std::uint64_t step = 4; step <= 5; ++step) {
      group.commit(step);
      if (group.rank() == 2) put_own(vault, group, step);
    }
    group.barrier();
    if (group.rank() == 2) return group.destroy();
    fails(group);
    group.regroup();
    expect_error(ErrorKind::mismatch, {"rank 2", "steps 4 and 5", "rank 0", "step 3"},
                 [&] { vault.recover(); });
    expect_error(ErrorKind::invalid_argument, {"keys", "recover"}, [&] { vault.keys(); });
    group.barrier();
  });
}

}  // namespace
}  // namespace ferry::host::test

// Ranks that are killed in the middle of a put or of a get: the memory that they read or write ends
// in the middle of a tensor, so that the kernel ends them there.
#include <csignal>
#include <numeric>
#include <sstream>

#include <gtest/gtest.h>

#include "platform/posix/test_memory.hpp"
#include "processes.hpp"

namespace ferry::test {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kWords = 1 << 16;
constexpr std::int64_t kExtent = 1 << 16;

std::uint64_t word(std::int64_t key, std::uint64_t step, std::size_t i) {
  return static_cast<std::uint64_t>(key) << 48 | step << 32 | i;
}

/// Memory of a tensor whose second half ends whoever touches it.
std::uint64_t* half_a_tensor() {
  std::signal(SIGSEGV, SIG_DFL);
  std::signal(SIGBUS, SIG_DFL);
  return reinterpret_cast<std::uint64_t*>(half_memory(kWords * 8));
}

struct Rank {
  Group group;
  Vault vault;
  std::vector<std::uint64_t> state = std::vector<std::uint64_t>(kWords);

  explicit Rank(std::shared_ptr<Bootstrap> bootstrap)
      : group(std::move(bootstrap), config()), vault(group, kWords * 8 + 1024) {}
  static GroupConfig config() {
    GroupConfig config;
    config.experts = 4;
    config.memory_bytes = 1 << 20;
    config.deadline = 30s;
    config.fabric = FabricKind::shm;
    config.elastic = "vault";
    return config;
  }

  void put(std::uint64_t step, std::uint64_t* from = nullptr) {
    for (std::size_t i = 0; i < kWords; ++i) state[i] = word(group.rank(), step, i);
    const VaultPart part{group.rank(), {from ? from : state.data(), Dtype::i64, {kExtent}}};
    vault.put(step, {&part, 1});
  }
  /// "whole", or what is wrong.
  std::string get(std::int64_t key, std::uint64_t step, std::uint64_t* into = nullptr) {
    const VaultTarget target{{into ? into : state.data(), Dtype::i64, {kExtent}}};
    vault.get(key, {&target, 1});
    for (std::size_t i = 0; i < kWords; ++i) {
      if (state[i] != word(key, step, i)) return "word " + std::to_string(i) + " is wrong";
    }
    return "whole";
  }
  /// Calls until one names a rank that is lost; then all that are left recover.
  std::string recover_after_a_loss() {
    std::string named = "nobody";
    try {
      for (;;) group.barrier();
    } catch (const Error& error) {
      named = std::to_string(error.peer());
    }
    group.regroup();
    return "named " + named + ", " + recover();
  }
  std::string recover() {
    const auto step = vault.recover();
    std::ostringstream text;
    text << "step " << (step ? std::to_string(*step) : "none") << ", keys";
    for (const std::int64_t key : vault.keys()) text << ' ' << key;
    return text.str();
  }
};

void expect_lines(Ranks& ranks, const std::vector<int>& of, const std::string& expected) {
  for (const int rank : of) EXPECT_EQ(ranks.line(rank, 60), expected) << "rank " << rank;
}

TEST(Vault, ARankIsKilledWhileItPutsAndAnotherWhileItGets) {
  Ranks ranks(4, [](int rank, std::shared_ptr<Bootstrap> bootstrap, const Reporter& report) {
    Rank self(std::move(bootstrap));
    self.recover();
    const std::size_t used = self.group.memory().arena_used_bytes;
    self.put(0);
    self.group.commit(1);
    self.put(1);
    self.group.commit(2);
    if (rank == 1) self.put(2, half_a_tensor());  // it ends here
    self.put(2);
    report.line(self.recover_after_a_loss());
    if (rank == 3) self.get(0, 1, half_a_tensor());  // it ends here
    for (int key = 0; key < 4; ++key) report.line(self.get(key, 1));
    report.line(self.recover_after_a_loss());
    for (int key = 0; key < 4; ++key) report.line(self.get(key, 1));
    for (std::uint64_t step = 2; step <= 3; ++step) {
      self.group.commit(step);
      self.put(step);
    }
    report.line(self.recover());
    report.line(self.group.memory().arena_used_bytes == used ? "no more memory" : "more memory");
    self.group.barrier();
  });
  expect_lines(ranks, {0, 2, 3}, "named 1, step 1, keys 0 1 2 3");
  EXPECT_EQ(ranks.join(1, 60), 128 + SIGSEGV);
  EXPECT_EQ(ranks.join(3, 60), 128 + SIGSEGV);
  for (int key = 0; key < 4; ++key) expect_lines(ranks, {0, 2}, "whole");
  // Rank 0 kept the state of rank 3, rank 2 that of rank 1.
  expect_lines(ranks, {0, 2}, "named 3, step 1, keys 0 1 2 3");
  for (int key = 0; key < 4; ++key) expect_lines(ranks, {0, 2}, "whole");
  expect_lines(ranks, {0, 2}, "step 3, keys 0 2");
  expect_lines(ranks, {0, 2}, "no more memory");
  for (const int rank : {0, 2}) EXPECT_EQ(ranks.join(rank, 60), 0);
}

TEST(Vault, AProcessThatJoinsGetsTheStateOfTheOneBefore) {
  Ranks ranks(3, [](int rank, std::shared_ptr<Bootstrap> bootstrap, const Reporter& report) {
    const bool joins = bootstrap->joins();
    Rank self(std::move(bootstrap));
    if (!joins) {
      self.recover();
      self.put(0);
      self.group.commit(1);
      if (rank == 0) std::raise(SIGKILL);
      self.put(1);
      report.line(self.recover_after_a_loss());
      while (!self.group.commit(self.group.view().step + 1)) self.put(self.group.view().step);
      self.put(self.group.view().step);
      self.group.regroup();
    }
    self.recover();
    const std::uint64_t step = self.group.view().step;
    report.line(self.group.view().joined.empty() && self.group.view().ranks.size() == 3
                    ? "all have state"
                    : "somebody has none");
    report.line(self.get(1, step) + " " + self.get(2, step));
    for (std::uint64_t next = step + 1; next <= step + 2; ++next) {
      self.group.commit(next);
      self.put(next);
    }
    report.line(self.recover() == "step " + std::to_string(step + 2) + ", keys 0 1 2" ? "all put"
                                                                                      : "not all");
    report.line(self.get(0, step + 2));
    self.group.barrier();
  });
  EXPECT_EQ(ranks.join(0, 60), 128 + SIGKILL);
  expect_lines(ranks, {1, 2}, "named 0, step 0, keys 0 1 2");
  ranks.restart(0);
  for (const char* said : {"all have state", "whole whole", "all put", "whole"}) {
    expect_lines(ranks, {0, 1, 2}, said);
  }
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(ranks.join(rank, 60), 0);
}

}  // namespace
}  // namespace ferry::test

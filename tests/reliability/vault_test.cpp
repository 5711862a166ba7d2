// Ranks that are killed in the middle of a put or of a get: the memory that they read or write ends
// in the middle of a tensor, so that the kernel ends them there.
#include <algorithm>
#include <csignal>
#include <functional>
#include <numeric>
#include <sstream>
#include <thread>
#include <utility>

#include <gtest/gtest.h>

#include "engine/test_network.hpp"
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

/// Six ranks in domains of two, of which some die in step 2, and processes take their places. The
/// lowest rank has what those had that are lost.
class AcrossDomains {
 public:
  static constexpr int kRanks = 6;

  AcrossDomains(std::shared_ptr<Bootstrap> bootstrap, const Reporter& report, bool dies)
      : joins_(bootstrap->joins()),
        dies_(dies && !joins_),
        group_(std::move(bootstrap), config()),
        vault_(group_, 3 * (kWords * 8 + 256)),
        report_(report) {}

  /// Says at which step the others went on, then what they have when all are there again. `die` is
  /// called in a put, or before its commit.
  void run(const std::function<void()>& die_before, const std::function<void()>& die_in) {
    bool changed = joins_, told = joins_;
    if (!joins_) {
      vault_.recover();
      put();
    }
    for (int whole = 0; whole < 2;) {  // steps that all have ended
      try {
        if (changed) {
          recover();
          changed = false;
          if (!std::exchange(told, true)) report_.line("went on at step " + std::to_string(step_));
        }
        if (dies_ && step_ == 1) die_before();
        changed = group_.commit(step_ + 1);
        ++step_;
        if (dies_ && step_ == 2) die_in();
        put();
        if (changed) group_.regroup();
        whole = told && !changed && group_.view().ranks.size() == kRanks ? whole + 1 : 0;
      } catch (const Error& error) {
        if (error.kind() != ErrorKind::peer_failed && error.kind() != ErrorKind::peer_left) throw;
        group_.regroup();
        changed = true;
      }
    }
    recover();
    report_.line("all are there");
    group_.barrier();
  }
  /// Of this step, all that it has, its own first.
  void put(std::uint64_t* own = nullptr) {
    std::vector<int> keys{group_.rank()};
    const GroupView view = group_.view();
    if (view.ranks.front() == group_.rank()) {
      keys.insert(keys.end(), view.lost.begin(), view.lost.end());
    }
    std::vector<std::vector<std::uint64_t>> states;
    std::vector<VaultPart> parts;
    for (const int key : keys) {
      std::vector<std::uint64_t>& state = states.emplace_back(kWords);
      for (std::size_t i = 0; i < kWords; ++i) state[i] = word(key, step_, i);
      const bool other = own != nullptr && key == group_.rank();
      parts.push_back({key, {other ? own : state.data(), Dtype::i64, {kExtent}}});
    }
    vault_.put(step_, parts);
  }

 private:
  static GroupConfig config() {
    GroupConfig config = Rank::config();
    config.elastic = "vault_domains";
    config.domain_size = 2;
    config.network = FabricKind::ofi;
    return config;
  }
  void recover() {
    const std::vector<std::int64_t> all{0, 1, 2, 3, 4, 5};
    step_ = vault_.recover(all).value();
    for (const std::int64_t key : all) {
      std::vector<std::uint64_t> state(kWords);
      const VaultTarget target{{state.data(), Dtype::i64, {kExtent}}};
      vault_.get(key, {&target, 1});
      for (std::size_t i = 0; i < kWords; ++i) {
        if (state[i] == word(key, step_, i)) continue;
        throw std::runtime_error("key " + std::to_string(key) + ", word " + std::to_string(i));
      }
    }
  }

  bool joins_, dies_;
  Group group_;
  Vault vault_;
  const Reporter& report_;
  std::uint64_t step_ = 0;
};

struct Death {
  const char* name;
  std::vector<int> ranks;
  std::chrono::microseconds in_put;  ///< after its begin; negative: not in one
};

class VaultAcrossDomains : public testing::TestWithParam<Death> {};

TEST_P(VaultAcrossDomains, HasTheStateOfRanksThatAreKilled) {
  if (!engine::test::has_network()) GTEST_SKIP() << "no libfabric on this machine";
  const Death& death = GetParam();
  const auto dies = [&](int rank) {
    return std::find(death.ranks.begin(), death.ranks.end(), rank) != death.ranks.end();
  };
  Ranks ranks(6, [&](int rank, std::shared_ptr<Bootstrap> bootstrap, const Reporter& report) {
    AcrossDomains self(std::move(bootstrap), report, dies(rank));
    self.run(
        [&] {
          if (death.in_put < 0us) std::raise(SIGKILL);
        },
        [&] {
          if (death.in_put == 0us) self.put(half_a_tensor());  // it ends here
          std::thread([&] {
            std::this_thread::sleep_for(death.in_put);
            std::raise(SIGKILL);
          }).detach();
          self.put();
          std::this_thread::sleep_for(10s);  // it is killed here if the put was quicker
        });
  });
  std::vector<int> left;
  for (int rank = 0; rank < AcrossDomains::kRanks; ++rank) {
    if (!dies(rank)) left.push_back(rank);
  }
  const std::string went_on = ranks.line(left.front(), 15);
  const bool copied = went_on == "went on at step 2" && death.in_put > 0us;
  EXPECT_TRUE(copied || went_on == "went on at step 1") << went_on;
  for (const int rank : left) {
    if (rank != left.front()) {
      EXPECT_EQ(ranks.line(rank, 10), went_on);
    }
  }
  for (const int rank : death.ranks) {
    EXPECT_GT(ranks.join(rank, 15), 128);
    ranks.restart(rank);
  }
  for (int rank = 0; rank < AcrossDomains::kRanks; ++rank) {
    EXPECT_EQ(ranks.line(rank, 15), "all are there") << "rank " << rank;
  }
  for (int rank = 0; rank < AcrossDomains::kRanks; ++rank) EXPECT_EQ(ranks.join(rank, 15), 0);
}

INSTANTIATE_TEST_SUITE_P(All, VaultAcrossDomains,
                         testing::Values(Death{"host", {2, 3}, -1us},
                                         Death{"host_in_put", {0, 1}, 0us},
                                         Death{"one_in_copy", {4}, 300us},
                                         Death{"two_in_copy", {1, 2}, 1000us}),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace ferry::test

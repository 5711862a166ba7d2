// Ranks of the CUDA engine that die or stand still while one of them makes its memory larger. Skips
// without a GPU.
#include <gtest/gtest.h>

#include "platform/test_child.hpp"
#include "regroup_case.hpp"

namespace ferry::test {
namespace {

constexpr std::uint64_t kGrowthSeed = 20261129;

class EngineRegroupGrowth : public ::testing::Test {
 protected:
  static constexpr int kRanks = 3;
  struct Board {
    std::array<std::atomic<pid_t>, kRanks> pids{};
    std::atomic<bool> grows{false};
  };
  void SetUp() override {
    if (gpu_count() == 0) GTEST_SKIP() << "NO GPU";
  }
  /// Rank 1 is killed.
  static void run(const std::function<void(RegroupingRank&, Board&)>& body) {
    const auto memory = shared_block(sizeof(Board));
    auto& board = *new (memory.get()) Board();
    const auto on_rank = [&](Bootstrap& bootstrap) {
      RegroupingRank rank(bootstrap, kGrowthSeed);
      board.pids.at(static_cast<std::size_t>(rank.group().rank())) = getpid();
      bootstrap.all_gather({}, 60s);
      body(rank, board);
    };
    for (const std::string& problem : run_losses(kRanks, {1}, on_rank, 100)) {
      ADD_FAILURE() << problem;
    }
  }
  static Plan plan(RegroupingRank& rank) { return rank.group().plan(rank.mine().routes_view()); }
  /// Rank 0, or `grower`, has room for so many rows that it needs 512 MiB more.
  static void dispatch(RegroupingRank& rank, const Plan& plan, int grower = 0) {
    DispatchOptions options;
    if (rank.group().rank() == grower) options.max_recv_rows = 1 << 17;
    rank.group().dispatch(rank.mine().x_view(), plan, options).event.wait(60s);
  }
  static void need_without_1(const ferry::GroupView& view) {
    need(view.ranks == std::vector<int>({0, 2}), "other ranks than 0 and 2 go on");
  }
};

std::size_t free_bytes() {
  std::size_t free = 0, total = 0;
  need(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return free;
}

/// A rank that stands still has not mapped what another has made for its rows.
TEST_F(EngineRegroupGrowth, MemoryThatNotAllHaveMappedIsOfferedAgain) {
  run([](RegroupingRank& rank, Board& board) {
    const int me = rank.group().rank();
    const Plan old = plan(rank);
    if (me == 1) raise(SIGSTOP);
    std::this_thread::sleep_for(200ms);
    const auto error = error_of([&] { dispatch(rank, old); });
    need(error && error->kind() == ErrorKind::deadline && error->peer() == 1,
         error ? error->what() : "rank 1 was not missed");
    const std::size_t before = free_bytes();
    need_without_1(rank.regroup());
    dispatch(rank, plan(rank));
    if (me == 0) {
      need(free_bytes() + (std::size_t{256} << 20) > before, "it was registered once more");
      kill(board.pids[1], SIGKILL);
    }
    rank.group().barrier();
  });
}

/// Rank 0, which stood still, finds the offer of a rank that has died since.
TEST_F(EngineRegroupGrowth, AnOfferOfARankThatDiesIsLeft) {
  run([](RegroupingRank& rank, Board& board) {
    const int me = rank.group().rank();
    const Plan old = plan(rank);
    if (me == 0) {
      raise(SIGSTOP);
      std::this_thread::sleep_for(200ms);  // its monitor looks at once
    } else if (me == 1) {
      std::this_thread::sleep_for(200ms);
      board.grows = true;
      dispatch(rank, old, 1);
    } else {
      while (!board.grows) std::this_thread::sleep_for(1ms);
      std::this_thread::sleep_for(500ms);
      kill(board.pids[1], SIGKILL);
      std::this_thread::sleep_for(1s);  // for the driver
      kill(board.pids[0], SIGCONT);
    }
    need_error(
        ErrorKind::peer_failed, "a barrier without rank 1", [&] { rank.group().barrier(); }, 1);
    need_without_1(rank.regroup());
    rank.group().barrier();
  });
}

}  // namespace
}  // namespace ferry::test

// Ranks of several domains that were masked, or failed to rejoin, come back: threads do what
// kernels do.
#include "cuda/latency/proxy/test_ranks.hpp"
#include "cuda/latency/proxy/test_rejoin.hpp"
#include "engine/test_network.hpp"

namespace ferry::cuda::test {
namespace {

/// What a rank learns of an attempt.
struct Attempt {
  bool rejoined = false;
  int missing = -1;  ///< of one that failed
};

Attempt rejoin(FakeRejoin& kernel, Generation used, std::chrono::nanoseconds deadline = 20s) {
  const auto end = Clock::now() + deadline;
  kernel.begin(used);
  while (Clock::now() < end) {
    if (kernel.poll()) return {true, -1};
    std::this_thread::yield();
  }
  return {false, kernel.missing()};
}

void await_gone(const FakeRank& rank, int peer, Gone gone) {
  const auto end = Clock::now() + 20s;
  while (!rank.sees_gone(peer, gone) && Clock::now() < end) std::this_thread::yield();
  EXPECT_TRUE(rank.sees_gone(peer, gone)) << "rank " << rank.rank() << " of " << peer;
}

/// The last of three ranks stops in the midst of a dispatch, the others go on, and all rejoin:
/// `times`.
void stop_and_come_back(const MakeFabric& fabric, int domain_size, int times) {
  FakeConfig config = small(true);
  config.domain_size = domain_size;
  const auto board = std::make_shared<RejoinBoard>();
  with_ranks(3, config, fabric, [&](FakeRank& rank, Bootstrap& bootstrap) {
    FakeRejoin kernel(rank, board);
    Generation g = 0;
    for (int time = 0; time < times; ++time) {
      for (int i = 0; i < 3; ++i) exchange(rank, ++g, static_cast<std::uint32_t>(i));
      rank.send_dispatch(++g);
      if (rank.rank() != 2) {
        rank.leave_out({2});
        rank.set_gone(2, Gone::without_us);
        for (int i = 0; i < 7; ++i) {
          if (i > 0) rank.send_dispatch(++g);
          rank.receive_dispatch(g);
          rank.release(g);
          rank.send_sums(g, 0);
          rank.receive_sums(g, 0);
        }
      }
      bootstrap.all_gather({}, 20s);
      if (rank.rank() == 2) {
        for (const int peer : rank.beyond()) await_gone(rank, peer, Gone::without_us);
      }
      ASSERT_TRUE(rejoin(kernel, g).rejoined);
      g = kernel.agreed();
      EXPECT_EQ(g, static_cast<Generation>(time + 1) * 12);
    }
    for (int i = 0; i < 6; ++i) exchange(rank, ++g, static_cast<std::uint32_t>(i % 3));
    for (const int peer : rank.beyond()) EXPECT_TRUE(rank.sees_gone(peer, Gone::no));
  });
}

TEST(LatencyCrossingRejoin, ARankThatStoppedComesBackAsOftenAsItLikes) {
  for (const int domain_size : {1, 2}) stop_and_come_back(over_sim, domain_size, 4);
}

TEST(LatencyCrossingRejoin, AlsoThroughCopiesOfSharedMemory) {
  for (const int domain_size : {1, 2}) stop_and_come_back(over_copies, domain_size, 3);
}

TEST(LatencyCrossingRejoin, AlsoOverLibfabric) {
  if (!engine::test::has_network()) GTEST_SKIP() << "no libfabric here";
  stop_and_come_back(over_libfabric, 1, 2);
}

TEST(LatencyCrossingRejoin, NamesWhoDoesNotComeAndMayBeRepeated) {
  with_ranks(3, small(true), over_sim, [](FakeRank& rank, Bootstrap& bootstrap) {
    FakeRejoin kernel(rank);
    exchange(rank, 1, 0);
    for (int i = 0; i < 2; ++i) {
      if (rank.rank() != 2) {
        const Attempt attempt = rejoin(kernel, 1, 200ms);
        EXPECT_FALSE(attempt.rejoined);
        EXPECT_EQ(attempt.missing, 2);
      }
      bootstrap.all_gather({}, 20s);
    }
    ASSERT_TRUE(rejoin(kernel, 1).rejoined);
    for (Generation g = 4; g <= 8; ++g) exchange(rank, g, 0);
  });
}

}  // namespace
}  // namespace ferry::cuda::test

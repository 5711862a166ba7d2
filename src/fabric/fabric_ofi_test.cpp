// What the network fabric does beyond the contract: peers that die, stop or leave, strangers at its
// port, options.
#include "fabric/ofi/ofi.hpp"

#include "fabric/test_ranks.hpp"

namespace ferry::fabric::test {
namespace {

constexpr Setting kOfi{"ofi", "ofi", true};

class OfiFabric : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = no_ofi(); !why.empty()) GTEST_SKIP() << why;
  }
};

/// 0 and 2 can still talk, whatever became of 1.
void expect_the_others_talk(Fabric& fabric, const Segment& mine, int rank) {
  const std::uint64_t word = 11;
  const int other = 2 - rank;
  fabric.put(other, {mine.id, 256}, &word, 8, 77);
  fabric.publish(other, {mine.id, 128}, 9, 8, 77);
  EXPECT_TRUE(await_flag(mine, 128, 9));
  EXPECT_EQ(flag_value(mine, 256), 11u);
  EXPECT_EQ(fabric.peer_state(other), PeerState::alive);
}

/// Everybody has heard from everybody.
void meet(Rank& me, Fabric& fabric, const Segment& mine) {
  for (int peer = 0; peer < me.size(); ++peer) {
    fabric.publish(peer, {mine.id, 512 + 8 * std::uint64_t(me.rank())}, 1, 0, 1);
  }
  for (int peer = 0; peer < me.size(); ++peer) {
    ASSERT_TRUE(await_flag(mine, 512 + 8 * std::uint64_t(peer), 1));
  }
  me.barrier();
}

TEST_F(OfiFabric, AKilledRankIsDead) {
  Processes ranks(kOfi, 3, [](Rank& me) {
    auto fabric = me.make();
    const Segment mine = me.connect(*fabric, 1 << 20);
    meet(me, *fabric, mine);
    if (me.rank() == 1) raise(SIGKILL);
    const auto start = Clock::now();
    EXPECT_TRUE(eventually([&] { return fabric->peer_state(1) == PeerState::dead; }, 5s));
    std::printf("rank %d: dead after %.3f s\n", me.rank(),
                std::chrono::duration<double>(Clock::now() - start).count());
    const Bytes data(1 << 20, std::byte{1});
    for (int i = 0; i < 20; ++i) fabric->put(1, {mine.id, 0}, data.data(), data.size(), 5);
    fabric->publish(1, {mine.id, 0}, 1, 20 << 20, 5);
    expect_the_others_talk(*fabric, mine, me.rank());
    EXPECT_LT(Clock::now() - start, 8s);
  });
  ranks.expect_success({1});
}

TEST_F(OfiFabric, AStoppedRankIsNotHeardAndComesBack) {
  Processes ranks(kOfi, 3, [](Rank& me) {
    auto fabric = me.make();
    const Segment mine = me.connect(*fabric, 4096);
    me.board.notes[std::size_t(me.rank())] = getpid();
    meet(me, *fabric, mine);
    if (me.rank() == 1) {
      raise(SIGSTOP);
    } else {
      EXPECT_TRUE(eventually([&] { return fabric->peer_state(1) == PeerState::unknown; }, 5s));
      expect_the_others_talk(*fabric, mine, me.rank());
      fabric->publish(1, {mine.id, 8 * std::size_t(me.rank())}, 3, 0, 6);
      if (me.rank() == 2) {
        kill(static_cast<pid_t>(me.board.notes[1]), SIGCONT);
      }
      EXPECT_TRUE(eventually([&] { return fabric->peer_state(1) == PeerState::alive; }, 5s));
    }
    if (me.rank() == 1) {
      EXPECT_TRUE(await_flag(mine, 0, 3));
      EXPECT_TRUE(await_flag(mine, 16, 3));
    }
    me.barrier();
  });
  ranks.expect_success();
}

TEST_F(OfiFabric, ARankThatTakesNothingIsLostAtTheDeadline) {
  Processes ranks(kOfi, 3, [](Rank& me) {
    auto fabric = make_ofi_fabric(me.bootstrap, ofi_options(), 1s);
    const Segment mine = me.connect(*fabric, 1 << 20);
    meet(me, *fabric, mine);
    if (me.rank() == 1) raise(SIGSTOP);
    const auto start = Clock::now();
    const Bytes data(1 << 20, std::byte{1});
    // More than sockets and chunks hold.
    for (int i = 0; i < 64; ++i) fabric->put(1, {mine.id, 0}, data.data(), data.size(), 5);
    std::printf("rank %d: 64 MiB after %.3f s\n", me.rank(),
                std::chrono::duration<double>(Clock::now() - start).count());
    EXPECT_LT(Clock::now() - start, 4s);
    EXPECT_EQ(fabric->peer_state(1), PeerState::dead);
    expect_the_others_talk(*fabric, mine, me.rank());
    fabric.reset();
    EXPECT_LT(Clock::now() - start, 6s);
    kill(static_cast<pid_t>(0), 0);
  });
  EXPECT_TRUE(eventually([&] { return ranks.ended(0) && ranks.ended(2); }));
  kill(ranks.pid(1), SIGKILL);
  ranks.expect_success({1});
}

}  // namespace
}  // namespace ferry::fabric::test

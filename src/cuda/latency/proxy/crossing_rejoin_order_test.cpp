// What may land when, between ranks that rejoin, on a network that holds back what the test says.
#include "cuda/latency/proxy/test_pair.hpp"
#include "cuda/latency/proxy/test_rejoin.hpp"

namespace ferry::cuda::test {
namespace {

using protocol::Channel;

class LatencyRejoinOrder : public LatencyPair {
 protected:
  using Op = HeldNetwork::Op;

  LatencyRejoinOrder() : LatencyPair(true) {}
  /// Both kernels, after `used`: what they agree on.
  Generation rejoin(Generation used, const HeldNetwork::Held& held = {}) {
    bool back[2]{};
    for (FakeRejoin& kernel : kernels_) kernel.begin(used);
    for (int poll = 0; poll < 8 && !(back[0] && back[1]); ++poll) {
      for (int r = 0; r < 2; ++r) back[r] = back[r] || kernels_[r].poll();
      settle(held);
    }
    EXPECT_TRUE(back[0] && back[1]);
    return kernels_[0].agreed();
  }
  bool have_credit(Generation g) const {
    return ranks_[0]->has_credit(1, g) && ranks_[1]->has_credit(0, g);
  }
  bool has_come(FakeRank& rank, Generation g) {
    try {
      rank.receive_dispatch(g);
    } catch (const NotYet&) {
      return false;
    }
    return true;
  }
  /// What was put before is late: nothing takes its place before it has landed.
  void expect_to_wait_for(const HeldNetwork::Held& late, Generation used) {
    settle(late);
    ASSERT_GT(network_.under_way(late), 0u);
    const Generation agreed = rejoin(used, late);
    ASSERT_GT(network_.under_way(late), 0u);
    EXPECT_FALSE(have_credit(agreed + 1));
    settle();
    EXPECT_TRUE(have_credit(agreed + 1));
    for (Generation g = agreed + 1; g <= agreed + 2; ++g) {
      dispatch(g);
      for (auto& rank : ranks_) rank->send_sums(g, 0);
      settle();
      for (auto& rank : ranks_) rank->receive_sums(g, 0);
    }
  }

  FakeRejoin kernels_[2]{FakeRejoin(*ranks_[0]), FakeRejoin(*ranks_[1])};
};

TEST_F(LatencyRejoinOrder, NoCreditBeforeRowsOfBeforeHaveLanded) {
  for (auto& rank : ranks_) rank->send_dispatch(1);
  expect_to_wait_for(puts(Channel::kArrival, 1), 1);
}

TEST_F(LatencyRejoinOrder, NoCreditBeforeWeightsOfBeforeHaveLanded) {
  dispatch(1);
  for (auto& rank : ranks_) rank->push_weights(1);
  expect_to_wait_for(puts(Channel::kAnnounced, 1), 1);
}

// Also of a combine that its kernel did not end.
TEST_F(LatencyRejoinOrder, NoCreditBeforeSumsOfBeforeHaveLanded) {
  Generation used = 0;
  for (const bool halfway : {false, true}) {
    dispatch(++used);
    for (auto& rank : ranks_) rank->send_sums(used, 0, halfway);
    expect_to_wait_for(puts(Channel::kDelivery, used), used);
    used = kernels_[0].agreed() + 2;
  }
}

// The answer to its dispatch would take the place of the peer's word that it has rejoined.
TEST_F(LatencyRejoinOrder, NothingIsSentToAPeerThatHasNotSaidThatItRejoined) {
  dispatch(1);
  const auto word = [](const Op& op) {
    return op.is_flag && op.from == 0 && (op.value & 0xffff) == kRejoined &&
           is_of(op, Channel::kDelivery, op.value >> kCrossingShift);
  };
  const Generation first = rejoin(1, word) + 1;
  ASSERT_EQ(network_.under_way(word), 2u);
  ASSERT_TRUE(ranks_[1]->has_credit(0, first));
  ranks_[1]->send_dispatch(first);
  settle(word);
  EXPECT_FALSE(has_come(*ranks_[0], first));
  settle();
  EXPECT_TRUE(has_come(*ranks_[0], first));
}

TEST_F(LatencyRejoinOrder, MasksOfBeforeDoNotCountAndThoseAfterDo) {
  dispatch(1);
  const auto mask = [](const Op& op) { return op.is_flag && is_of(op, Channel::kMask, op.value); };
  ranks_[0]->set_gone(1, Gone::without_us);
  const Generation agreed = rejoin(1, mask);
  ASSERT_EQ(network_.under_way(mask), 1u);
  settle();
  EXPECT_TRUE(ranks_[1]->sees_gone(0, Gone::no));
  dispatch(agreed + 1);
  ranks_[0]->set_gone(1, Gone::without_us);
  settle();
  EXPECT_TRUE(ranks_[1]->sees_gone(0, Gone::without_us));
}

// It lands when the proxy has found that the kernel has not rejoined, just before that has.
TEST(LatencyRejoinRace, AMaskOfBeforeComesInTheMidstOfAPoll) {
  HeldNetwork network(3);
  FakeConfig config;
  config.exchange = {.capacity = 4, .hidden = 128, .topk = 2, .dtype = Dtype::bf16, .masks = true};
  std::vector<std::unique_ptr<FakeRank>> ranks;
  std::vector<FakeRejoin> kernels;
  for (int r = 0; r < 3; ++r) {
    ranks.push_back(std::make_unique<FakeRank>(r, 3, config, network.make(r)));
    kernels.emplace_back(*ranks.back());
    kernels.back().begin(0);
  }
  ranks[1]->set_gone(2, Gone::without_us);
  const auto mask = [](const HeldNetwork::Op& op) {
    return op.is_flag && op.tag >> 56 == static_cast<std::uint64_t>(Channel::kMask);
  };
  for (int poll = 0; poll < 4; ++poll) {
    for (const auto& rank : ranks) rank->crossing().poll();
    while (network.deliver(mask)) {
    }
    // The last one has all answers, and does not look at them.
    for (std::size_t r = 0; r < (poll < 1 ? 3u : 2u); ++r) (void)kernels[r].poll();
  }
  ASSERT_EQ(network.under_way(mask), 1u);
  ranks[2]->set_gone(0, Gone::without_us);
  bool rejoined = false;
  network.set_on_send([&] {
    if (rejoined) return;
    rejoined = kernels[2].poll();
    (void)network.deliver({});
  });
  ranks[2]->crossing().poll();
  EXPECT_TRUE(rejoined);
  ranks[2]->crossing().poll();
  EXPECT_TRUE(ranks[2]->sees_gone(1, Gone::no));
}

// It finds the offers of an attempt that failed without it.
TEST_F(LatencyRejoinOrder, WhoComesBeforeThoseWhoTryAgainWaitsForThem) {
  kernels_[0].begin(5);
  settle();
  kernels_[1].begin(3);
  for (int poll = 0; poll < 4; ++poll) {
    EXPECT_FALSE(kernels_[1].poll());
    settle();
  }
  bool back[2]{};
  kernels_[0].begin(5);
  for (int poll = 0; poll < 8; ++poll) {
    for (int r = 0; r < 2; ++r) back[r] = back[r] || kernels_[r].poll();
    settle();
  }
  ASSERT_TRUE(back[0] && back[1]);
  EXPECT_EQ(kernels_[1].agreed(), 7u);
  dispatch(8);
}

}  // namespace
}  // namespace ferry::cuda::test

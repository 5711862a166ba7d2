// In which order proxies let things land, on a network that holds back what the test says.
#include "cuda/latency/proxy/test_pair.hpp"

namespace ferry::cuda::test {
namespace {

class LatencyCrossingOrder : public LatencyPair {
 protected:
  /// Nobody receives the sums of generation 1, which are late: those of 3, which have the same
  /// places, wait for them. `begun`: a kernel never ended the late ones.
  void expect_sums_to_wait(bool begun) {
    const auto late = puts(protocol::Channel::kDelivery, 1);
    const auto next = puts(protocol::Channel::kDelivery, 3);
    dispatch(1);
    for (auto& rank : ranks_) rank->send_sums(1, 0, begun);
    settle(late);
    ASSERT_GT(network_.under_way(late), 0u);
    dispatch(2, late);
    dispatch(3, late);
    for (auto& rank : ranks_) rank->send_sums(3, 0);
    settle([&](const HeldNetwork::Op& op) { return late(op) || next(op); });
    EXPECT_EQ(network_.under_way(next), 0u);
    settle();
    for (auto& rank : ranks_) rank->receive_sums(3, 0);
  }
};

TEST_F(LatencyCrossingOrder, SumsWaitUntilThoseBeforeThemHaveLanded) {
  expect_sums_to_wait(false);
}

TEST_F(LatencyCrossingOrder, SumsThatWereBegunAreCountedWhenTheNextDispatchComes) {
  expect_sums_to_wait(true);
}

// Nobody receives what comes of the weights of generation 1, which are late.
TEST_F(LatencyCrossingOrder, ADispatchWaitsUntilWeightsInItsPlaceHaveLanded) {
  const auto late = puts(protocol::Channel::kAnnounced, 1);
  const auto next = puts(protocol::Channel::kArrival, 3);
  dispatch(1);
  for (auto& rank : ranks_) rank->push_weights(1);
  dispatch(2, late);
  for (auto& rank : ranks_) rank->send_dispatch(3);
  settle([&](const HeldNetwork::Op& op) { return late(op) || next(op); });
  ASSERT_GT(network_.under_way(late), 0u);
  EXPECT_EQ(network_.under_way(next), 0u);
  settle();
  for (auto& rank : ranks_) rank->receive_weights(1);
  for (auto& rank : ranks_) rank->receive_dispatch(3);
}

// Weights that were pushed before a dispatch which the proxy sees first.
TEST_F(LatencyCrossingOrder, WeightsAreNotForgottenForTheNextDispatch) {
  dispatch(1);
  dispatch(2);
  for (auto& rank : ranks_) {
    rank->push_weights(1);
    rank->send_dispatch(3);
  }
  settle();
  for (auto& rank : ranks_) rank->receive_weights(1);
}

// Rows of a result that its receiver drops unread: no credit before they have landed.
TEST_F(LatencyCrossingOrder, ACreditWaitsForTheRowsThatItSpeaksOf) {
  const auto late = puts(protocol::Channel::kArrival, 1);
  for (auto& rank : ranks_) rank->send_dispatch(1);
  settle(late);
  for (auto& rank : ranks_) rank->release(1);
  settle(late);
  for (auto& rank : ranks_) EXPECT_FALSE(rank->has_credit(1 - rank->rank(), 3));
  settle();
  for (auto& rank : ranks_) EXPECT_TRUE(rank->has_credit(1 - rank->rank(), 3));
}

// A rank goes without the other for one dispatch: it says so no sooner than what it sent before
// into that place has landed.
TEST_F(LatencyCrossingOrder, NothingIsSaidOfAPlaceThatIsStillLanding) {
  const auto late = puts(protocol::Channel::kArrival, 1);
  ranks_[0]->send_dispatch(1);
  ranks_[0]->send_dispatch(2);
  settle(late);
  ranks_[0]->leave_out({1});
  ranks_[0]->send_dispatch(3);
  settle(late);
  const auto of_three = [](const HeldNetwork::Op& op) {
    return op.is_flag &&
           (op.tag ^ std::uint64_t{1} << 40) == make_tag(protocol::Channel::kArrival, 3);
  };
  EXPECT_EQ(network_.under_way(of_three), 0u);
  EXPECT_GT(network_.under_way(late), 0u);
}

}  // namespace
}  // namespace ferry::cuda::test

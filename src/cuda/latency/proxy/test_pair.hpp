// Two ranks in one thread, each a domain, whose network holds back what the test says.
#pragma once
#include <memory>

#include "cuda/latency/proxy/test_held_network.hpp"
#include "cuda/latency/proxy/test_rank.hpp"

namespace ferry::cuda::test {

class LatencyPair : public ::testing::Test {
 protected:
  explicit LatencyPair(bool masks = false) {
    FakeConfig config;
    config.exchange = {
        .capacity = 6, .hidden = 256, .topk = 3, .dtype = Dtype::bf16, .masks = masks};
    for (int r = 0; r < 2; ++r) {
      ranks_[r] = std::make_unique<FakeRank>(r, 2, config, network_.make(r));
    }
  }
  void settle(const HeldNetwork::Held& held = {}) {
    for (bool any = true; any;) {
      any = ranks_[0]->crossing().poll();
      any |= ranks_[1]->crossing().poll();
      any |= network_.deliver(held);
    }
  }
  /// Both ranks' dispatch of `g`, which arrives.
  void dispatch(Generation g, const HeldNetwork::Held& held = {}) {
    for (auto& rank : ranks_) {
      ASSERT_TRUE(rank->has_credit(1 - rank->rank(), g));
      rank->send_dispatch(g);
    }
    settle(held);
    for (auto& rank : ranks_) rank->receive_dispatch(g);
    for (auto& rank : ranks_) rank->release(g);
    settle(held);
  }
  /// What is put of one kind in one generation.
  static HeldNetwork::Held puts(protocol::Channel channel, Generation g) {
    return [=](const HeldNetwork::Op& op) { return !op.is_flag && is_of(op, channel, g); };
  }
  static bool is_of(const HeldNetwork::Op& op, protocol::Channel channel, std::uint64_t number) {
    return (op.tag ^ std::uint64_t{1} << 40) == make_tag(channel, number);
  }

  HeldNetwork network_{2};
  std::unique_ptr<FakeRank> ranks_[2];
};

}  // namespace ferry::cuda::test

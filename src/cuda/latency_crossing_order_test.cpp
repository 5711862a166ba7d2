// In which order proxies let things land, on a network that holds back what the test says.
#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>

#include "cuda/test_latency_rank.hpp"

namespace ferry::cuda::test {
namespace {

/// Puts and flags on their way between two ranks, in one thread.
class HeldNetwork {
 public:
  struct Op {
    int from, to;
    bool is_flag;
    std::uint64_t offset, value, tag;
    std::vector<std::byte> data;
  };
  using Held = std::function<bool(const Op&)>;

  std::unique_ptr<fabric::Fabric> make(int rank);

  void send(Op op) { ops_.push_back(std::move(op)); }
  /// Delivers all but what is held, a flag behind the puts of its tag and the flags before it.
  /// False: there was nothing.
  bool deliver(const Held& held) {
    bool any = false;
    for (auto op = ops_.begin(); op != ops_.end();) {
      const bool waits = std::any_of(ops_.begin(), op, [&](const Op& before) {
        return op->is_flag && before.from == op->from && before.to == op->to &&
               (before.is_flag ? before.offset == op->offset : before.tag == op->tag);
      });
      if (waits || (held && held(*op))) {
        ++op;
        continue;
      }
      std::byte* to = memory_[static_cast<std::size_t>(op->to)].data() + op->offset;
      if (op->is_flag) std::memcpy(to, &op->value, sizeof(op->value));
      if (!op->is_flag) std::memcpy(to, op->data.data(), op->data.size());
      op = ops_.erase(op);
      any = true;
    }
    return any;
  }
  std::size_t under_way(const Held& which) const {
    return static_cast<std::size_t>(std::count_if(ops_.begin(), ops_.end(), which));
  }
  std::byte* memory(int rank, std::size_t bytes) {
    std::vector<std::byte>& memory = memory_[static_cast<std::size_t>(rank)];
    if (memory.empty()) memory.resize(bytes + 4096);
    const auto at = reinterpret_cast<std::uintptr_t>(memory.data());
    EXPECT_EQ(at % 16, 0u);
    return memory.data();
  }

 private:
  std::vector<std::byte> memory_[2];
  std::deque<Op> ops_{};
};

class HeldFabric final : public fabric::Fabric {
 public:
  HeldFabric(HeldNetwork& network, int rank) : network_(network), rank_(rank) {}
  std::string_view name() const override { return "held"; }
  int rank() const override { return rank_; }
  int size() const override { return 2; }
  fabric::Segment register_memory(std::size_t bytes) override {
    fabric::Segment segment;
    segment.data = network_.memory(rank_, bytes);
    segment.bytes = bytes;
    return segment;
  }
  void attach(int, fabric::SegmentId, std::size_t, std::span<const std::byte>) override {}
  void seal(fabric::SegmentId) override {}
  void forget(int) noexcept override {}
  std::byte* pointer(int, fabric::SegmentId) const noexcept override { return nullptr; }
  std::size_t bytes(int, fabric::SegmentId) const noexcept override { return 0; }
  void put(int peer, fabric::Address to, const void* from, std::size_t bytes,
           std::uint64_t tag) override {
    const auto* data = static_cast<const std::byte*>(from);
    network_.send({rank_, peer, false, to.offset, 0, tag, {data, data + bytes}});
  }
  void publish(int peer, fabric::Address flag, std::uint64_t value, std::uint64_t,
               std::uint64_t tag) override {
    network_.send({rank_, peer, true, flag.offset, value, tag, {}});
  }
  fabric::PeerState peer_state(int) noexcept override { return fabric::PeerState::alive; }

 private:
  HeldNetwork& network_;
  int rank_;
};

std::unique_ptr<fabric::Fabric> HeldNetwork::make(int rank) {
  return std::make_unique<HeldFabric>(*this, rank);
}

class LatencyCrossingOrder : public ::testing::Test {
 protected:
  LatencyCrossingOrder() {
    config_.exchange = {.capacity = 6, .hidden = 256, .topk = 3, .dtype = Dtype::bf16};
    for (int r = 0; r < 2; ++r) {
      ranks_[r] = std::make_unique<FakeRank>(r, 2, config_, network_.make(r));
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
    return [tag = make_tag(channel, g)](const HeldNetwork::Op& op) {
      return !op.is_flag && (op.tag ^ std::uint64_t{1} << 40) == tag;
    };
  }
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

  FakeConfig config_{};
  HeldNetwork network_{};
  std::unique_ptr<FakeRank> ranks_[2];
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
  ranks_[0]->send_dispatch(3, 1);
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

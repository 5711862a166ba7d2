#include "cuda/latency/proxy/test_held_network.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

namespace ferry::cuda::test {
namespace {

class HeldFabric final : public fabric::Fabric {
 public:
  HeldFabric(HeldNetwork& network, int rank) : network_(network), rank_(rank) {}
  std::string_view name() const override { return "held"; }
  int rank() const override { return rank_; }
  int size() const override { return network_.ranks(); }
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

}  // namespace

std::unique_ptr<fabric::Fabric> HeldNetwork::make(int rank) {
  return std::make_unique<HeldFabric>(*this, rank);
}

bool HeldNetwork::waits(Ops::const_iterator op) const {
  return op->is_flag && std::any_of(ops_.begin(), op, [&](const Op& before) {
           return before.from == op->from && before.to == op->to &&
                  (before.is_flag ? before.offset == op->offset : before.tag == op->tag);
         });
}

void HeldNetwork::land(const Op& op) {
  std::byte* to = memory_[static_cast<std::size_t>(op.to)].data() + op.offset;
  if (op.is_flag) std::memcpy(to, &op.value, sizeof(op.value));
  if (!op.is_flag) std::memcpy(to, op.data.data(), op.data.size());
}

bool HeldNetwork::deliver(const Held& held) {
  bool any = false;
  for (auto op = ops_.begin(); op != ops_.end();) {
    if (waits(op) || (held && held(*op))) {
      ++op;
      continue;
    }
    land(*op);
    op = ops_.erase(op);
    any = true;
  }
  return any;
}

void HeldNetwork::deliver_any(std::mt19937& random, const Held& held) {
  if (ops_.empty()) return;
  const auto op = ops_.begin() + static_cast<std::ptrdiff_t>(random() % ops_.size());
  if (waits(op) || held(*op)) return;
  land(*op);
  ops_.erase(op);
}

std::size_t HeldNetwork::under_way(const Held& which) const {
  return static_cast<std::size_t>(std::count_if(ops_.begin(), ops_.end(), which));
}

std::byte* HeldNetwork::memory(int rank, std::size_t bytes) {
  std::vector<std::byte>& memory = memory_[static_cast<std::size_t>(rank)];
  if (memory.empty()) memory.resize(bytes + 4096);
  const auto at = reinterpret_cast<std::uintptr_t>(memory.data());
  EXPECT_EQ(at % 16, 0u);
  return memory.data();
}

}  // namespace ferry::cuda::test

// A network between ranks that one thread plays, which delivers what the test says when it says so.
#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "fabric/fabric.hpp"

namespace ferry::cuda::test {

/// Puts and flags on their way.
class HeldNetwork {
 public:
  struct Op {
    int from, to;
    bool is_flag;
    std::uint64_t offset, value, tag;
    std::vector<std::byte> data;
  };
  using Held = std::function<bool(const Op&)>;

  explicit HeldNetwork(int ranks) : memory_(static_cast<std::size_t>(ranks)) {}
  std::unique_ptr<fabric::Fabric> make(int rank);

  /// Delivers all but what is held, a flag behind the puts of its tag and the flags before it.
  /// False: there was nothing.
  bool deliver(const Held& held);
  /// One of those that may come now, whichever, but what is held.
  void deliver_any(std::mt19937& random, const Held& held);
  std::size_t under_way(const Held& which) const;
  /// What happens while a proxy is in the midst of something.
  void set_on_send(std::function<void()> on_send) { on_send_ = std::move(on_send); }

  // Of its fabrics.
  int ranks() const { return static_cast<int>(memory_.size()); }
  void send(Op op) {
    ops_.push_back(std::move(op));
    if (on_send_) on_send_();
  }
  std::byte* memory(int rank, std::size_t bytes);

 private:
  using Ops = std::deque<Op>;
  bool waits(Ops::const_iterator op) const;
  void land(const Op& op);

  std::vector<std::vector<std::byte>> memory_;
  Ops ops_{};
  std::function<void()> on_send_{};
};

}  // namespace ferry::cuda::test

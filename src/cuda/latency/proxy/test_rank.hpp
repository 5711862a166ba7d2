// A rank of a latency exchange without a GPU: does in memory what its kernels do.
#pragma once
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/domains.hpp"
#include "cuda/latency/proxy/crossing.hpp"
#include "cuda/latency/proxy/proxy.hpp"
#include "engine/memory.hpp"
#include "ferry/bootstrap.hpp"

namespace ferry::cuda::test {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
constexpr std::uint32_t kPerSlot = kPerSlotTag >> kFormatShift;

struct FakeConfig {
  LatencyConfig exchange{};
  std::int64_t experts = 8;
  int domain_size = 1;
};

/// What a rank dispatches in a generation; all ranks can compute it.
struct FakeBatch {
  std::uint32_t tokens = 0;
  std::uint32_t format = 0;             ///< of a head
  std::vector<std::int64_t> routes{};   ///< [tokens, topk]
  std::vector<std::uint32_t> places{};  ///< [tokens, topk], each at the rank of its expert
  std::vector<float> weights{};         ///< [tokens, topk]
};

/// What `peer` shall send is not there.
struct NotYet : std::runtime_error {
  NotYet(const char* what, int whose) : std::runtime_error(what), peer(whose) {}
  int peer;
};

class FakeRank {
 public:
  /// With a proxy. Collective.
  FakeRank(Bootstrap& bootstrap, const FakeConfig& config, std::unique_ptr<fabric::Fabric> fabric);
  /// Without: whoever has it polls `crossing`. The fabric needs nothing attached.
  FakeRank(int rank, int ranks, const FakeConfig& config, std::unique_ptr<fabric::Fabric> fabric);

  int rank() const { return view_.group.rank; }
  int ranks() const { return view_.group.ranks; }
  const std::vector<int>& beyond() const { return beyond_; }
  const LatencyView& view() const { return view_; }
  NetworkStats network_use() const { return memory_->fabric->network_use(); }
  LatencyProxy& proxy() { return *proxy_; }
  LatencyCrossing& crossing() { return *crossing_; }
  const std::vector<std::string>& failures() const { return failures_; }

  /// Masked: what follows goes without them.
  void leave_out(const std::set<int>& ranks) { left_out_ = ranks; }
  const std::set<int>& left_out() const { return left_out_; }

  // Halves of kernels. With a proxy what waits asserts that it comes in time; without, it throws
  // NotYet, and may be called again.
  void send_dispatch(Generation g);
  void receive_dispatch(Generation g);
  void release(Generation g);
  /// Whether weights come with the combine: not with the dispatch, and the experts' ranks sum.
  bool pushes_weights(Generation g, std::uint32_t kind) const;
  void push_weights(Generation g);
  /// `kind`: the bits of the rows' tags above the generation.
  /// Of every second token alone: `halfway`.
  void send_sums(Generation g, std::uint32_t kind, bool halfway = false);
  void receive_weights(Generation g);
  void receive_sums(Generation g, std::uint32_t kind);
  void set_gone(int peer, Gone gone);
  bool sees_gone(int peer, Gone gone) const;
  /// Whether this rank may send `g`, as kernels ask.
  bool has_credit(int peer, Generation g) const;
  void await_credit(int peer, Generation g) const;

  std::byte* outbox() const { return segment_.data + layout_.crossing.outbox; }
  std::byte* inbox() const { return segment_.data + layout_.crossing.inbox; }
  FakeBatch batch(int source, Generation g) const;
  std::size_t row_bytes(std::uint32_t format) const;
  std::size_t sum_bytes(std::uint32_t kind) const;
  /// Slots of a token at `rank`.
  std::uint32_t slots_at(const FakeBatch& batch, std::uint32_t token, int rank) const;

 private:
  template <class Check>
  void await(const char* what, int peer, const Check& check) const {
    const auto end = Clock::now() + 20s;
    while (!check()) {
      if (!proxy_) throw NotYet(what, peer);
      ASSERT_LT(Clock::now(), end) << "rank " << rank() << ": " << what;
      std::this_thread::yield();
    }
  }
  void send_header(const LatencyPlaces& at, const FakeBatch& batch, int peer);
  /// Part by part, each with its tag behind it. `slot`: of a row of sums; −1: dispatched.
  void write_row(std::byte* row, std::size_t bytes, std::uint32_t* tags, std::uint32_t tag,
                 Generation g, std::uint32_t token, int slot) const;
  void expect_rows(const LatencyPlaces& at, const FakeBatch& batch, int source) const;

  LatencyMemory layout_{};
  LatencyView view_{};
  std::vector<int> beyond_{};
  std::set<int> left_out_{};
  std::shared_ptr<engine::Memory> memory_;
  fabric::Segment segment_{};
  std::unique_ptr<LatencyCrossing> crossing_;  // until the proxy has it
  std::vector<std::string> failures_{};  // of the proxy's thread, to be read when it has ended
  std::unique_ptr<LatencyProxy> proxy_;
};

/// What stands at byte `i` of a row.
inline std::byte row_byte(int source, Generation g, std::uint32_t token, int slot, std::size_t i) {
  const std::uint64_t seed = g * 131 + token * 31 + static_cast<std::uint64_t>(source) * 7 +
                             static_cast<std::uint64_t>(slot + 1) * 3;
  return static_cast<std::byte>(seed + i * 5);
}

inline bool is_all(const std::byte* row, std::size_t bytes, int source, Generation g,
                   std::uint32_t token, int slot) {
  for (std::size_t i = 0; i < bytes; ++i) {
    if (row[i] != row_byte(source, g, token, slot, i)) return false;
  }
  return true;
}

}  // namespace ferry::cuda::test

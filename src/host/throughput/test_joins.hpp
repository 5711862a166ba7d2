// For tests of processes that take the places of lost ranks: threads, over shm.
#pragma once
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/test_groups.hpp"

namespace ferry::host::test {

using namespace engine::test;

/// Domains of `size` ranks each, joined by libfabric.
inline GroupConfig domains_of(int size, std::chrono::nanoseconds deadline = 20s) {
  GroupConfig config;
  config.experts = 24;
  config.memory_bytes = 1 << 16;
  config.deadline = deadline;
  config.domain_size = size;
  config.network = FabricKind::ofi;
  return config;
}

/// Of a process that joins, or that begins a group alone.
class Alone final : public Bootstrap {
 public:
  Alone(int rank, int size, bool begins) : rank_(rank), size_(size), begins_(begins) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool joins() const override { return !begins_; }
  bool begins() const override { return begins_; }
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte>,
                                                 std::chrono::nanoseconds, const OnWait&) override {
    throw Error(ErrorKind::unsupported, "there is nobody to gather with");
  }

 private:
  int rank_;
  int size_;
  bool begins_;
};

inline Group join(int rank, int size, const GroupConfig& config) {
  return {std::make_shared<Alone>(rank, size, false), config};
}
inline Group begin(int rank, int size, const GroupConfig& config) {
  return {std::make_shared<Alone>(rank, size, true), config};
}

/// Commits until a process waits; the step.
inline std::uint64_t commit_until_one_waits(Group& group, std::uint64_t step) {
  while (!group.commit(step)) {
    std::this_thread::sleep_for(1ms);
    ++step;
  }
  return step;
}

/// A rank that left behind it may end it for a rank that has not heard from all yet.
inline void barrier_before_some_leave(Group& group) {
  try {
    group.barrier();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::peer_left) throw;
  }
}

inline void wait_for_a_loss(Group& group) {
  EXPECT_ANY_THROW(for (;;) group.barrier());
}

/// Until the view has `ranks`: one of two that left may be seen after the other.
inline GroupView regroup_to(Group& group, const std::vector<int>& ranks) {
  GroupView view = group.view();
  while (view.ranks != ranks) {
    wait_for_a_loss(group);
    view = group.regroup();
  }
  return view;
}

}  // namespace ferry::host::test

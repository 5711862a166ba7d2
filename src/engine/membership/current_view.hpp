// Who is in a group, as an engine shows it: the view of its epoch, the committed step.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "core/placement.hpp"
#include "engine/channel.hpp"
#include "ferry/error.hpp"
#include "ferry/group.hpp"

namespace ferry::engine {

/// Changed by the thread whose turn it is, read by any.
class CurrentView {
 public:
  CurrentView(int rank, int size);

  GroupView get() const;
  // relaxed: calls of other threads come before or after a change by the order of turns.
  std::uint64_t epoch() const { return epoch_.load(std::memory_order_relaxed); }
  /// The newest committed step that this rank knows.
  std::uint64_t step() const { return step_.load(std::memory_order_relaxed); }

  /// A next epoch; `joined`: as GroupView has it.
  void begin(const Epoch& next, std::vector<int> joined);
  /// Why a step cannot be committed, or nothing.
  std::optional<Error> refusal_of(std::uint64_t step) const;
  void commit(std::uint64_t step);

  /// Refuses routes to experts of ranks that were lost. `routes`: [T, topk].
  void check_alive(std::span<const std::int32_t> routes, std::int64_t topk,
                   const Placement& placement) const;
  /// Throws Error(unsupported) when ranks were lost.
  void check_whole(const char* call) const;

 private:
  int rank_;
  int size_;
  mutable std::mutex mutex_;
  GroupView view_{};  // but for the step
  std::atomic<std::uint64_t> epoch_{1};
  std::atomic<std::uint64_t> step_{0};
};

}  // namespace ferry::engine

// The plainest watch: a deadline on a real clock. Engines build theirs around it.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "protocol/sync.hpp"

namespace ferry::protocol {

/// Ends a wait at a point in time.
class DeadlineWatch {
 public:
  using SteadyClock = std::chrono::steady_clock;

  static constexpr std::uint64_t kSliceNs = 50'000'000;
  static constexpr std::uint64_t kSpinNs = 2'000;

  /// `timeout`: from now on. `slice_ns`: the longest sleep between two polls of the clock.
  explicit DeadlineWatch(std::chrono::nanoseconds timeout, std::uint64_t spin_ns = kSpinNs,
                         std::uint64_t slice_ns = kSliceNs)
      : deadline_(SteadyClock::now() + timeout), spin_ns_(spin_ns), slice_ns_(slice_ns) {}

  std::uint64_t spin_ns() const { return spin_ns_; }

  /// Never longer than what is left, so that the deadline is met and not overslept.
  std::uint64_t slice_ns() const {
    const auto left = std::chrono::nanoseconds(deadline_ - SteadyClock::now()).count();
    return std::clamp<std::int64_t>(left, 1, static_cast<std::int64_t>(slice_ns_));
  }

  Status check() const {
    Status status;
    if (SteadyClock::now() >= deadline_) status.code = Status::Code::kDeadline;
    return status;
  }

 private:
  SteadyClock::time_point deadline_;
  std::uint64_t spin_ns_;
  std::uint64_t slice_ns_;
};
static_assert(Watch<DeadlineWatch>);

}  // namespace ferry::protocol

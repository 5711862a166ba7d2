// Ranks as threads of one process find the object that they share.
#pragma once
#include <chrono>
#include <ferry/bootstrap.hpp>
#include <functional>
#include <memory>

#include "fabric/segment_handle.hpp"

namespace ferry::fabric {

/// Collective: rank 0 makes the object, every rank gets a share of it. Two all-gathers, within
/// `deadline` together. Throws Error(unsupported) if a rank is not in rank 0's process,
/// Error(mismatch) if the ranks make different fabrics, or what the bootstrap throws.
std::shared_ptr<void> share_between_threads(Wire wire, Bootstrap& bootstrap,
                                            std::chrono::nanoseconds deadline,
                                            const OnWait& on_wait,
                                            const std::function<std::shared_ptr<void>()>& make);

/// The time until `deadline` after construction, never negative.
class Countdown {
 public:
  explicit Countdown(std::chrono::nanoseconds deadline)
      : start_(std::chrono::steady_clock::now()), deadline_(deadline) {}
  std::chrono::nanoseconds left() const {
    const auto left = deadline_ - (std::chrono::steady_clock::now() - start_);
    return left > left.zero() ? left : left.zero();
  }

 private:
  std::chrono::steady_clock::time_point start_;
  std::chrono::nanoseconds deadline_;
};

}  // namespace ferry::fabric

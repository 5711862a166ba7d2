// The receiving side of the simulated network: one queue and one thread for each target rank.
#pragma once
#include <chrono>
#include <compare>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "fabric/memory.hpp"
#include "protocol/counted_signal.hpp"

namespace ferry::fabric {

using SimClock = std::chrono::steady_clock;

/// A flag word of the target; its memory stays as long as a signal for it is under way.
struct SimFlag {
  std::shared_ptr<Memory> memory{};
  std::uint64_t offset = 0;

  friend auto operator<=>(const SimFlag&, const SimFlag&) = default;
};

using SimSignal = protocol::ArrivedSignal<SimFlag>;

/// Part of a put, or a signal.
struct SimParcel {
  SimClock::time_point due{};
  std::uint64_t order = 0;  ///< among parcels due at one time: first in, first out
  int source = -1;
  // A piece: `bytes` from `data` go to `offset` of `memory`. No data: a signal.
  std::shared_ptr<const std::vector<std::byte>> data{};
  std::size_t from = 0;
  std::size_t bytes = 0;
  std::shared_ptr<Memory> memory{};
  std::uint64_t offset = 0;
  std::uint64_t tag = 0;
  SimSignal signal{};
};

/// Delivers parcels to one rank's memory when they are due. Thread-safe.
class SimTarget {
 public:
  SimTarget(int ranks, std::size_t queue_bytes);
  ~SimTarget();  // what is still under way is lost
  SimTarget(const SimTarget&) = delete;
  SimTarget& operator=(const SimTarget&) = delete;

  /// Waits for room. All parcels of one put or publish together, so that none is lost halfway.
  void send(std::vector<SimParcel> parcels);
  /// Takes the target's link for so long, after all that took it before: when it is free again.
  SimClock::time_point occupy(std::chrono::nanoseconds takes);

 private:
  void run();
  void deliver(const SimParcel& parcel);

  const std::size_t queue_bytes_;
  const int owner_pid_;
  std::mutex mutex_;
  std::condition_variable changed_;  // something to deliver, or the end
  std::condition_variable room_;
  std::vector<SimParcel> heap_;  // the parcel due first is in front
  std::size_t under_way_ = 0;    // bytes
  std::uint64_t next_order_ = 0;
  SimClock::time_point link_free_{};
  bool stop_ = false;
  protocol::CountedSignals<SimFlag> signals_;  // of the thread alone
  std::thread thread_;                         // last: the rest is there when it starts
};

}  // namespace ferry::fabric

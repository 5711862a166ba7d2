// What arrives at a rank, by whichever NIC: pieces are counted together, and then raise flags.
#pragma once
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "fabric/fabric.hpp"
#include "fabric/ofi/message.hpp"
#include "protocol/counted_signal.hpp"
#include "protocol/reach.hpp"

namespace ferry::fabric::ofi {

/// For the endpoints of one endpoint set. Thread-safe; calls nothing that takes a lock.
class Arrivals {
 public:
  explicit Arrivals(int ranks) : signals_(ranks) {}

  /// Memory of this rank that may be written from now on; nothing: no longer.
  void expose(SegmentId segment, std::byte* data, std::size_t bytes);

  /// A write of this stream is in this rank's memory.
  void piece(int source, std::uint32_t stream);
  /// Of a rank of this job; what it says is checked.
  void signal(const Message& message, const std::byte* payload);
  /// Signals that it pre-announces; checked, too.
  void forecast(const Message& message);

 private:
  using Place = protocol::Place;
  using Signal = protocol::ArrivedSignal<Place>;
  struct Own {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
  };

  bool may_raise(const Message& message) const;
  void take(int from, const Signal& signal);
  void release(const Signal& signal);
  std::byte* own_bytes(SegmentId segment, std::uint64_t offset, std::uint64_t bytes) const;

  std::mutex mutex_;
  std::vector<Own> own_;  // by segment
  protocol::CountedSignals<Place> signals_;
};

}  // namespace ferry::fabric::ofi

// Registered memory of a group's latency exchanges, beside the arena: peers write there without a
// grant, so what one exchange leaves is taken by another one alone, when all ranks agree.
#pragma once
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "fabric/fabric.hpp"

namespace ferry::host {

class HostEngine;

class LatencyPool {
 public:
  /// What a rank says when an exchange is made. Exchanges have numbers, the same on all ranks.
  struct Offer {
    std::uint64_t newest = 0;   ///< number that it knows
    std::uint64_t first = 0;    ///< of the first exchange that it took part in; 0: none yet
    std::uint64_t free = 0;     ///< of the exchange whose memory it gives away; 0: none
    std::uint64_t segment = 0;  ///< which that is

    /// Whether all may take up the memory of that exchange: this rank gives its part away, or has
    /// none.
    bool allows(std::uint64_t exchange) const {
      return free == exchange || first == 0 || first > exchange;
    }
  };

  /// `bytes`: what is needed.
  Offer offer(std::size_t bytes) const;
  /// What that exchange left here, if it did.
  std::optional<fabric::Segment> take(std::uint64_t exchange);
  /// An exchange was made. `added`: the memory was not here before.
  void made(std::uint64_t exchange, const fabric::Segment& segment, bool added);
  /// It is gone, on this rank, or was not made after all. By any thread.
  void dropped(std::uint64_t exchange, const fabric::Segment& segment);

  std::size_t bytes() const;
  bool contains(const void* pointer) const;

 private:
  struct Free {
    std::uint64_t exchange = 0;
    fabric::Segment segment{};
  };
  mutable std::mutex mutex_;
  std::uint64_t newest_ = 0, first_ = 0;
  std::vector<Free> free_{};
  std::vector<fabric::Segment> all_{};
};

/// What all ranks of the epoch agree on about an exchange that they make.
struct AgreedExchange {
  std::uint64_t number = 0;                  ///< also its space of tags
  std::uint64_t takes = 0;                   ///< the exchange whose memory it takes up; 0: none
  std::vector<LatencyPool::Offer> offers{};  ///< [ranks], of those of the epoch
};

/// For a call's work.
AgreedExchange agree_on_exchange(HostEngine& engine, const char* stage, std::size_t bytes);

}  // namespace ferry::host

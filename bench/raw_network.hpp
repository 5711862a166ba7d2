// Two ranks joined by libfabric alone: what a network gives without Ferry.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "fabric/memory.hpp"
#include "fabric/ofi/fi_endpoint.hpp"
#include "ferry/bootstrap.hpp"

namespace ferry::bench {

/// Remote writes with data for the target's completion queue, posted and polled by one thread that
/// never sleeps. The provider is the one that a group would take.
class RawNetwork {
 public:
  /// Collective of two ranks. `bytes`: of the memory that each lets the other write.
  RawNetwork(Bootstrap& bootstrap, std::size_t bytes);

  /// Both ranks write `count` pieces of `bytes` to each other, at most `window` under way, and
  /// return when their own are done and those of the other are there.
  void exchange(std::size_t bytes, std::size_t count, std::size_t window);

 private:
  struct Card {
    std::uint64_t base = 0;
    std::uint64_t key = 0;
    std::uint64_t name_bytes = 0;
    std::byte name[fabric::ofi::kMaxEndpointName]{};
  };

  bool post(std::size_t offset, std::size_t bytes);
  void poll();
  void await_arrival(std::uint64_t count);

  const fabric::ofi::Library& library_;
  int rank_;
  std::size_t bytes_;
  std::shared_ptr<fabric::Memory> from_;
  std::shared_ptr<fabric::Memory> to_;
  fabric::ofi::FiEndpoint fi_endpoint_;
  fabric::ofi::Registration exposed_;
  fabric::ofi::Registration local_;
  fi_addr_t peer_ = FI_ADDR_UNSPEC;
  Card there_{};
  std::vector<fi_context2> contexts_;
  std::uint64_t posted_ = 0, done_ = 0, arrived_ = 0, expected_ = 0;
};

}  // namespace ferry::bench

// Memory of this rank that the network reads from and writes messages to.
#pragma once
#include <cstddef>
#include <memory>
#include <vector>

#include "fabric/memory.hpp"
#include "fabric/ofi/fi_endpoint.hpp"

namespace ferry::fabric::ofi {

struct Buffer {
  std::byte* data = nullptr;
  void* desc = nullptr;
};

/// Buffers of one size, made in slabs as they are needed and kept. No lock of its own.
class Buffers {
 public:
  Buffers(FiEndpoint& endpoint, int rank, std::size_t bytes, std::size_t slab)
      : fi_endpoint_(endpoint), rank_(rank), bytes_(bytes), slab_(slab) {}

  std::size_t bytes() const { return bytes_; }
  /// Throws Error(exhausted) or Error(system).
  Buffer take();
  void give_back(const Buffer& buffer) { free_.push_back(buffer); }
  /// Ends the registrations: nothing is sent or received any more.
  void unbind() {
    for (Slab& slab : slabs_) slab.registration = {};
  }

 private:
  struct Slab {
    std::shared_ptr<Memory> memory;
    Registration registration;
  };

  FiEndpoint& fi_endpoint_;
  int rank_;
  std::size_t bytes_;
  std::size_t slab_;  // buffers in each
  std::vector<Slab> slabs_;
  std::vector<Buffer> free_;
};

}  // namespace ferry::fabric::ofi

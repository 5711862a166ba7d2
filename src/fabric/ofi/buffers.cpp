#include "fabric/ofi/buffers.hpp"

#include <utility>

namespace ferry::fabric::ofi {

Buffer Buffers::take() {
  if (free_.empty()) {
    Slab slab;
    slab.memory = anonymous_memory(bytes_ * slab_, rank_);
    slab.registration = fi_endpoint_.local(slab.memory->data(), bytes_ * slab_);
    for (std::size_t i = slab_; i-- > 0;) {
      free_.push_back({slab.memory->data() + i * bytes_, slab.registration.desc()});
    }
    slabs_.push_back(std::move(slab));
  }
  const Buffer taken = free_.back();
  free_.pop_back();
  return taken;
}

}  // namespace ferry::fabric::ofi

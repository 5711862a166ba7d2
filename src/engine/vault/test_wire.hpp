// For tests: a device in memory, whose copies are made as late as they may be.
#pragma once
#include <array>
#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace ferry::engine::test {

class LateWire {
 public:
  void copy(std::size_t slot, void* to, const void* from, std::size_t bytes) {
    if (under_way_[slot].to != nullptr) throw std::logic_error("two copies in one buffer");
    under_way_[slot] = {to, from, bytes};
  }
  void await(std::size_t slot) {
    const Copy copy = std::exchange(under_way_[slot], {});
    if (copy.bytes > 0) std::memcpy(copy.to, copy.from, copy.bytes);
  }
  bool any() const { return under_way_[0].to != nullptr || under_way_[1].to != nullptr; }

 private:
  struct Copy {
    void* to = nullptr;
    const void* from = nullptr;
    std::size_t bytes = 0;
  };
  std::array<Copy, 2> under_way_{};
};

}  // namespace ferry::engine::test

// Copies between a device and memory that it cannot reach, through buffers that it can: while one
// buffer crosses to or from the device, the CPU copies the other.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <utility>

#include "engine/vault/vault_group.hpp"
#include "protocol/sync.hpp"

namespace ferry::engine {

/// `Wire`: copy(slot, to, from, bytes) begins one, await(slot) until it has ended. `buffers`: of
/// one size, for the two slots.
template <class Wire>
class StagedCopies {
 public:
  StagedCopies(Wire& wire, std::array<std::span<std::byte>, 2> buffers)
      : wire_(wire), buffers_(buffers) {}

  /// All have ended on return, but not when `Wire` throws.
  void run(std::span<const DeviceCopy> copies) {
    for (const DeviceCopy& copy : copies) {
      for (std::size_t at = 0; at < copy.bytes; at += buffers_[0].size()) {
        piece(copy, at, std::min(buffers_[0].size(), copy.bytes - at));
      }
    }
    end(next_);
    end(1 - next_);
  }

 private:
  /// What is under way in a buffer; `to`: in memory, where it goes from there, or null.
  struct UnderWay {
    std::byte* to = nullptr;
    std::size_t bytes = 0;
  };

  void piece(const DeviceCopy& copy, std::size_t at, std::size_t bytes) {
    const std::size_t slot = next_;
    next_ = 1 - next_;
    end(slot);
    std::byte* buffer = buffers_[slot].data();
    auto* to = static_cast<std::byte*>(copy.to) + at;
    const auto* from = static_cast<const std::byte*>(copy.from) + at;
    if (copy.from_device) {
      wire_.copy(slot, buffer, from, bytes);
      under_way_[slot] = {to, bytes};
    } else {
      protocol::read_bytes(buffer, from, bytes);
      wire_.copy(slot, to, buffer, bytes);
      under_way_[slot] = {nullptr, bytes};
    }
  }
  void end(std::size_t slot) {
    const UnderWay done = std::exchange(under_way_[slot], {});
    if (done.bytes == 0) return;
    wire_.await(slot);
    if (done.to != nullptr) protocol::write_bytes(done.to, buffers_[slot].data(), done.bytes);
  }

  Wire& wire_;
  std::array<std::span<std::byte>, 2> buffers_;
  std::array<UnderWay, 2> under_way_{};
  std::size_t next_ = 0;
};

}  // namespace ferry::engine

// Frames on their way out, ready to be written in pieces of any length.
#pragma once
#include <cstddef>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "bootstrap/frame.hpp"

namespace ferry::bootstrap {

/// Payloads are shared, not copied: one contribution on its way to 100 ranks is held once.
class FrameQueue {
 public:
  void authenticate(const Digest& key) { sealer_.authenticate(key); }
  bool authenticated() const { return sealer_.authenticated(); }
  void push(FrameHeader header, std::vector<std::byte> payload = {});
  void push_shared(FrameHeader header, std::shared_ptr<const SharedPayload> payload);

  bool empty() const { return pieces_.empty(); }
  /// The next bytes to write; empty when there are none. Valid until the next call.
  std::span<const std::byte> front() const;
  /// `n` bytes of front() have been written.
  void written(std::size_t n);
  void clear();

 private:
  void push_piece(std::vector<std::byte> bytes);

  FrameSealer sealer_;
  std::deque<std::shared_ptr<const std::vector<std::byte>>> pieces_;
  std::size_t offset_ = 0;  // in the first piece
};

}  // namespace ferry::bootstrap

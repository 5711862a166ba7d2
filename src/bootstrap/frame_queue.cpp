#include "bootstrap/frame_queue.hpp"

#include <utility>

namespace ferry::bootstrap {

void FrameQueue::push(FrameHeader header, std::vector<std::byte> payload) {
  push_shared(header, std::make_shared<const SharedPayload>(std::move(payload)));
}

void FrameQueue::push_shared(FrameHeader header, std::shared_ptr<const SharedPayload> payload) {
  header.length = std::uint32_t(payload->bytes.size());
  const auto head = encode_header(header);
  push_piece({head.begin(), head.end()});
  if (!payload->bytes.empty()) {
    pieces_.push_back(std::shared_ptr<const std::vector<std::byte>>(payload, &payload->bytes));
  }
  push_piece(sealer_.seal(head, payload->digest));
}

void FrameQueue::push_piece(std::vector<std::byte> bytes) {
  if (bytes.empty()) return;
  pieces_.push_back(std::make_shared<const std::vector<std::byte>>(std::move(bytes)));
}

std::span<const std::byte> FrameQueue::front() const {
  if (pieces_.empty()) return {};
  return std::span<const std::byte>(*pieces_.front()).subspan(offset_);
}

void FrameQueue::written(std::size_t n) {
  offset_ += n;
  if (!pieces_.empty() && offset_ >= pieces_.front()->size()) {
    pieces_.pop_front();
    offset_ = 0;
  }
}

void FrameQueue::clear() {
  pieces_.clear();
  offset_ = 0;
}

}  // namespace ferry::bootstrap

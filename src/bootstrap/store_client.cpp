#include "bootstrap/store_client.hpp"

#include <algorithm>
#include <utility>

namespace ferry::bootstrap {

StoreClient::StoreClient(Config config)
    : config_(std::move(config)), parts_(std::size_t(config_.size)) {
  output_.push(header(FrameType::hello),
               encode(Hello{.size = std::uint32_t(config_.size), .nonce = config_.nonce}));
}

FrameHeader StoreClient::header(FrameType type) const {
  return {.type = type, .sequence = sequence_, .rank = std::uint32_t(config_.rank)};
}

void StoreClient::receive(std::span<const std::byte> bytes) {
  while (!bytes.empty() && (state_ == State::handshake || state_ == State::joined)) {
    bytes = bytes.subspan(parser_.feed(bytes));
    if (parser_.error() != FrameError::none) {
      state_ = State::not_a_store;
      return;
    }
    if (std::optional<Frame> frame = parser_.take()) on_frame(std::move(*frame));
  }
}

void StoreClient::end_of_stream() {
  if (state_ == State::handshake || state_ == State::joined) state_ = State::lost;
}

void StoreClient::on_frame(Frame frame) {
  switch (frame.header.type) {
    case FrameType::challenge: return on_challenge(frame);
    case FrameType::welcome: return on_welcome(frame);
    case FrameType::refused:
      refusal_ = decode_refusal(frame.payload);
      state_ = refusal_ ? State::refused : State::not_a_store;
      return;
    case FrameType::part: return on_part(std::move(frame));
    case FrameType::missing:
      if (frame.header.sequence != sequence_) return;
      absences_ = decode_absences(frame.payload);
      ++answers_;
      return;
    case FrameType::failed:
      if (!failure_) failure_ = decode_failure(frame.payload);
      if (!failure_) state_ = State::not_a_store;
      return;
    case FrameType::closing: state_ = State::closed; return;
    default:  // a client's own frames, mirrored
      state_ = State::not_a_store;
  }
}

void StoreClient::on_challenge(const Frame& frame) {
  if (proofs_) {
    state_ = State::not_a_store;
    return;
  }
  answered_ = true;
  Transcript transcript{.size = std::uint32_t(config_.size),
                        .rank = std::uint32_t(config_.rank),
                        .client = config_.nonce,
                        .store = {}};
  std::copy_n(frame.payload.begin(), transcript.store.size(), transcript.store.begin());
  proofs_ = prove(config_.secret, transcript);
  output_.push(header(FrameType::proof), {proofs_->client.begin(), proofs_->client.end()});
}

void StoreClient::on_welcome(const Frame& frame) {
  Digest said{};
  std::copy_n(frame.payload.begin(), said.size(), said.begin());
  if (!proofs_ || !same_digest(said, proofs_->store)) {
    state_ = State::impostor;
    return;
  }
  parser_.authenticate(proofs_->to_client);
  output_.authenticate(proofs_->to_store);
  state_ = State::joined;
}

void StoreClient::on_part(Frame frame) {
  const std::size_t source = frame.header.rank;
  bytes_ += frame.payload.size();
  // The store sends the parts of one gather in rank order.
  if (!giving_ || frame.header.sequence != sequence_ || source != arrived_ ||
      source >= parts_.size() || bytes_ > kMaxGatherBytes) {
    state_ = State::not_a_store;
    return;
  }
  parts_[source] = std::move(frame.payload);
  ++arrived_;
}

void StoreClient::give(std::span<const std::byte> mine) {
  giving_ = true;
  arrived_ = 0;
  bytes_ = 0;
  absences_.reset();
  output_.push(header(FrameType::give), {mine.begin(), mine.end()});
}

std::vector<std::vector<std::byte>> StoreClient::take() {
  giving_ = false;
  arrived_ = 0;
  ++sequence_;
  return std::exchange(parts_, std::vector<std::vector<std::byte>>(parts_.size()));
}

void StoreClient::ask() {
  output_.push(header(FrameType::ask));
}

void StoreClient::leave(Farewell farewell) {
  if (state_ == State::joined) output_.push(header(FrameType::goodbye), encode(farewell));
}

}  // namespace ferry::bootstrap

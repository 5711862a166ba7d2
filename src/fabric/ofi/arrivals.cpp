#include "fabric/ofi/arrivals.hpp"

#include <cstring>

namespace ferry::fabric::ofi {
namespace {

/// Of one source: all that it may tell, with companions (streams.hpp).
constexpr std::size_t kMostPreAnnounced = std::size_t{2} * (kStreamMask + 1);

}  // namespace

void Arrivals::expose(SegmentId segment, std::byte* data, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (own_.size() <= segment) own_.resize(segment + 1);
  own_[segment] = {data, bytes};
}

void Arrivals::piece(int source, std::uint32_t stream) {
  const std::lock_guard lock(mutex_);
  signals_.piece(source, stream, 1,
                 [this](int /*source*/, const Signal& arrived) { release(arrived); });
}

void Arrivals::signal(const Message& message, const std::byte* payload) {
  const std::lock_guard lock(mutex_);
  if (!may_raise(message)) return;
  if (message.payload > 0) {
    std::byte* to = own_bytes(message.payload_segment, message.payload_offset, message.payload);
    if (to == nullptr) return;
    std::memcpy(to, payload, message.payload);
  }
  const Signal arrived{.sequence = message.sequence,
                       .flag = {message.flag_segment, message.flag_offset},
                       .value = message.value,
                       .tag = message.stream,
                       .bytes = message.pieces};
  take(message.source, arrived);
}

void Arrivals::forecast(const Message& message) {
  const std::lock_guard lock(mutex_);
  const bool ours = (message.stream & ~(kStreamMask | kCompanion)) == 0 &&
                    message.stream % kForecast == 0 &&
                    signals_.waiting(message.source) < kMostPreAnnounced;
  if (!ours || !may_raise(message)) return;
  for (std::uint32_t i = 0; i < kForecast; ++i) {
    take(message.source, {.sequence = message.sequence + i,
                          .flag = {message.flag_segment, message.flag_offset},
                          .value = message.value + std::uint64_t{i} * message.step,
                          .tag = message.stream + i,
                          .bytes = 1,
                          .pre_announced = true});
  }
}

void Arrivals::take(int from, const Signal& signal) {
  signals_.signal(from, signal,
                  [this](int /*source*/, const Signal& arrived) { release(arrived); });
}

/// Whether its flag lies in this rank's memory.
bool Arrivals::may_raise(const Message& message) const {
  return message.flag_offset % protocol::kFlagStride == 0 &&
         own_bytes(message.flag_segment, message.flag_offset, protocol::kFlagBytes) != nullptr;
}

void Arrivals::release(const Signal& signal) {
  std::byte* word = own_bytes(signal.flag.segment, signal.flag.offset, sizeof(std::uint64_t));
  protocol::publish_in_memory(protocol::Flag{reinterpret_cast<std::uint64_t*>(word)}, signal.value);
}

/// Null unless all of it lies in a segment of this rank.
std::byte* Arrivals::own_bytes(SegmentId segment, std::uint64_t offset, std::uint64_t bytes) const {
  if (segment >= own_.size()) return nullptr;
  const Own& own = own_[segment];
  // Not offset + bytes: that could overflow.
  if (offset > own.bytes || bytes > own.bytes - offset) return nullptr;
  return own.data + offset;
}

}  // namespace ferry::fabric::ofi

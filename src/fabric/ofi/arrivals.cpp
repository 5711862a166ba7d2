#include "fabric/ofi/arrivals.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace ferry::fabric::ofi {
namespace {

/// Of one source: all that it may tell, with companions (streams.hpp).
constexpr std::size_t kMostPreAnnounced = std::size_t{2} * (kStreamMask + 1);
/// The segment of no flag: what is counted for it raises nothing.
constexpr SegmentId kNoFlag = ~SegmentId{0};

}  // namespace

void Arrivals::expose(SegmentId segment, std::byte* data, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (own_.size() <= segment) own_.resize(segment + 1);
  own_[segment] = {data, bytes};
}

void Arrivals::piece(int source, std::uint32_t stream) {
  const std::lock_guard lock(mutex_);
  if ((stream & kCompanion) == 0) fence_of(source).landed++;
  signals_.piece(source, stream, 1,
                 [this](int /*source*/, const Signal& arrived) { release(arrived); });
}

void Arrivals::signal(const Message& message, const std::byte* payload) {
  const std::lock_guard lock(mutex_);
  if (!may_raise(message)) return;
  if (message.payload > 0) {
    fence_of(message.source).landed++;
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

void Arrivals::cancel(const Message& message) {
  const std::lock_guard lock(mutex_);
  take(message.source, {.sequence = message.sequence,
                        .flag = {kNoFlag, 0},
                        .tag = message.stream,
                        .bytes = message.pieces});
}

void Arrivals::set_on_text(Fabric::OnText on_text) {
  const std::lock_guard lock(mutex_);
  on_text_ = std::move(on_text);
}

void Arrivals::text(int source, std::span<const std::byte> text) {
  const std::lock_guard lock(mutex_);
  if (on_text_) on_text_(source, text);
}

void Arrivals::take_link_message(int source, std::uint64_t since,
                                 Fabric::LinkMessage link_message) {
  const std::lock_guard lock(mutex_);
  LastMessage& last = last_message(source, since);
  const bool newer = (since & kTicketBit) != 0 ? since != last.since : since > last.since;
  if (!newer) return;
  last = {since, std::move(link_message)};
  if (on_text_) on_text_(source, {});
}

std::optional<Fabric::LinkMessage> Arrivals::link_message(int source, std::uint64_t since) {
  const std::lock_guard lock(mutex_);
  const LastMessage& last = last_message(source, since);
  if (last.since != since) return std::nullopt;
  return last.link_message;
}

std::optional<Fabric::Knock> Arrivals::knock(int source) {
  const std::lock_guard lock(mutex_);
  const LastMessage& last = last_message(source, kTicketBit);
  if (last.since == 0) return std::nullopt;
  return Fabric::Knock{last.since, last.link_message};
}

void Arrivals::begin_anew(int source) {
  const std::lock_guard lock(mutex_);
  signals_.begin_anew(source);
  fence_of(source) = {};
}

void Arrivals::fence(int source, std::uint64_t epoch, std::uint64_t pieces) {
  const std::lock_guard lock(mutex_);
  Fence& fence = fence_of(source);
  if (epoch < fence.epoch) return;
  fence.epoch = epoch;
  fence.pieces = pieces;
  if (on_text_) on_text_(source, {});
}

void Arrivals::fenced(int source, std::uint64_t epoch) {
  const std::lock_guard lock(mutex_);
  fence_of(source).told = std::max(fence_of(source).told, epoch);
  if (on_text_) on_text_(source, {});
}

bool Arrivals::is_fenced(int source, std::uint64_t epoch) {
  const std::lock_guard lock(mutex_);
  return fence_of(source).told >= epoch;
}

std::optional<std::uint64_t> Arrivals::complete_fence(int source) {
  const std::lock_guard lock(mutex_);
  Fence& fence = fence_of(source);
  if (fence.epoch <= fence.answered || fence.landed < fence.pieces) return std::nullopt;
  fence.answered = fence.epoch;
  return fence.epoch;
}

bool Arrivals::has_fence(int source, std::uint64_t epoch) {
  const std::lock_guard lock(mutex_);
  return fence_of(source).answered >= epoch;
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
  if (signal.flag.segment == kNoFlag) return;
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

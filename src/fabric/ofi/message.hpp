// What crosses the network beside the rows: signals, signs of life, farewells. Everything that
// arrives is checked, for anybody who can reach the port can send.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <type_traits>

#include "fabric/ofi/streams.hpp"
#include "fabric/segment_handle.hpp"

namespace ferry::fabric::ofi {

/// 128 bits that only ranks of this job can make, others for each way from source to target.
using WayKey = JobKey;
WayKey make_way_key(const JobKey& job, int source, int target, int endpoint);
/// The job as two ranks use it between them that were linked in that epoch or under that ticket
/// (lobby.hpp); 1: at creation. So nothing counts that the former holder of a seat has sent.
JobKey job_since(const JobKey& job, std::uint64_t since);

enum class MessageKind : std::uint32_t {
  signal = 1,    ///< a flag's new value, behind so many pieces of a stream; may carry bytes
  beat = 2,      ///< the source is alive
  bye = 3,       ///< the source leaves; it waits for the answer
  bye_seen = 4,  ///< the answer
  forecast = 5,  ///< kForecast signals, each behind one write of the streams from `stream` on
  text = 6,      ///< its bytes are for the engine
  cancel = 7,    ///< of a stream that no signal will count: so many pieces
  fence = 8,     ///< the source has written `pieces` in all, and no more before epoch `value` ends
  fenced = 9,    ///< the answer, when they are all here
  link_message =
      10,  ///< the source has linked the target, in epoch or under ticket `value`, with its card
};

/// The head of every message; `payload` bytes follow.
struct Message {
  std::uint32_t magic = kMagic;
  MessageKind kind{};
  std::int32_t source = -1;
  std::uint32_t payload = 0;
  WayKey way_key{};
  // Of a signal: the flag and what goes before it.
  std::uint64_t sequence = 0;
  std::uint64_t value = 0;
  std::uint64_t flag_offset = 0;
  SegmentId flag_segment = 0;
  std::uint32_t stream = 0;
  std::uint64_t pieces = 0;
  std::uint64_t payload_offset = 0;
  SegmentId payload_segment = 0;
  std::uint32_t step = 0;  ///< of a forecast: from each value to the next

  static constexpr std::uint32_t kMagic = 0x314f5946;  // "FYO1"
};
static_assert(std::is_trivially_copyable_v<Message> && sizeof(Message) == 88);

/// What is sent at once: a few messages, one behind the other.
inline constexpr std::size_t kMessageRoom = std::size_t{16} << 10;
/// Signals without bytes that wait for company.
inline constexpr std::size_t kMaxHeld = 4;
/// Bytes that a signal carries at most: one message instead of a write and a message. A token of
/// 7168 bf16 fits.
inline constexpr std::size_t kMaxPayload = kMessageRoom - (kMaxHeld + 1) * sizeof(Message);

/// The first message in `bytes`, if its form is right: any values, but no more payload than came.
/// Its payload follows it.
inline std::optional<Message> message_in(std::span<const std::byte> bytes) {
  Message message;
  if (bytes.size() < sizeof message) return std::nullopt;
  std::memcpy(&message, bytes.data(), sizeof message);
  if (message.magic != Message::kMagic || bytes.size() - sizeof message < message.payload) {
    return std::nullopt;
  }
  return message;
}

/// Which stream a write belongs to: the data that arrives with it. The low 32 bits say it; the
/// high 32, where the provider carries 8 bytes, are part of the way's key.
constexpr std::uint64_t piece_data(const WayKey& way_key, int source, std::uint32_t stream) {
  return (way_key[0] & ~0xffffffffull) | static_cast<std::uint64_t>(source) << kStreamBits | stream;
}
constexpr int source_of(std::uint64_t data) {
  return static_cast<int>((data & 0xffffffffull) >> kStreamBits);
}
constexpr std::uint32_t stream_of(std::uint64_t data) {
  return static_cast<std::uint32_t>(data) & (kStreamMask | kWithCompanion);
}

}  // namespace ferry::fabric::ofi

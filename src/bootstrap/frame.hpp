// The frames that the TCP store and its clients exchange, and their incremental parser. No sockets
// here: bytes in, frames or an error out. The fuzzer drives this file.
//
// A frame, little endian:
//   magic u32 | version u16 | type u16 | sequence u64 | rank u32 | length u32 | payload | mac
// `mac` (32 bytes) is there once both sides have proved the secret:
//   HMAC-SHA-256(key of this direction, counter u64 | the 24 header bytes | SHA-256(payload))
// where counter is the number of the frame in its direction; so a frame can be neither forged,
// changed, repeated nor left out. The header and the `refused` frame are the same in all versions.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "bootstrap/sha256.hpp"

namespace ferry::bootstrap {

inline constexpr std::uint32_t kFrameMagic = 0x59525246;  // "FRRY"
inline constexpr std::uint16_t kStoreVersion = 1;
inline constexpr std::size_t kHeaderBytes = 24;
/// The longest contribution of one rank to one all_gather.
inline constexpr std::size_t kMaxMessageBytes = std::size_t(16) << 20;
/// The longest sum of contributions to one all_gather.
inline constexpr std::size_t kMaxGatherBytes = std::size_t(64) << 20;

enum class FrameType : std::uint16_t {
  hello = 1,      ///< client: who I am, my nonce
  challenge = 2,  ///< store: its nonce
  proof = 3,      ///< client: HMAC over both nonces
  welcome = 4,    ///< store: its own HMAC over both nonces
  refused = 5,    ///< store: why not (a code and two numbers, no text)
  give = 6,       ///< client: my contribution to gather `sequence`
  part = 7,       ///< store: the contribution of `rank` to gather `sequence`
  failed = 8,     ///< store: why the ranks cannot meet any more
  ask = 9,        ///< client: who is missing?
  missing = 10,   ///< store: who is missing
  goodbye = 11,   ///< client: I leave, and why
  closing = 12,   ///< store: rank 0 leaves in good order
};

/// A type's name, for messages and tests.
const char* name_of(FrameType type);

struct FrameHeader {
  FrameType type = FrameType::hello;
  std::uint64_t sequence = 0;
  std::uint32_t rank = 0;
  std::uint32_t length = 0;  ///< payload bytes
  std::uint16_t version = kStoreVersion;
};

struct Frame {
  FrameHeader header;
  std::vector<std::byte> payload;
};

enum class FrameError {
  none,
  bad_magic,    ///< not a Ferry peer at all
  bad_version,  ///< Ferry, but another version of the protocol: see seen_version()
  bad_type,     ///< no such type, or not at this point
  bad_length,   ///< the length does not fit the type
  bad_mac,      ///< forged, changed, repeated or left out
};

std::array<std::byte, kHeaderBytes> encode_header(const FrameHeader& header);

/// A payload that is sent to many: its digest is computed once.
struct SharedPayload {
  explicit SharedPayload(std::vector<std::byte> b) : bytes(std::move(b)), digest(sha256(bytes)) {}
  const std::vector<std::byte> bytes;
  const Digest digest;
};

/// Counts and authenticates the frames of one direction.
class FrameSealer {
 public:
  /// From now on every frame carries a mac.
  void authenticate(const Digest& key) { key_ = key; }
  /// The mac of the next frame; empty before `authenticate`.
  std::vector<std::byte> seal(std::span<const std::byte> header, const Digest& payload_digest);
  bool authenticated() const { return key_.has_value(); }

 private:
  std::optional<Digest> key_;
  std::uint64_t counter_ = 0;
};

/// Takes bytes in pieces of any length and gives whole, checked frames. Memory: what was fed of
/// one frame, never what a header merely announces; before `authenticate` at most 100 bytes.
class FrameParser {
 public:
  /// Takes bytes up to the end of the current frame and says how many it took. Takes none while a
  /// frame waits in `take`, or after an error.
  std::size_t feed(std::span<const std::byte> bytes);
  /// The frame that is complete, once.
  std::optional<Frame> take();
  FrameError error() const { return error_; }
  /// With bad_version: the version that the other side speaks.
  std::uint16_t seen_version() const { return header_.version; }
  /// From the next frame on: macs, and the types of an admitted peer. Not in the midst of a frame.
  void authenticate(const Digest& key) { sealer_.authenticate(key); }
  /// Payload bytes that the current frame announces; 0 outside of one.
  std::size_t announced() const { return have_header_ ? header_.length : 0; }

 private:
  bool read_header();
  void finish();

  FrameSealer sealer_;
  FrameError error_ = FrameError::none;
  std::vector<std::byte> head_;  // up to kHeaderBytes
  bool have_header_ = false;
  FrameHeader header_;
  std::vector<std::byte> payload_;
  std::vector<std::byte> mac_;
  std::optional<Frame> ready_;
};

}  // namespace ferry::bootstrap

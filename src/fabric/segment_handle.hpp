// What a rank sends so that a peer can attach its segment.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fabric/fabric.hpp"

namespace ferry::fabric {

/// Which fabric wrote a handle or a handshake.
enum class Wire : std::uint32_t { local = 1, shm = 2, sim = 3, ofi = 4 };

/// 128 bits that only the ranks of one job know.
using JobKey = std::array<std::uint64_t, 2>;

/// A key from the kernel's random source. Throws Error(system).
JobKey random_key(int rank);

/// The same bytes on every rank; all of it is checked by the peer that attaches.
struct SegmentHandle {
  std::uint32_t magic = kMagic;
  Wire way{};
  std::int32_t rank = -1;
  SegmentId segment = 0;
  std::uint64_t bytes = 0;
  std::uint64_t inode = 0;  ///< shm: of the object; otherwise 0
  JobKey job{};             ///< tells apart two jobs; for shm not the key itself

  static constexpr std::uint32_t kMagic = 0x31594654;  // "TFY1"
  static constexpr bool kMayBeEmpty = true;
};
static_assert(sizeof(SegmentHandle) <= kMaxHandleBytes);

std::vector<std::byte> to_bytes(const SegmentHandle& handle);

/// What the caller of `attach` says about the segment.
template <class Handle>
struct AttachmentOf {
  decltype(Handle::way) way{};
  int self = -1;
  int peer = -1;
  SegmentId segment = 0;
  std::size_t bytes = 0;
  JobKey job{};
};
using Attachment = AttachmentOf<SegmentHandle>;

/// Error(system) about attaching, with rank and peer.
[[noreturn]] void throw_attach(const Attachment& attachment, std::string_view reason);

/// Reads a peer's handle and compares it with what is attached. Throws Error(system) naming the
/// peer and what differs.
template <class Handle>
Handle checked_handle(std::span<const std::byte> bytes, const AttachmentOf<Handle>& expected) {
  Handle handle;
  if (bytes.size() != sizeof handle) {
    throw_attach(expected, "its handle has " + std::to_string(bytes.size()) + " bytes, expected " +
                               std::to_string(sizeof handle));
  }
  std::memcpy(&handle, bytes.data(), sizeof handle);
  if (handle.magic != Handle::kMagic || handle.way != expected.way) {
    throw_attach(expected, "its handle was not written by this fabric");
  }
  if (handle.job != expected.job) throw_attach(expected, "its handle belongs to another group");
  if (handle.rank != expected.peer || handle.segment != expected.segment) {
    throw_attach(expected, "its handle is for segment " + std::to_string(handle.segment) +
                               " of rank " + std::to_string(handle.rank));
  }
  if (handle.bytes != expected.bytes || (expected.bytes == 0 && !Handle::kMayBeEmpty)) {
    throw_attach(expected, "its handle is for " + std::to_string(handle.bytes) + " bytes");
  }
  return handle;
}

}  // namespace ferry::fabric

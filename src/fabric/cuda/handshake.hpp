// What ranks tell each other when device memory is created, and what a handle of a segment holds.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fabric/cuda/context.hpp"
#include "fabric/cuda/device_memory.hpp"
#include "fabric/identity.hpp"
#include "fabric/segment_handle.hpp"

namespace ferry::fabric {

/// As a card (DeviceMemory::card), `forced` is the way of the group, and `job` its key.
struct DeviceHandshake {
  struct Fixed {
    std::uint32_t magic = kMagic;
    DeviceWay forced = DeviceWay::automatic;
    JobKey job{};     ///< rank 0's is the group's
    JobKey socket{};  ///< of this process alone; names its DescriptorServer
    DeviceUuid uuid{};
    std::int32_t ordinal = -1;
    std::uint8_t vmm = 0;
    std::uint8_t ipc = 0;
    std::uint8_t fabric = 0;
    std::uint8_t reserved = 0;
    std::array<char, 96> gpu{};       ///< name and place, for messages
    std::array<char, 256> problem{};  ///< why this rank has no GPU; empty: it has one
    static constexpr std::uint32_t kMagic = 0x31474446;  // "FDG1"
  };
  Fixed fixed{};
  Identity identity{};
};

std::vector<std::byte> to_bytes(const DeviceHandshake& handshake);
/// Throws Error(mismatch) naming `rank` and `peer`, whose bytes these are.
DeviceHandshake device_handshake_from(std::span<const std::byte> bytes, int rank, int peer);

/// How a step went on one rank.
struct DeviceOutcome {
  std::int32_t peer = -1;  ///< with whom it failed; −1 with `text`: on its own
  ErrorKind kind = ErrorKind::unsupported;
  std::array<char, 376> text{};  ///< empty: well
  bool failed() const { return text[0] != 0; }
};

/// Copies text into a field that ends with 0, cut if need be.
void put_text(std::string_view text, std::span<char> field);
/// Reads one that came from another rank.
std::string text_of(std::span<const char> field);

/// What a rank sends so that its peers can attach a segment.
struct DeviceHandle {
  std::uint32_t magic = kMagic;
  DeviceWay way = DeviceWay::automatic;
  std::int32_t rank = -1;
  SegmentId segment = 0;
  std::uint64_t bytes = 0;
  JobKey job{};
  std::int32_t descriptor = -1;  ///< vmm_pidfd
  std::uint32_t reserved = 0;
  std::array<std::byte, 64> exported{};                ///< ipc, vmm_fabric
  static constexpr std::uint32_t kMagic = 0x31484446;  // "FDH1"
  static constexpr bool kMayBeEmpty = false;
};
static_assert(sizeof(DeviceHandle) <= kMaxHandleBytes);

std::vector<std::byte> to_bytes(const DeviceHandle& handle);

using DeviceAttachment = AttachmentOf<DeviceHandle>;
[[noreturn]] void throw_attach(const DeviceAttachment& attachment, std::string_view reason);

}  // namespace ferry::fabric

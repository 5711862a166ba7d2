// Registered GPU memory of one rank, and the peers' as this GPU sees it. All ranks of the group lie
// in one domain: every GPU can load from and store to every other one.
#pragma once
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <ferry/bootstrap.hpp>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "fabric/fabric.hpp"

namespace ferry::fabric {

/// Device segments of one rank at most.
inline constexpr SegmentId kMaxDeviceSegments = 64;

/// How memory of one process becomes memory of another. One way for the whole group; ranks of one
/// process always share the mapping itself.
enum class DeviceWay : std::uint32_t {
  automatic = 0,   ///< the first of those below that works between all ranks
  local = 1,       ///< all ranks are threads of one process
  vmm_pidfd = 2,   ///< driver VMM; the peer takes the file descriptor (pidfd_getfd)
  vmm_socket = 3,  ///< driver VMM; the owner hands the file descriptor over a unix socket
  ipc = 4,         ///< classic CUDA IPC
  /// Driver VMM; the handle itself crosses, also between hosts of one NVLink domain (IMEX). Taken
  /// when ranks run on different hosts, and the only way then.
  vmm_fabric = 5,
};

/// "automatic", "local", "vmm-pidfd", "vmm-socket", "ipc", "vmm-fabric".
std::string_view name_of(DeviceWay way);

struct DeviceMemoryOptions {
  int device = 0;                        ///< CUDA ordinal in this process
  DeviceWay way = DeviceWay::automatic;  ///< the same on all ranks; forced by tests
  std::chrono::nanoseconds deadline = std::chrono::seconds(60);  ///< of creation, of zeroing
  OnWait on_wait{};                                              ///< for creation only
  bool joinable = false;  ///< processes that come later map it, too
};

/// One thread at a time registers and seals, one attaches; meanwhile others may ask for pointers.
/// All memory stays until the object ends (or `seat`); by then no kernel may use it, here or at a
/// peer. The device that is current in the calling thread is left as it was. Never throws at its
/// end; in a forked child the end does nothing.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual int device() const = 0;  ///< CUDA ordinal
  virtual DeviceWay way() const = 0;

  /// Zeroed device memory of at least `bytes` (> 0); Segment::bytes says how much: rounded_bytes.
  /// `data` is a device pointer. Throws Error(exhausted) when the GPU has no room (nothing is left
  /// behind), Error(deadline), Error(system).
  virtual Segment register_memory(std::size_t bytes) = 0;
  /// What register_memory makes of `bytes`: whole pages of the GPU. The same on every call.
  virtual std::size_t rounded_bytes(std::size_t bytes) const = 0;
  /// Maps a peer's segment on this GPU; own rank: nothing. `handle` and `bytes` come from that peer
  /// (Segment::handle, Segment::bytes) and are checked before use. Throws Error(system) naming it.
  virtual void attach(int peer, SegmentId segment, std::size_t bytes,
                      std::span<const std::byte> handle) = 0;
  /// Every peer has attached this rank's segment, and nobody comes later: its file descriptor goes.
  virtual void seal(SegmentId segment) noexcept = 0;

  /// The segment as this GPU sees it; null if it is not attached. Own rank: its data.
  virtual std::byte* pointer(int peer, SegmentId segment) const noexcept = 0;
  /// The same, which stays mapped as long as what is returned lives, also when another process
  /// takes that rank's place.
  virtual std::shared_ptr<std::byte> hold(int peer, SegmentId segment) const = 0;
  /// 0 if it is not attached.
  virtual std::size_t bytes(int peer, SegmentId segment) const noexcept = 0;

  // Where processes take the places of lost ranks.

  /// What others must know of this rank to attach its segments, for `seat` and join_device_memory.
  virtual std::vector<std::byte> card() const = 0;
  /// From now on `peer` is the process with this card, of which nothing is attached yet. Nobody
  /// asks for pointers meanwhile, and no kernel uses what was attached of the one before, unless it
  /// is held: it is unmapped. Nothing changes if it is that process already. Throws Error(mismatch)
  /// or Error(unsupported).
  virtual void seat(int peer, std::span<const std::byte> card) = 0;
  /// Whether the peer has this rank's GPU.
  virtual bool shares_gpu(int peer) const = 0;
  /// The UUID of the peer's GPU.
  virtual std::array<std::uint8_t, 16> gpu_of(int peer) const = 0;
};

/// Collective; a handful of all-gathers. Tries with a small segment of every rank what works
/// between all of them. Throws on every rank alike: Error(unsupported) naming two ranks and their
/// GPUs that cannot reach each other, or the rank that has no such GPU or no driver;
/// Error(mismatch) when options differ; or what the bootstrap throws.
std::unique_ptr<DeviceMemory> make_device_memory(Bootstrap& bootstrap,
                                                 const DeviceMemoryOptions& options);

/// Of a process that takes the place of a lost rank: not collective; nothing is attached yet.
/// `card`: of any rank of the group; empty: this process begins it. Throws Error(unsupported) where
/// this process cannot share its GPU's memory in their way, Error(mismatch).
std::unique_ptr<DeviceMemory> join_device_memory(int rank, int size,
                                                 const DeviceMemoryOptions& options,
                                                 std::span<const std::byte> card);

}  // namespace ferry::fabric

// One GPU of this process: its primary context, which CUDA's runtime and torch use, too.
#pragma once
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "fabric/cuda/driver.hpp"

namespace ferry::fabric {

struct DeviceAbilities {
  bool vmm = false;       ///< virtual memory with POSIX file descriptors between processes
  bool rdma_vmm = false;  ///< a NIC may reach such memory
  bool ipc = false;       ///< not on integrated GPUs
  bool fabric = false;    ///< handles of VMM memory for other hosts; IMEX may still refuse them
};

using DeviceUuid = std::array<std::uint8_t, 16>;

class DeviceContext {
 public:
  /// Throws CallRefused. `ordinal` must exist.
  explicit DeviceContext(int ordinal);
  ~DeviceContext();
  DeviceContext(const DeviceContext&) = delete;
  DeviceContext& operator=(const DeviceContext&) = delete;

  int ordinal() const noexcept { return ordinal_; }
  CUdevice device() const noexcept { return device_; }
  CUcontext context() const noexcept { return context_; }
  const DeviceUuid& uuid() const noexcept { return uuid_; }
  const std::string& name() const noexcept { return name_; }  ///< "NVIDIA H200 at 0000:19:00.0"
  const DeviceAbilities& abilities() const noexcept { return abilities_; }
  /// Page size for memory of this GPU, in bytes; a power of two, at least 2 MiB.
  std::size_t granularity() const noexcept { return granularity_; }
  /// In a forked child the driver must not be called.
  bool usable() const noexcept { return getpid() == owner_pid_; }

  /// The three run on a stream of their own and wait until `until`; false: not done by then, the
  /// memory may still be written or read. Throw CallRefused.
  /// `zero` is done by a copy engine, as a memset would wait for a free SM, and a kernel that has
  /// all of them may wait for this rank.
  bool zero(CUdeviceptr to, std::size_t bytes, std::chrono::steady_clock::time_point until);
  bool write(CUdeviceptr to, std::uint64_t word, std::chrono::steady_clock::time_point until);
  bool read(CUdeviceptr from, std::uint64_t& word, std::chrono::steady_clock::time_point until);

 private:
  bool finished(std::chrono::steady_clock::time_point until);

  int ordinal_;
  pid_t owner_pid_ = getpid();
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  CUstream stream_ = nullptr;
  std::shared_ptr<std::byte> zeros_;     ///< pinned; of zero
  bool late_ = false;                    ///< a copy of them may still run
  std::shared_ptr<std::uint64_t> word_;  ///< of write and read; outlives a copy that is late
  DeviceUuid uuid_{};
  std::string name_{};
  DeviceAbilities abilities_{};
  std::size_t granularity_ = std::size_t{2} << 20;
};

/// Makes the context current in this thread, and lets it allocate while some stream is captured
/// into a graph. The end restores both, also when no context was current.
class Current {
 public:
  explicit Current(const DeviceContext& context);
  ~Current();
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

}  // namespace ferry::fabric

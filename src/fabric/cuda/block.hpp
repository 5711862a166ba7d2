// One piece of GPU memory as one GPU of this process sees it: made here, or a peer's.
#pragma once
#include <cstddef>
#include <memory>
#include <span>

#include "fabric/cuda/context.hpp"

namespace ferry::fabric {

/// Freed or unmapped at its end; the memory itself goes with the last mapping of any process.
class DeviceBlock {
 public:
  DeviceBlock(std::shared_ptr<DeviceContext> context, std::size_t bytes)
      : context_(std::move(context)), bytes_(bytes) {}
  ~DeviceBlock();
  DeviceBlock(const DeviceBlock&) = delete;
  DeviceBlock& operator=(const DeviceBlock&) = delete;

  CUdeviceptr address() const noexcept { return address_; }
  std::byte* data() const noexcept { return reinterpret_cast<std::byte*>(address_); }
  std::size_t bytes() const noexcept { return bytes_; }
  DeviceContext& context() const noexcept { return *context_; }
  bool vmm() const noexcept { return kind_ == Kind::mapped; }

  /// VMM memory of this GPU that these ordinals of this process may use. With `descriptor`, it can
  /// be shared, and that is set to a file descriptor which the caller closes. Throws CallRefused.
  static std::shared_ptr<DeviceBlock> make_vmm(std::shared_ptr<DeviceContext> context,
                                               std::size_t bytes, std::span<const int> users,
                                               int* descriptor);
  /// VMM memory of another process, mapped for this GPU. Throws CallRefused.
  static std::shared_ptr<DeviceBlock> map_vmm(std::shared_ptr<DeviceContext> context,
                                              std::size_t bytes, int descriptor);
  /// The same by a handle that needs no descriptor. Throws CallRefused.
  static std::shared_ptr<DeviceBlock> make_fabric(std::shared_ptr<DeviceContext> context,
                                                  std::size_t bytes, std::span<const int> users,
                                                  CUmemFabricHandle& handle);
  static std::shared_ptr<DeviceBlock> map_fabric(std::shared_ptr<DeviceContext> context,
                                                 std::size_t bytes, CUmemFabricHandle handle);
  /// Memory of the classic kind. With `handle`, it can be shared. Throws CallRefused.
  static std::shared_ptr<DeviceBlock> make_classic(std::shared_ptr<DeviceContext> context,
                                                   std::size_t bytes, CUipcMemHandle* handle);
  /// Classic memory of another process. Throws CallRefused, also when it is smaller than `bytes`.
  static std::shared_ptr<DeviceBlock> open_ipc(std::shared_ptr<DeviceContext> context,
                                               std::size_t bytes, const CUipcMemHandle& handle);

 private:
  enum class Kind { none, reserved, mapped, allocated, opened };

  void map(CUmemGenericAllocationHandle memory, std::span<const int> users);

  std::shared_ptr<DeviceContext> context_;
  std::size_t bytes_;
  CUdeviceptr address_ = 0;
  Kind kind_ = Kind::none;
};

/// Lets this GPU use classic memory that another GPU of this process has allocated. Throws
/// CallRefused.
void enable_peer(const DeviceContext& user, const DeviceContext& owner);

}  // namespace ferry::fabric

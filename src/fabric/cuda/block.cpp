#include "fabric/cuda/block.hpp"

#include <fcntl.h>

#include <utility>
#include <vector>

namespace ferry::fabric {
namespace {

/// A handle of physical memory; what is mapped stays without it.
class Physical {
 public:
  Physical() = default;
  ~Physical() {
    if (made_) driver().cuMemRelease(handle_);
  }
  Physical(const Physical&) = delete;
  Physical& operator=(const Physical&) = delete;
  CUmemGenericAllocationHandle get() const { return handle_; }
  CUmemGenericAllocationHandle* fill() {
    made_ = true;
    return &handle_;
  }
  void failed() { made_ = false; }

 private:
  CUmemGenericAllocationHandle handle_ = 0;
  bool made_ = false;
};

template <typename Call>
void make(Physical& physical, const char* name, Call&& call) {
  const CUresult result = call(physical.fill());
  if (result != CUDA_SUCCESS) physical.failed();
  check(result, name);
}

}  // namespace

DeviceBlock::~DeviceBlock() {
  if (kind_ == Kind::none || !context_->usable()) return;
  const Driver& cu = driver();
  try {
    const Current current(*context_);
    if (kind_ == Kind::mapped) cu.cuMemUnmap(address_, bytes_);
    if (kind_ == Kind::mapped || kind_ == Kind::reserved) cu.cuMemAddressFree(address_, bytes_);
    if (kind_ == Kind::allocated) cu.cuMemFree(address_);
    if (kind_ == Kind::opened) cu.cuIpcCloseMemHandle(address_);
  } catch (const CallRefused&) {
    // The driver has shut down, and the memory with it.
  }
}

void DeviceBlock::map(CUmemGenericAllocationHandle memory, std::span<const int> users) {
  const Driver& cu = driver();
  check(cu.cuMemAddressReserve(&address_, bytes_, 0, 0, 0), "cuMemAddressReserve");
  kind_ = Kind::reserved;
  check(cu.cuMemMap(address_, bytes_, 0, memory, 0), "cuMemMap");
  kind_ = Kind::mapped;
  std::vector<CUmemAccessDesc> access;
  for (const int user : users) {
    CUmemAccessDesc entry{};
    entry.location = {CU_MEM_LOCATION_TYPE_DEVICE, user};
    entry.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    access.push_back(entry);
  }
  check(cu.cuMemSetAccess(address_, bytes_, access.data(), access.size()), "cuMemSetAccess");
}

namespace {

void create(Physical& physical, const DeviceContext& context, std::size_t bytes,
            CUmemAllocationHandleType handles) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = handles;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, context.device()};
  properties.allocFlags.gpuDirectRDMACapable = context.abilities().rdma_vmm ? 1 : 0;
  make(physical, "cuMemCreate",
       [&](auto* out) { return driver().cuMemCreate(out, bytes, &properties, 0); });
}

void import(Physical& physical, void* handle, CUmemAllocationHandleType type) {
  make(physical, "cuMemImportFromShareableHandle",
       [&](auto* out) { return driver().cuMemImportFromShareableHandle(out, handle, type); });
}

}  // namespace

std::shared_ptr<DeviceBlock> DeviceBlock::make_vmm(std::shared_ptr<DeviceContext> context,
                                                   std::size_t bytes, std::span<const int> users,
                                                   int* descriptor) {
  const Current current(*context);
  Physical physical;
  create(physical, *context, bytes,
         descriptor ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE);
  auto block = std::make_shared<DeviceBlock>(std::move(context), bytes);
  block->map(physical.get(), users);
  if (descriptor != nullptr) {
    int exported = -1;
    check(driver().cuMemExportToShareableHandle(&exported, physical.get(),
                                                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
          "cuMemExportToShareableHandle");
    fcntl(exported, F_SETFD, FD_CLOEXEC);
    *descriptor = exported;
  }
  return block;
}

std::shared_ptr<DeviceBlock> DeviceBlock::map_vmm(std::shared_ptr<DeviceContext> context,
                                                  std::size_t bytes, int descriptor) {
  const Current current(*context);
  // The driver takes the descriptor's number where it would take a pointer.
  void* number = reinterpret_cast<void*>(static_cast<std::intptr_t>(descriptor));
  Physical physical;
  import(physical, number, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  const int user = context->ordinal();
  auto block = std::make_shared<DeviceBlock>(std::move(context), bytes);
  block->map(physical.get(), std::span(&user, 1));
  return block;
}

std::shared_ptr<DeviceBlock> DeviceBlock::make_fabric(std::shared_ptr<DeviceContext> context,
                                                      std::size_t bytes, std::span<const int> users,
                                                      CUmemFabricHandle& handle) {
  const Current current(*context);
  Physical physical;
  create(physical, *context, bytes, CU_MEM_HANDLE_TYPE_FABRIC);
  auto block = std::make_shared<DeviceBlock>(std::move(context), bytes);
  block->map(physical.get(), users);
  check(
      driver().cuMemExportToShareableHandle(&handle, physical.get(), CU_MEM_HANDLE_TYPE_FABRIC, 0),
      "cuMemExportToShareableHandle");
  return block;
}

std::shared_ptr<DeviceBlock> DeviceBlock::map_fabric(std::shared_ptr<DeviceContext> context,
                                                     std::size_t bytes, CUmemFabricHandle handle) {
  const Current current(*context);
  Physical physical;
  import(physical, &handle, CU_MEM_HANDLE_TYPE_FABRIC);
  const int user = context->ordinal();
  auto block = std::make_shared<DeviceBlock>(std::move(context), bytes);
  block->map(physical.get(), std::span(&user, 1));
  return block;
}

std::shared_ptr<DeviceBlock> DeviceBlock::make_classic(std::shared_ptr<DeviceContext> context,
                                                       std::size_t bytes, CUipcMemHandle* handle) {
  const Current current(*context);
  auto block = std::make_shared<DeviceBlock>(std::move(context), bytes);
  check(driver().cuMemAlloc(&block->address_, bytes), "cuMemAlloc");
  block->kind_ = Kind::allocated;
  if (handle != nullptr) {
    check(driver().cuIpcGetMemHandle(handle, block->address_), "cuIpcGetMemHandle");
  }
  return block;
}

std::shared_ptr<DeviceBlock> DeviceBlock::open_ipc(std::shared_ptr<DeviceContext> context,
                                                   std::size_t bytes,
                                                   const CUipcMemHandle& handle) {
  const Current current(*context);
  auto block = std::make_shared<DeviceBlock>(std::move(context), bytes);
  check(driver().cuIpcOpenMemHandle(&block->address_, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS),
        "cuIpcOpenMemHandle");
  block->kind_ = Kind::opened;
  CUdeviceptr start = 0;
  std::size_t there = 0;
  check(driver().cuMemGetAddressRange(&start, &there, block->address_), "cuMemGetAddressRange");
  if (start > block->address_ || there - (block->address_ - start) < bytes) {
    throw CallRefused(CUDA_ERROR_INVALID_VALUE, "size of the memory behind the handle");
  }
  return block;
}

void enable_peer(const DeviceContext& user, const DeviceContext& owner) {
  if (user.device() == owner.device()) return;
  const Current current(user);
  const CUresult result = driver().cuCtxEnablePeerAccess(owner.context(), 0);
  if (result != CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) check(result, "cuCtxEnablePeerAccess");
}

}  // namespace ferry::fabric

#include "fabric/cuda/context.hpp"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "fabric/cuda/pinned_memory.hpp"

namespace ferry::fabric {
namespace {

bool attribute(CUdevice device, CUdevice_attribute which) {
  int value = 0;
  return driver().cuDeviceGetAttribute(&value, which, device) == CUDA_SUCCESS && value != 0;
}

DeviceAbilities abilities_of(CUdevice device) {
  const bool mapped = attribute(device, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
  return {
      mapped && attribute(device, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED),
      attribute(device, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED),
      !attribute(device, CU_DEVICE_ATTRIBUTE_INTEGRATED),
      mapped && attribute(device, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED)};
}

}  // namespace

DeviceContext::DeviceContext(int ordinal) : ordinal_(ordinal) {
  const Driver& cu = driver();
  check(cu.cuDeviceGet(&device_, ordinal), "cuDeviceGet");
  std::array<char, 96> text{};
  check(cu.cuDeviceGetName(text.data(), 64, device_), "cuDeviceGetName");
  name_ = text.data();
  if (cu.cuDeviceGetPCIBusId(text.data(), 64, device_) == CUDA_SUCCESS) {
    name_ += std::string(" at ") + text.data();
  }
  CUuuid uuid{};
  check(cu.cuDeviceGetUuid(&uuid, device_), "cuDeviceGetUuid");
  std::memcpy(uuid_.data(), uuid.bytes, uuid_.size());
  abilities_ = abilities_of(device_);
  if (abilities_.vmm) {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, device_};
    std::size_t pages = 0;
    check(
        cu.cuMemGetAllocationGranularity(&pages, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
        "cuMemGetAllocationGranularity");
    if (pages > granularity_) granularity_ = pages;
  }
  check(cu.cuDevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain");
  try {
    const Current current(*this);
    word_ = std::make_shared<std::uint64_t>(0);
    // Of the highest priority: streams of one priority may share a queue of the GPU, and this one
    // must not come behind a kernel that waits for what it brings.
    int least = 0, greatest = 0;
    check(cu.cuCtxGetStreamPriorityRange(&least, &greatest), "cuCtxGetStreamPriorityRange");
    check(cu.cuStreamCreateWithPriority(&stream_, CU_STREAM_NON_BLOCKING, greatest),
          "cuStreamCreateWithPriority");
  } catch (...) {
    cu.cuDevicePrimaryCtxRelease(device_);
    throw;
  }
}

DeviceContext::~DeviceContext() {
  if (!usable()) return;
  try {
    const Current current(*this);
    driver().cuStreamDestroy(stream_);
  } catch (const CallRefused&) {
    // The driver has shut down: the process ends.
  }
  if (late_) new std::shared_ptr<std::byte>(zeros_);  // never given back
  driver().cuDevicePrimaryCtxRelease(device_);
}

bool DeviceContext::zero(CUdeviceptr to, std::size_t bytes,
                         std::chrono::steady_clock::time_point until) {
  constexpr std::size_t kPiece = std::size_t{4} << 20;
  if (zeros_ == nullptr) {
    zeros_ = pinned_memory(kPiece);
    std::memset(zeros_.get(), 0, kPiece);
  }
  const bool was_late = std::exchange(late_, true);  // until all is done, or if a call is refused
  for (std::size_t at = 0; at < bytes; at += kPiece) {
    check(driver().cuMemcpyHtoDAsync(to + at, zeros_.get(), std::min(kPiece, bytes - at), stream_),
          "cuMemcpyHtoDAsync");
  }
  const bool done = finished(until);
  late_ = was_late || !done;
  return done;
}

bool DeviceContext::write(CUdeviceptr to, std::uint64_t word,
                          std::chrono::steady_clock::time_point until) {
  *word_ = word;
  check(driver().cuMemcpyHtoDAsync(to, word_.get(), sizeof word, stream_), "cuMemcpyHtoDAsync");
  return finished(until);
}

bool DeviceContext::read(CUdeviceptr from, std::uint64_t& word,
                         std::chrono::steady_clock::time_point until) {
  check(driver().cuMemcpyDtoHAsync(word_.get(), from, sizeof word, stream_), "cuMemcpyDtoHAsync");
  const bool done = finished(until);
  if (done) word = *word_;
  return done;
}

bool DeviceContext::finished(std::chrono::steady_clock::time_point until) {
  for (;;) {
    const CUresult result = driver().cuStreamQuery(stream_);
    if (result == CUDA_SUCCESS) return true;
    if (result != CUDA_ERROR_NOT_READY) check(result, "cuStreamQuery");
    if (std::chrono::steady_clock::now() >= until) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

Current::Current(const DeviceContext& context) {
  check(driver().cuCtxPushCurrent(context.context()), "cuCtxPushCurrent");
  driver().cuThreadExchangeStreamCaptureMode(&mode_);
}

Current::~Current() {
  driver().cuThreadExchangeStreamCaptureMode(&mode_);
  CUcontext popped = nullptr;
  driver().cuCtxPopCurrent(&popped);
}

}  // namespace ferry::fabric

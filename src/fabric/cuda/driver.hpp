// The CUDA driver, found at run time: a program that links this starts on a machine without one.
#pragma once
#include <cuda.h>

#include <stdexcept>
#include <string>

namespace ferry::fabric {

// clang-format off
/// Of CUDA 12.0 and later.
#define FERRY_DRIVER_CALLS(X)                                                                     \
  X(cuInit) X(cuGetErrorName) X(cuGetErrorString) X(cuDeviceGet) X(cuDeviceGetCount)              \
  X(cuDeviceGetName) X(cuDeviceGetUuid) X(cuDeviceGetAttribute) X(cuDeviceCanAccessPeer)          \
  X(cuDeviceGetPCIBusId) X(cuDevicePrimaryCtxRetain) X(cuDevicePrimaryCtxRelease)                 \
  X(cuDevicePrimaryCtxGetState) X(cuCtxPushCurrent) X(cuCtxPopCurrent) X(cuCtxEnablePeerAccess)   \
  X(cuThreadExchangeStreamCaptureMode) X(cuMemGetInfo) X(cuMemAlloc) X(cuMemFree)                 \
  X(cuMemGetAddressRange) X(cuIpcGetMemHandle) X(cuIpcOpenMemHandle) X(cuIpcCloseMemHandle)       \
  X(cuMemGetAllocationGranularity) X(cuMemCreate) X(cuMemRelease) X(cuMemAddressReserve)          \
  X(cuMemAddressFree) X(cuMemMap) X(cuMemUnmap) X(cuMemSetAccess)                                 \
  X(cuMemExportToShareableHandle) X(cuMemImportFromShareableHandle)                               \
  X(cuStreamCreateWithPriority) X(cuCtxGetStreamPriorityRange) X(cuStreamDestroy)                 \
  X(cuStreamQuery) X(cuMemHostAlloc) X(cuCtxGetDevice) X(cuPointerGetAttribute)                   \
  X(cuMemcpyHtoDAsync) X(cuMemcpyDtoHAsync) X(cuStreamWaitValue32)               \
  X(cuStreamWriteValue32)
// clang-format on

/// A member for each; cuda.h's macros rename declaration and use alike.
struct Driver {
#define FERRY_DRIVER_MEMBER(name) decltype(&::name) name = nullptr;
  FERRY_DRIVER_CALLS(FERRY_DRIVER_MEMBER)
#undef FERRY_DRIVER_MEMBER
  std::string problem{};  ///< why there is no driver; empty: all calls are there
};

/// Loaded and initialised at the first call; any thread. Check `problem` before any call.
const Driver& driver();

/// A driver call that was refused; whoever knows rank and peer turns it into a ferry::Error.
class CallRefused : public std::runtime_error {
 public:
  CallRefused(CUresult result, const char* call);
  CUresult result() const noexcept { return result_; }

 private:
  CUresult result_;
};

/// Throws CallRefused unless the call succeeded.
inline void check(CUresult result, const char* call) {
  if (result != CUDA_SUCCESS) throw CallRefused(result, call);
}

}  // namespace ferry::fabric

#include "cuda/runtime/runtime.hpp"

#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "fabric/cuda/driver.hpp"
#include "ferry/error.hpp"

namespace ferry::cuda {

void check(cudaError_t result, const char* call) {
  if (result == cudaSuccess) return;
  const bool memory = result == cudaErrorMemoryAllocation;
  throw Error(memory ? ErrorKind::exhausted : ErrorKind::system,
              std::string("CUDA: ") + call + ": " + cudaGetErrorName(result) + ", " +
                  cudaGetErrorString(result));
}

void check_driver(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return;
  throw Error(ErrorKind::system, fabric::CallRefused(result, call).what());
}

namespace {

const fabric::Driver& checked_driver() {
  const fabric::Driver& driver = fabric::driver();
  if (!driver.problem.empty()) throw Error(ErrorKind::system, "CUDA: " + driver.problem);
  return driver;
}

/// What the runtime uses on a device; kept until the process ends, or somebody resets the device.
CUcontext primary_context(int ordinal) {
  static std::mutex mutex;
  static std::map<int, CUcontext> kept;
  const fabric::Driver& driver = checked_driver();
  std::scoped_lock lock(mutex);
  CUdevice device = 0;
  unsigned flags = 0;
  int active = 0;
  check_driver(driver.cuDeviceGet(&device, ordinal), "cuDeviceGet");
  check_driver(driver.cuDevicePrimaryCtxGetState(device, &flags, &active),
               "cuDevicePrimaryCtxGetState");
  CUcontext& context = kept[ordinal];
  if (context == nullptr || active == 0) {
    check_driver(driver.cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  }
  return context;
}

}  // namespace

// Not by cudaSetDevice: going back to a device that the thread has never used would make a context
// there, which takes memory of it, and waits for whatever this process waits for in CUDA.
OnDevice::OnDevice(int device) {
  int current = -1;
  check(cudaGetDevice(&current), "cudaGetDevice");
  if (current != device) {
    const CUcontext context = primary_context(device);
    check_driver(fabric::driver().cuCtxPushCurrent(context), "cuCtxPushCurrent");
    pushed_ = true;
  }
  cudaThreadExchangeStreamCaptureMode(&mode_);
}

OnDevice::~OnDevice() {
  cudaThreadExchangeStreamCaptureMode(&mode_);
  CUcontext popped = nullptr;
  if (pushed_) fabric::driver().cuCtxPopCurrent(&popped);
}

cudaStream_t make_urgent_stream() {
  int least = 0, greatest = 0;
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest),
        "cudaStreamCreateWithPriority");
  return stream;
}

Capture capture_of(cudaStream_t stream) {
  Capture capture;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
#if CUDART_VERSION >= 13000
  const cudaError_t result = cudaStreamGetCaptureInfo(stream, &status, &capture.id, &capture.graph,
                                                      nullptr, nullptr, nullptr);
#else
  const cudaError_t result =
      cudaStreamGetCaptureInfo_v2(stream, &status, &capture.id, &capture.graph, nullptr, nullptr);
#endif
  if (result == cudaErrorStreamCaptureImplicit) {
    (void)cudaGetLastError();
    throw Error(ErrorKind::unsupported,
                "the default CUDA stream cannot be used while another stream is captured into a "
                "graph; give a stream of your own");
  }
  check(result, "cudaStreamGetCaptureInfo");
  if (status == cudaStreamCaptureStatusInvalidated) {
    throw Error(ErrorKind::unsupported, "the capture of this CUDA stream has been invalidated");
  }
  capture.active = status == cudaStreamCaptureStatusActive;
  return capture;
}

bool is_capturing(cudaStream_t stream) noexcept {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) {
    (void)cudaGetLastError();
    return true;
  }
  return status != cudaStreamCaptureStatusNone;
}

unsigned long long id_of(cudaStream_t stream) {
  unsigned long long id = 0;
  check(cudaStreamGetId(stream, &id), "cudaStreamGetId");
  return id;
}

namespace {

using Things = std::vector<std::shared_ptr<void>>;

/// Runs in a thread of the driver, where no CUDA call is allowed; what ends there may make some.
void CUDART_CB drop_things(void* pointer) {
  std::thread([things = static_cast<Things*>(pointer)] { delete things; }).detach();
}

}  // namespace

void keep_with_graph(cudaGraph_t graph, Things things) {
  auto held = std::make_unique<Things>(std::move(things));
  cudaUserObject_t object = nullptr;
  check(cudaUserObjectCreate(&object, held.get(), drop_things, 1, cudaUserObjectNoDestructorSync),
        "cudaUserObjectCreate");
  held.release();  // the object's now
  const cudaError_t result = cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
  if (result != cudaSuccess) cudaUserObjectRelease(object, 1);
  check(result, "cudaGraphRetainUserObject");
}

EventPool::~EventPool() {
  for (cudaEvent_t event : free_) cudaEventDestroy(event);
}

GpuEvent EventPool::take() {
  cudaEvent_t event = nullptr;
  {
    std::scoped_lock lock(mutex_);
    if (!free_.empty()) {
      event = free_.back();
      free_.pop_back();
    }
  }
  if (event == nullptr) {
    const OnDevice here(device_);
    const unsigned flags = timed_ ? cudaEventDefault : cudaEventDisableTiming;
    check(cudaEventCreateWithFlags(&event, flags), "cudaEventCreateWithFlags");
  }
  return {event, [pool = shared_from_this()](cudaEvent_t done) {
            std::scoped_lock lock(pool->mutex_);
            pool->free_.push_back(done);
          }};
}

GpuEvent EventPool::record(cudaStream_t stream) noexcept {
  try {
    GpuEvent event = take();
    if (cudaEventRecord(event.get(), stream) == cudaSuccess) return event;
    (void)cudaGetLastError();
  } catch (...) {  // the GPU or the process is going away
  }
  return nullptr;
}

bool is_done(const GpuEvent& event) {
  if (!event) return true;
  const cudaError_t result = cudaEventQuery(event.get());
  if (result == cudaErrorNotReady) {
    (void)cudaGetLastError();
    return false;
  }
  check(result, "cudaEventQuery");
  return true;
}

}  // namespace ferry::cuda
